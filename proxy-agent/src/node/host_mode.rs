//! Serves host mode: finds the cluster's addresses that this host reaches, and makes routes to pods
//! if allowed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::Result;
use ipnet::IpNet;
use tracing::info;

use crate::choices;
use proxy_core::desired::Desired;
use proxy_core::input::ObjectName;
use proxy_core::model::{ClusterRoute, RemoteNode, Unreachable};
use proxy_net::fib::RouteClass;
use proxy_net::link::{Link, LinkHeader};
use proxy_net::pod_route::{Hop, PodRoutes};
use proxy_net::{Handle, fib};
use proxy_source::health::{Health, Problem};

/// The routes of a host in host mode, and the cluster's addresses that they reach.
pub(super) struct HostMode {
    handle: Handle,
    /// kpx's own routes to pods, if allowed.
    pod_routes: Option<PodRoutes>,
    /// The nodes for which the routes were made.
    nodes: BTreeMap<String, RemoteNode>,
    /// Set if routes may have changed since the last look-up.
    stale: bool,
    /// The Services without a reachable backend, as logged.
    logged: BTreeSet<ObjectName>,
}

impl HostMode {
    pub(super) fn new(handle: Handle, routing: choices::PodRoutes) -> Self {
        let pod_routes =
            (routing == choices::PodRoutes::Nodes).then(|| PodRoutes::new(handle.clone()));
        Self {
            handle,
            pod_routes,
            nodes: BTreeMap::new(),
            stale: true,
            logged: BTreeSet::new(),
        }
    }

    /// Makes the next [`HostMode::query_routes`] repeat all look-ups.
    pub(super) fn routes_changed(&mut self) {
        self.stale = true;
    }

    /// Makes kpx's own routes, then looks up this host's routes for `desired`. `anchor` is the
    /// anchor's interface index.
    pub(super) async fn query_routes(
        &mut self,
        desired: &mut Desired,
        links: &BTreeMap<u32, Link>,
        anchor: u32,
        health: &Health,
    ) -> Result<()> {
        let Some(cluster) = desired.host_mode() else {
            return Ok(());
        };
        let all = self.stale || *cluster.nodes() != self.nodes;
        // After a failure below, the next attempt starts over.
        self.stale = true;
        if all {
            self.nodes = cluster.nodes().clone();
            self.make_routes(links, anchor, health).await?;
        }
        let addrs = if all {
            desired.addresses_to_reach()
        } else {
            desired.addresses_to_ask_for()
        };
        if all || !addrs.is_empty() {
            desired.update_routes(routes(&self.handle, &addrs, anchor).await?, all);
        }
        self.stale = false;
        Ok(())
    }

    async fn make_routes(
        &self,
        links: &BTreeMap<u32, Link>,
        anchor: u32,
        health: &Health,
    ) -> Result<()> {
        let Some(pod_routes) = &self.pod_routes else {
            return Ok(());
        };
        let addrs = self
            .nodes
            .values()
            .flat_map(|node| node.addresses.iter().copied())
            .collect();
        let routes = routes(&self.handle, &addrs, anchor).await?;
        let refused = pod_routes
            .reconcile(&hops(&self.nodes, &routes, links))
            .await?;
        match refused.first() {
            None => health.end(&Problem::PodRoutes),
            Some(first) => health.begin(
                &Problem::PodRoutes,
                format!("{} refused, first {first}", refused.len()),
            ),
        }
        Ok(())
    }

    /// Logs the Services that become unreachable or reachable again. The machine works without
    /// them.
    pub(super) fn log(&mut self, desired: &Desired) {
        let cut_off = desired.cut_off();
        for (service, unreachable) in cut_off
            .iter()
            .filter(|(service, _)| !self.logged.contains(**service))
        {
            info!(%service, why = why_cut_off(unreachable), "out of reach");
        }
        for service in self
            .logged
            .iter()
            .filter(|service| !cut_off.contains_key(service))
        {
            info!(%service, "within reach");
        }
        self.logged = cut_off.into_keys().cloned().collect();
    }
}

/// Looks up the kernel's routes to these addresses.
async fn routes(
    handle: &Handle,
    addrs: &BTreeSet<IpAddr>,
    anchor: u32,
) -> Result<BTreeMap<IpAddr, ClusterRoute>> {
    let classes = fib::route_classes(handle, addrs, anchor).await?;
    let route = |class| match class {
        RouteClass::Own => ClusterRoute::Own,
        RouteClass::OnLink(device) => ClusterRoute::OnLink(device),
        RouteClass::Routed => ClusterRoute::Routed,
        RouteClass::Default => ClusterRoute::Default,
        RouteClass::Nowhere(why) => ClusterRoute::Nowhere(why),
    };
    Ok(classes
        .into_iter()
        .map(|(addr, class)| (addr, route(class)))
        .collect())
}

