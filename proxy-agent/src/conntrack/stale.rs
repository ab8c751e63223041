//! Deletes kube-proxy's conntrack entries for frontends that kpx translates. The kernel keeps such
//! entries while packets come.
//!
//! With kpx no netfilter rule translates frontends. Packets of pods and of clients outside are
//! translated before netfilter, and a stale entry collides with their entry because the replies
//! look alike. The host's own packets pass netfilter untranslated on their way into the anchor,
//! where a stale entry sends them to a backend that may be gone. Netfilter's own entries for the
//! host's packets translate nothing, and kpx keeps them.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Instant;

use anyhow::{Context, Result};
use netlink_packet_netfilter::NetfilterProtoFamily;
use proxy_common::addr::{Addr, Proto};
use proxy_common::frontend::{Frontend, Service};
use tracing::{debug, info};

use super::{COUNT, Reconciled, is_denied};
use proxy_core::ip_family::IpFamily;
use proxy_core::tables::{FamilyTables, Tables};
use proxy_net::conntrack::{self, Handle, Tuple};
use proxy_net::sysctl;

/// The addresses and ports that clients dial by UDP.
#[derive(Clone, Debug, Default)]
pub struct Frontends {
    /// The dialled addresses and ports. A node port has the unspecified address.
    dialled: BTreeSet<SocketAddr>,
    /// This node's addresses, at which node ports are dialled.
    own: BTreeSet<IpAddr>,
}

impl Frontends {
    /// Collects the UDP frontends; `own` are this node's addresses.
    pub fn of(tables: &Tables, own: BTreeSet<IpAddr>) -> Self {
        Self {
            dialled: dialled(&tables.v4).chain(dialled(&tables.v6)).collect(),
            own,
        }
    }

    pub(super) fn own(&self) -> &BTreeSet<IpAddr> {
        &self.own
    }

    fn has_any_of(&self, family: NetfilterProtoFamily) -> bool {
        self.dialled
            .iter()
            .any(|at| at.is_ipv4() == (family == NetfilterProtoFamily::IPv4))
    }

    fn has(&self, at: SocketAddr) -> bool {
        let any: IpAddr = if at.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let is_node_port = || self.dialled.contains(&SocketAddr::new(any, at.port()));
        self.dialled.contains(&at) || self.own.contains(&at.ip()) && is_node_port()
    }

    /// Returns true if an entry with these tuples translates a frontend's address or port.
    fn are_translated(&self, original: &Tuple, reply: &Tuple) -> bool {
        reply.src != original.dst && self.has(original.dst)
    }
}

/// Returns the UDP addresses and ports that clients dial, except redirected addresses: other
/// programs may translate those.
fn dialled<A: Addr>(tables: &FamilyTables<A>) -> impl Iterator<Item = SocketAddr> {
    let passes = |frontend: &Frontend<A>| {
        tables
            .services
            .get(&frontend.service)
            .is_some_and(|service| service.has(Service::ELSE_PASSES))
    };
    let udp = tables
        .frontends
        .iter()
        .filter(move |(key, frontend)| key.proto == Proto::UDP && !passes(frontend));
    udp.map(|(key, _)| key.socket_addr())
}

/// Deletes the entries that translate frontends. Returns the result for each family with frontends.
/// Does nothing if the kernel tracks no connections or hides them from this process.
pub(super) async fn remove(frontends: &Frontends) -> Result<Vec<Reconciled>> {
    if sysctl::read(COUNT)?.is_none_or(|count| count == "0") {
        return Ok(Vec::new());
    }
    let (connection, handle) = match conntrack::connect() {
        Ok(connected) => connected,
        Err(error) => {
            debug!(%error, "the kernel does not list its connections");
            return Ok(Vec::new());
        }
    };
    let remove_all = async {
        let mut done = Vec::new();
        for ip_family in IpFamily::ALL {
            let family = match ip_family {
                IpFamily::V4 => NetfilterProtoFamily::IPv4,
                IpFamily::V6 => NetfilterProtoFamily::IPv6,
            };
            if frontends.has_any_of(family) {
                let started = Instant::now();
                let deleted = remove_family(&handle, family, frontends)
                    .await
                    .with_context(|| ip_family.name())?;
                done.push(Reconciled {
                    ip_family,
                    deleted,
                    duration: started.elapsed(),
                });
            }
        }
        Ok(done)
    };
    let done = tokio::select! {
        done = remove_all => done,
        () = connection => Err(anyhow::anyhow!("the netlink socket has failed")),
    };
    match done {
        Err(error) if is_denied(&error) => {
            debug!(
                error = format!("{error:#}"),
                "the kernel does not list its connections"
            );
            Ok(Vec::new())
        }
        done => done,
    }
}

