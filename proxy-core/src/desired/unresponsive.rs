//! Finds the backends that have stopped answering with all others of their node: see [`crate::health`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use proxy_common::addr::{Addr, SockAddr};

use super::Desired;
use super::family::Family;
use crate::compact::Address;
use crate::health::{self, HealthMode, Path, Readings};

impl Desired {
    /// Returns the backends of nodes that look unresponsive, at a time in nanoseconds since boot. Their Services are of mode `on`.
    ///
    /// The cost grows with the endpoints of the Services that have late backends.
    pub fn unresponsive(&self, readings: &Readings, boot_ns: u64) -> BTreeSet<Path> {
        let late = readings.iter().filter(|(_, reading)| reading.owed.is_some_and(|owed| owed.is_late(boot_ns)));
        let services: BTreeSet<SocketAddr> = late.map(|(path, _)| path.service).collect();
        let by_node = services.into_iter().flat_map(|service| self.backends_by_node(service));
        let are_unresponsive = |paths: &Vec<Path>| {
            let owed: Vec<_> = paths.iter().map(|path| readings.get(path).and_then(|reading| reading.owed)).collect();
            health::are_unresponsive(&owed, boot_ns)
        };
        by_node.filter(are_unresponsive).flatten().collect()
    }

    /// Returns the backends of a service port of mode `on`, those of each node together. A backend whose node is unknown is left out.
    fn backends_by_node(&self, service: SocketAddr) -> Vec<Vec<Path>> {
        let Some(name) = self.service_of(service) else { return Vec::new() };
        let endpoints = self.store.slices_of(&name).flat_map(|slice| &slice.endpoints);
        let nodes: BTreeMap<IpAddr, &str> = endpoints
            .filter_map(|endpoint| match endpoint.address {
                Address::Ip(ip) => Some((ip, endpoint.node_name.as_deref().filter(|node| !node.is_empty())?)),
                Address::Text(_) | Address::Missing => None,
            })
            .collect();
        let backends = match service {
            SocketAddr::V4(_) => self.v4.judged(service),
            SocketAddr::V6(_) => self.v6.judged(service),
        };
        let mut by_node = BTreeMap::<&str, Vec<Path>>::new();
        for backend in backends {
            if let Some(node) = nodes.get(&backend.ip()) {
                by_node.entry(node).or_default().push(Path { service, backend });
            }
        }
        by_node.into_values().collect()
    }
}

impl<A: Addr> Family<A> {
    /// Returns the backends of a service port of mode `on`, also those that are set aside.
    fn judged(&self, service: SocketAddr) -> BTreeSet<SocketAddr> {
        let any = Path { service, backend: service };
        let backends = any.in_family::<A>().and_then(|(key, _)| {
            let port = self.holder(&key)?.ports.get(&key).filter(|port| port.health == HealthMode::On)?;
            let slots = port.cluster.iter().chain(port.local.iter());
            let serving = slots.map(|backend| SockAddr::new(backend.addr, backend.port).socket_addr());
            Some(serving.chain(port.aside.iter().map(SockAddr::socket_addr)).collect())
        });
        backends.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::connect::{Asked, DialTime, Voter, Votes};

    use super::*;
    use crate::builders::{listed, service, slice};
    use crate::health::{Owed, Reading};
    use crate::model::ModelOptions;

    const NOW: u64 = 70_000_000_000;
    const SERVICE: &str = "10.96.0.1:80";

    fn path(backend: u8) -> Path {
        Path { service: SERVICE.parse().unwrap(), backend: format!("10.244.0.{backend}:8080").parse().unwrap() }
    }

    /// A Service with four endpoints on each of two nodes, and one without a node. Returns what is unresponsive when these owe an answer.
    fn unresponsive(mode: HealthMode, late: &[u8]) -> Vec<Path> {
        let mut desired =
            Desired::with_options("here", ModelOptions { backend_health: mode, ..ModelOptions::default() });
        let web = service("web").cluster_ip("10.96.0.1").port("", "TCP", 80);
        let mut endpoints = slice("web-1", "web").tcp(8080);
        for nth in 1..=8 {
            endpoints = endpoints.ready(&format!("10.244.0.{nth}")).on(if nth <= 4 { "n2" } else { "n3" });
        }
        endpoints = endpoints.ready("10.244.0.9");
        listed().into_iter().chain([web.into(), endpoints.into()]).for_each(|input| desired.apply(input));
        desired.sync();
        // Those that are set aside count as well.
        desired.set_aside([path(4)].into());
        desired.sync();
        let sent = NOW - 400_000_000;
        let asked = |nth: u8| Asked::NOTHING.with(Voter(nth % 2), sent);
        let owed = |nth: u8| Owed { asked: asked(nth), last: DialTime::at(sent), is_prompt: true };
        let reading = |nth: u8| Reading { votes: Votes::NONE, answered: 9, owed: Some(owed(nth)) };
        let readings = late.iter().map(|nth| (path(*nth), reading(*nth))).collect();
        desired.unresponsive(&readings, NOW).into_iter().collect()
    }

    #[test]
    fn backends_that_owe_an_answer_speak_for_those_of_their_node() {
        for (mode, late, want) in [
            (HealthMode::On, &[1, 2, 3][..], &[1, 2, 3, 4][..]),
            (HealthMode::On, &[2, 3, 4, 5, 6], &[1, 2, 3, 4]),
            (HealthMode::On, &[1, 2, 3, 6, 7, 8], &[1, 2, 3, 4, 5, 6, 7, 8]),
            (HealthMode::On, &[1, 2, 5, 6, 9], &[]),
            (HealthMode::On, &[], &[]),
            (HealthMode::Observe, &[1, 2, 3], &[]),
        ] {
            let want: Vec<Path> = want.iter().map(|nth| path(*nth)).collect();
            assert_eq!(unresponsive(mode, late), want, "{mode:?} {late:?}");
        }
    }
}