pub(crate) fn why_cut_off(unreachable: &[&Unreachable]) -> String {
    let backends: BTreeSet<_> = unreachable.iter().map(|one| one.backend.ip()).collect();
    let first = unreachable
        .first()
        .map(|one| format!(", first {}: {one}", one.backend))
        .unwrap_or_default();
    format!("this host reaches 0 of {} backends{first}", backends.len())
}

/// Returns the next hops to pods. If two nodes claim the same network, the first node by name gets
/// it.
fn hops(
    nodes: &BTreeMap<String, RemoteNode>,
    routes: &BTreeMap<IpAddr, ClusterRoute>,
    links: &BTreeMap<u32, Link>,
) -> BTreeMap<IpNet, Hop> {
    let mut hops = BTreeMap::new();
    for node in nodes.values() {
        // A Node may claim any network, but must not redirect this host's other traffic.
        let is_narrow = |net: &&IpNet| !fib::is_default(net.addr().is_ipv4(), net.prefix_len());
        for net in node.pod_cidrs.iter().filter(is_narrow) {
            let neighbour = node
                .addresses
                .iter()
                .filter(|ip| ip.is_ipv4() == net.addr().is_ipv4())
                .find_map(|ip| {
                    let Some(&ClusterRoute::OnLink(device)) = routes.get(ip) else {
                        return None;
                    };
                    // A tunnel has no neighbours, and admits only the packets that its peer allows.
                    links
                        .get(&device)
                        .filter(|link| link.header == LinkHeader::Ethernet)
                        .map(|_| Hop {
                            gateway: *ip,
                            device,
                        })
                });
            if let Some(hop) = neighbour {
                hops.entry(net.trunc()).or_insert(hop);
            }
        }
    }
    hops
}

#[cfg(test)]
mod tests {
    use super::*;
    use proxy_net::link::LinkKind;
    use proxy_net::role::FarEnd;

    #[test]
    fn routes_lead_through_neighbours_of_the_same_family() {
        let nodes = BTreeMap::from([
            node(
                "a",
                &["192.0.2.11", "fd00::11"],
                &["10.244.1.0/24", "fd00:244:1::/64"],
            ),
            node(
                "b",
                &["198.51.100.12"],
                &["10.244.2.0/24", "fd00:244:2::/64"],
            ),
            node("behind-a-tunnel", &["10.9.0.1"], &["10.244.3.0/24"]),
            node("claims-a's", &["192.0.2.14"], &["10.244.1.0/24"]),
            node(
                "everything",
                &["192.0.2.11", "fd00::11"],
                &["0.0.0.0/0", "128.0.0.0/1", "::/0"],
            ),
            node(
                "two-addresses",
                &["198.51.100.15", "192.0.2.15"],
                &["10.244.5.0/24"],
            ),
        ]);
        let routes = [
            ("192.0.2.11", ClusterRoute::OnLink(2)),
            ("fd00::11", ClusterRoute::OnLink(2)),
            ("198.51.100.12", ClusterRoute::Routed),
            ("10.9.0.1", ClusterRoute::OnLink(3)),
            ("192.0.2.14", ClusterRoute::OnLink(2)),
            ("198.51.100.15", ClusterRoute::Default),
            ("192.0.2.15", ClusterRoute::OnLink(2)),
        ];
        let routes = routes
            .map(|(ip, route)| (ip.parse().unwrap(), route))
            .into();
        let links = BTreeMap::from([
            (2, link(2, LinkHeader::Ethernet)),
            (3, link(3, LinkHeader::None)),
        ]);
        let hops = hops(&nodes, &routes, &links);
        let shown: Vec<_> = hops
            .iter()
            .map(|(net, hop)| format!("{net} via {} dev {}", hop.gateway, hop.device))
            .collect();
        assert_eq!(
            shown,
            [
                "10.244.1.0/24 via 192.0.2.11 dev 2",
                "10.244.5.0/24 via 192.0.2.15 dev 2",
                "fd00:244:1::/64 via fd00::11 dev 2"
            ]
        );
    }

    fn node(name: &str, addresses: &[&str], pod_cidrs: &[&str]) -> (String, RemoteNode) {
        let addresses = addresses.iter().map(|ip| ip.parse().unwrap()).collect();
        let pod_cidrs = pod_cidrs.iter().map(|net| net.parse().unwrap()).collect();
        (
            name.to_owned(),
            RemoteNode {
                addresses,
                pod_cidrs,
                ready: true,
            },
        )
    }

    fn link(index: u32, header: LinkHeader) -> Link {
        Link {
            index,
            name: format!("dev{index}"),
            mac: None,
            mtu: 1500,
            kind: LinkKind::Physical,
            header,
            master: None,
            peer_netns: false,
            queues: false,
            up: true,
            addrs: [].into(),
            far_end: FarEnd::Nothing,
            filtered: false,
            filtered_out: false,
            lacks_egress: false,
        }
    }
}