async fn remove_family(
    handle: &Handle,
    family: NetfilterProtoFamily,
    frontends: &Frontends,
) -> Result<u64> {
    let mut stale = Vec::new();
    let listed = handle.list(family, |entry| {
        if frontends.are_translated(&entry.original, &entry.reply) {
            stale.push(entry);
        }
    });
    listed.await.context("list connections")?;
    let mut deleted = 0;
    for entry in &stale {
        debug!(original = ?entry.original, reply = ?entry.reply, "stale connection");
        let was_there = handle.delete(family, entry).await;
        deleted += u64::from(
            was_there.with_context(|| format!("delete the connection {:?}", entry.original))?,
        );
    }
    if deleted > 0 {
        info!(
            deleted,
            ?family,
            "deleted stale UDP connections of the kernel"
        );
    }
    Ok(deleted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proxy_core::builders::{listed, service};
    use proxy_core::desired::Desired;

    #[test]
    fn only_an_entry_that_translates_a_udp_frontend_is_stale() {
        let mut desired = Desired::new("here");
        listed().into_iter().for_each(|input| desired.apply(input));
        let dns = service("dns")
            .cluster_ip("10.96.0.10")
            .cluster_ip("fd00:96::a")
            .type_("NodePort")
            .port("", "UDP", 53)
            .node_port(30053);
        desired.apply(dns.external_ip("198.51.100.7").into());
        desired.apply(service("web").cluster_ip("10.96.0.11").tcp(53).into());
        desired.sync();
        let own = ["192.0.2.1", "fd00::1"].map(|ip| ip.parse().unwrap());
        let frontends = Frontends::of(desired.tables(), own.into());
        let pod = "10.244.0.5:4444";
        let backend = "10.244.1.7:5353";
        let cases = [
            ("a ClusterIP", pod, "10.96.0.10:53", backend, true),
            (
                "the same of IPv6",
                "[fd00::5]:4444",
                "[fd00:96::a]:53",
                "[fd00::7]:5353",
                true,
            ),
            ("an external IP", pod, "198.51.100.7:53", backend, true),
            ("a node port", pod, "192.0.2.1:30053", backend, true),
            (
                "a node port by IPv6",
                "[fd00::5]:4444",
                "[fd00::1]:30053",
                "[fd00::7]:5353",
                true,
            ),
            (
                "only the port is translated",
                pod,
                "10.96.0.10:53",
                "10.96.0.10:5353",
                true,
            ),
            (
                "nothing is translated",
                pod,
                "10.96.0.10:53",
                "10.96.0.10:53",
                false,
            ),
            ("another port", pod, "10.96.0.10:54", backend, false),
            (
                "a service port of TCP",
                pod,
                "10.96.0.11:53",
                backend,
                false,
            ),
            (
                "a node port elsewhere",
                pod,
                "192.0.2.2:30053",
                backend,
                false,
            ),
            ("a backend", pod, backend, "10.244.1.8:5353", false),
        ];
        for (name, client, dialled, answers, want) in cases {
            let [client, dialled, answers] =
                [client, dialled, answers].map(|text| text.parse().unwrap());
            let original = Tuple {
                src: client,
                dst: dialled,
            };
            let reply = Tuple {
                src: answers,
                dst: client,
            };
            assert_eq!(frontends.are_translated(&original, &reply), want, "{name}");
        }
    }
}
