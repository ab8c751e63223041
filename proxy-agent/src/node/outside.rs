//! A host that is no node: finds out which of the cluster's addresses it reaches, and makes routes where it may.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use ipnet::IpNet;

use super::Node;
use crate::desired::Desired;
use crate::health::{Health, Problem};
use crate::model::{Lead, Peer, Unreachable};
use crate::net::link::Link;
use crate::net::pod_route::{Hop, PodRoutes};
use crate::net::role::{self, Role, role};
use crate::net::{Handle, fib};
use crate::settings;

pub(super) struct Outside {
    handle: Handle,
    /// Only if we may make any.
    pod_routes: Option<PodRoutes>,
    /// The nodes for which the routes were made.
    peers: BTreeMap<String, Peer>,
    /// Routes may have changed since they were asked.
    stale: bool,
    /// What [`Health`] was told of Services.
    reported: BTreeSet<Problem>,
}

impl Outside {
    pub(super) fn new(handle: Handle, routing: settings::PodRoutes) -> Self {
        let pod_routes = (routing == settings::PodRoutes::Nodes).then(|| PodRoutes::new(handle.clone()));
        Self { handle, pod_routes, peers: BTreeMap::new(), stale: true, reported: BTreeSet::new() }
    }

    /// The next [`Outside::scout`] has to ask for everything again.
    pub(super) fn routes_changed(&mut self) {
        self.stale = true;
    }

    /// Tells `desired` where this host's routes lead, with those that it makes. `anchor` is the anchor's interface index.
    pub(super) async fn scout(
        &mut self,
        desired: &mut Desired,
        links: &BTreeMap<u32, Link>,
        anchor: u32,
        health: &Health,
    ) -> Result<()> {
        let Some(outside) = desired.outside() else { return Ok(()) };
        let all = self.stale || *outside.nodes() != self.peers;
        // So that a failure below lets the next attempt begin anew.
        self.stale = true;
        if all {
            self.peers = outside.nodes().clone();
            self.make_routes(links, anchor, health).await?;
        }
        let addrs = if all { desired.addresses_to_reach() } else { desired.addresses_to_ask_for() };
        if all || !addrs.is_empty() {
            desired.learn_leads(fib::leads(&self.handle, &addrs, anchor).await?, all);
        }
        self.stale = false;
        Ok(())
    }

    async fn make_routes(&self, links: &BTreeMap<u32, Link>, anchor: u32, health: &Health) -> Result<()> {
        let Some(pod_routes) = &self.pod_routes else { return Ok(()) };
        let addrs = self.peers.values().flat_map(|peer| peer.addresses.iter().copied()).collect();
        let leads = fib::leads(&self.handle, &addrs, anchor).await?;
        let refused = pod_routes.reconcile(&hops(&self.peers, &leads, links)).await?;
        match refused.first() {
            None => health.end(&Problem::PodRoutes),
            Some(first) => health.begin(&Problem::PodRoutes, format!("{} refused, first {first}", refused.len())),
        }
        Ok(())
    }

    /// Names the Services of which nothing is reached.
    pub(super) fn report(&mut self, desired: &Desired, health: &Health) {
        let mut cut_off = BTreeSet::new();
        for (service, unreachable) in desired.cut_off() {
            let problem = Problem::Service(service.clone());
            health.begin(&problem, why(&unreachable));
            cut_off.insert(problem);
        }
        self.reported.difference(&cut_off).for_each(|problem| health.end(problem));
        self.reported = cut_off;
    }
}

impl Node {
    /// Whether this is no node.
    pub fn is_outside(&self) -> bool {
        self.outside.is_some()
    }

    /// Takes in that routes have changed, whoever did it.
    pub fn on_routes(&mut self) {
        self.outside.iter_mut().for_each(Outside::routes_changed);
    }

    /// Finds out what this host reaches, if it is no node.
    pub async fn scout(&mut self, desired: &mut Desired, health: &Health) -> Result<()> {
        let Some(outside) = self.outside.as_mut().filter(|_| !self.links.is_empty()) else { return Ok(()) };
        outside.scout(desired, &self.links, self.anchor.ifindex, health).await?;
        let hooks_lo = desired.has_own_backend();
        if self.hooks_lo != hooks_lo {
            self.hooks_lo = hooks_lo;
            self.attach(health);
        }
        Ok(())
    }

    pub fn role(&self, ifindex: u32) -> Option<Role> {
        self.links.get(&ifindex).map(|link| self.role_of(link))
    }

    /// Of a device behind which pods may be meant, see [`role::why_no_pod`].
    pub fn why_no_pod(&self, ifindex: u32) -> Option<String> {
        let link = self.links.get(&ifindex).filter(|_| !self.is_outside())?;
        role::why_no_pod(link, &self.links)
    }

    /// Outside of the cluster nobody's pods are told from other clients.
    pub(super) fn role_of(&self, link: &Link) -> Role {
        match role(link, &self.links) {
            Role::Device { pod: true } if self.outside.is_some() => {
                if link.master.is_some() {
                    Role::Ignored("its bridge is served")
                } else {
                    Role::Device { pod: false }
                }
            }
            role => role,
        }
    }
}

fn why(unreachable: &[&Unreachable]) -> String {
    let backends: BTreeSet<_> = unreachable.iter().map(|one| one.backend.ip()).collect();
    let first = unreachable.first().map(|one| format!(", first {}: {one}", one.backend)).unwrap_or_default();
    format!("this host reaches none of {} backends{first}", backends.len())
}

/// Through which neighbours pods are reached. Of two nodes that claim the same network the first by name counts.
fn hops(
    peers: &BTreeMap<String, Peer>,
    leads: &BTreeMap<std::net::IpAddr, Lead>,
    links: &BTreeMap<u32, Link>,
) -> BTreeMap<IpNet, Hop> {
    let mut hops = BTreeMap::new();
    for peer in peers.values() {
        // A Node may claim what it likes: whatever else this host sends must not go there.
        let is_narrow = |net: &&IpNet| !fib::is_default(net.addr().is_ipv4(), net.prefix_len());
        for net in peer.pod_cidrs.iter().filter(is_narrow) {
            let neighbour = peer.addresses.iter().filter(|ip| ip.is_ipv4() == net.addr().is_ipv4()).find_map(|ip| {
                let Some(&Lead::OnLink(device)) = leads.get(ip) else { return None };
                // Behind a tunnel there are no neighbours, only what its other end lets through.
                links.get(&device).filter(|link| link.ethernet).map(|_| Hop { gateway: *ip, device })
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
    use crate::net::link::LinkKind;
    use crate::net::role::Behind;

    #[test]
    fn routes_lead_through_neighbours_of_the_same_family() {
        let peers = BTreeMap::from([
            peer("a", &["192.0.2.11", "fd00::11"], &["10.244.1.0/24", "fd00:244:1::/64"]),
            peer("b", &["198.51.100.12"], &["10.244.2.0/24", "fd00:244:2::/64"]),
            peer("behind-a-tunnel", &["10.9.0.1"], &["10.244.3.0/24"]),
            peer("claims-a's", &["192.0.2.14"], &["10.244.1.0/24"]),
            peer("everything", &["192.0.2.11", "fd00::11"], &["0.0.0.0/0", "128.0.0.0/1", "::/0"]),
            peer("two-addresses", &["198.51.100.15", "192.0.2.15"], &["10.244.5.0/24"]),
        ]);
        let leads = [
            ("192.0.2.11", Lead::OnLink(2)),
            ("fd00::11", Lead::OnLink(2)),
            ("198.51.100.12", Lead::Routed),
            ("10.9.0.1", Lead::OnLink(3)),
            ("192.0.2.14", Lead::OnLink(2)),
            ("198.51.100.15", Lead::Default),
            ("192.0.2.15", Lead::OnLink(2)),
        ];
        let leads = leads.map(|(ip, lead)| (ip.parse().unwrap(), lead)).into();
        let links = BTreeMap::from([(2, link(2, true)), (3, link(3, false))]);
        let hops = hops(&peers, &leads, &links);
        let shown: Vec<_> =
            hops.iter().map(|(net, hop)| format!("{net} via {} dev {}", hop.gateway, hop.device)).collect();
        assert_eq!(
            shown,
            [
                "10.244.1.0/24 via 192.0.2.11 dev 2",
                "10.244.5.0/24 via 192.0.2.15 dev 2",
                "fd00:244:1::/64 via fd00::11 dev 2"
            ]
        );
    }

    fn peer(name: &str, addresses: &[&str], pod_cidrs: &[&str]) -> (String, Peer) {
        let addresses = addresses.iter().map(|ip| ip.parse().unwrap()).collect();
        let pod_cidrs = pod_cidrs.iter().map(|net| net.parse().unwrap()).collect();
        (name.to_owned(), Peer { addresses, pod_cidrs, ready: true })
    }

    fn link(index: u32, ethernet: bool) -> Link {
        Link {
            index,
            name: format!("dev{index}"),
            mac: None,
            mtu: 1500,
            kind: LinkKind::Physical,
            ethernet,
            master: None,
            peer_netns: false,
            queues: false,
            up: true,
            addrs: [].into(),
            behind: Behind::Nothing,
        }
    }
}
