//! Finds the backends of unresponsive nodes: see [`crate::health`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use proxy_common::addr::{Addr, SockAddr};

use super::Desired;
use super::family::Family;
use crate::compact::Address;
use crate::health::{self, HealthMode, NodeUnanswered, Path, Readings};
use crate::input::ObjectName;

/// The maximum number of endpoints in one call, which bounds its time.
const ENDPOINTS: usize = 16_384;
/// The maximum number of endpoints of a Service. In larger Services only a backend's own failures
/// count.
const ENDPOINTS_OF_ONE: usize = 4_096;
/// The minimum number of late backends of a service port that warrants a check.
const LATE: usize = 2;

impl Desired {
    /// Returns the backends of each unresponsive node, separately for each service port in mode
    /// `on`. `boot_ns` is the time since boot.
    ///
    /// A call checks as many service ports as the endpoint limit allows. The next call continues at
    /// `turn`.
    pub fn unresponsive(
        &self,
        readings: &Readings,
        boot_ns: u64,
        turn: &mut Option<SocketAddr>,
    ) -> Vec<BTreeSet<Path>> {
        let mut late = BTreeMap::<SocketAddr, usize>::new();
        for (path, _) in readings.iter().filter(|(_, it)| {
            it.unanswered
                .is_some_and(|unanswered| unanswered.is_late(boot_ns))
        }) {
            *late.entry(path.service).or_default() += 1;
        }
        late.retain(|_, count| *count >= LATE);
        let from = turn
            .take()
            .map(|first| late.split_off(&first))
            .unwrap_or_default();
        let mut left = ENDPOINTS;
        let mut found = Vec::new();
        for port in from.into_keys().chain(late.into_keys()) {
            let Some(service) = self.service_of(port) else {
                continue;
            };
            let count = self
                .store
                .slices_of(&service)
                .map(|slice| slice.endpoints.len())
                .sum();
            match left.checked_sub(count) {
                _ if count > ENDPOINTS_OF_ONE => {}
                Some(rest) => {
                    left = rest;
                    found.extend(unresponsive(
                        self.nodes_of(&service, port),
                        readings,
                        boot_ns,
                    ));
                }
                None => _ = turn.get_or_insert(port),
            }
        }
        found
    }

    /// Returns the backends of a service port by node. Backends without a known node are omitted.
    fn nodes_of(&self, service: &ObjectName, port: SocketAddr) -> Vec<Backends> {
        let mut nodes = BTreeMap::<IpAddr, Option<&str>>::new();
        for endpoint in self
            .store
            .slices_of(service)
            .flat_map(|slice| &slice.endpoints)
        {
            if let Address::Ip(ip) = endpoint.address {
                let node = endpoint
                    .node_name
                    .as_deref()
                    .filter(|node| !node.is_empty());
                // An address may move to another node while its old endpoint terminates.
                nodes
                    .entry(ip)
                    .and_modify(|known| *known = known.filter(|known| node == Some(known)))
                    .or_insert(node);
            }
        }
        let backends = match port {
            SocketAddr::V4(_) => self.v4.judged(port),
            SocketAddr::V6(_) => self.v6.judged(port),
        };
        let all = backends.len();
        let mut by_node = BTreeMap::<&str, BTreeSet<Path>>::new();
        for backend in backends {
            if let Some(node) = nodes.get(&backend.ip()).copied().flatten() {
                by_node.entry(node).or_default().insert(Path {
                    service: port,
                    backend,
                });
            }
        }
        let here = self.store.node_name();
        let backends = by_node.into_iter().map(|(node, paths)| Backends {
            is_here: node == here,
            is_most: paths.len() * 2 > all,
            paths,
        });
        backends.collect()
    }
}

/// The backends of a service port on one node.
struct Backends {
    paths: BTreeSet<Path>,
    is_here: bool,
    /// Set if they exceed half of the backends, so that no set can lose them.
    is_most: bool,
}

fn unresponsive(nodes: Vec<Backends>, readings: &Readings, boot_ns: u64) -> Vec<BTreeSet<Path>> {
    let unanswered = |path| readings.get(path).and_then(|reading| reading.unanswered);
    let by_node = nodes.iter().map(|node| NodeUnanswered {
        backends: node.paths.iter().map(unanswered).collect(),
        is_here: node.is_here,
    });
    let found = health::unresponsive(&by_node.collect::<Vec<_>>(), boot_ns);
    let nodes = nodes.into_iter().enumerate();
    nodes
        .filter(|(nth, node)| found.contains(nth) && !node.is_most)
        .map(|(_, node)| node.paths)
        .collect()
}

impl<A: Addr> Family<A> {
    /// Returns the backends of a service port in mode `on`, including ejected ones.
    fn judged(&self, service: SocketAddr) -> BTreeSet<SocketAddr> {
        let any = Path {
            service,
            backend: service,
        };
        let backends = any.in_family::<A>().and_then(|(key, _)| {
            let port = self
                .holder(&key)?
                .ports
                .get(&key)
                .filter(|port| port.health == HealthMode::On)?;
            let slots = port.cluster.iter().chain(port.local.iter());
            let serving =
                slots.map(|backend| SockAddr::new(backend.addr, backend.port).socket_addr());
            Some(
                serving
                    .chain(port.ejected.iter().map(SockAddr::socket_addr))
                    .collect(),
            )
        });
        backends.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::connect::{Asked, DialTime, Voter, Votes};

    use super::*;
    use crate::builders::{listed, service, slice};
    use crate::health::{Evidence, Reading, Unanswered};
    use crate::model::ModelOptions;

    const NOW: u64 = 70_000_000_000;
    /// The time of all SYNs.
    const SENT: u64 = NOW - 400_000_000;

    fn path(service: u8, backend: u8) -> Path {
        Path {
            service: format!("10.96.0.{service}:80").parse().unwrap(),
            backend: format!("10.244.{service}.{backend}:8080").parse().unwrap(),
        }
    }

    /// Services with these numbers. Each has four endpoints on each of two nodes, four without a
    /// node, and three that are on two nodes.
    fn desired(mode: HealthMode, services: &[u8]) -> Desired {
        let mut desired = Desired::with_options(
            "here",
            ModelOptions {
                backend_health: mode,
                ..ModelOptions::default()
            },
        );
        listed().into_iter().for_each(|input| desired.apply(input));
        for nth in services {
            let name = format!("web{nth}");
            desired.apply(
                service(&name)
                    .cluster_ip(&format!("10.96.0.{nth}"))
                    .port("", "TCP", 80)
                    .into(),
            );
            let [mut one, mut other] =
                ["1", "2"].map(|end| slice(&format!("{name}-{end}"), &name).tcp(8080));
            for last in 1..=15 {
                let addr = format!("10.244.{nth}.{last}");
                one = one.ready(&addr);
                match last {
                    1..=4 => one = one.on("n2"),
                    5..=8 => one = one.on("n3"),
                    9..=12 => {}
                    _ => (one, other) = (one.on("n2"), other.ready(&addr).on("n3")),
                }
            }
            desired.apply(one.into());
            desired.apply(other.into());
        }
        desired.sync();
        desired
    }

    /// Returns readings of late backends and of backends that have answered.
    fn readings(service: u8, late: &[u8], answered: &[u8]) -> Readings {
        let asked = Asked::NOTHING.with(Voter(1), SENT).with(Voter(2), SENT);
        let reading = |(nth, is_late): (u8, bool)| {
            let (asked, heard) = if is_late {
                (asked, DialTime::UNKNOWN)
            } else {
                (Asked::NOTHING, DialTime::at(SENT))
            };
            let unanswered = Unanswered {
                asked,
                heard,
                is_prompt: true,
            };
            (
                path(service, nth),
                Reading {
                    votes: Votes::NONE,
                    answered: 9,
                    unanswered: Some(unanswered),
                },
            )
        };
        late.iter()
            .map(|nth| (*nth, true))
            .chain(answered.iter().map(|nth| (*nth, false)))
            .map(reading)
            .collect()
    }

    #[test]
    fn backends_that_owe_an_answer_speak_for_those_of_their_node() {
        for (mode, late, answered, want) in [
            (
                HealthMode::On,
                &[1, 2, 3][..],
                &[5, 6][..],
                &[1, 2, 3, 4][..],
            ),
            (HealthMode::On, &[2, 3, 4, 5], &[6, 7], &[1, 2, 3, 4]),
            (HealthMode::On, &[1, 2, 3], &[4, 5, 6], &[]),
            (HealthMode::On, &[1, 2, 5, 6], &[7, 8], &[]),
            (HealthMode::On, &[9, 10, 11], &[5, 6], &[]),
            (HealthMode::On, &[13, 14, 15], &[5, 6], &[]),
            (HealthMode::On, &[], &[], &[]),
            (HealthMode::Observe, &[1, 2, 3], &[5, 6], &[]),
        ] {
            let mut desired = desired(mode, &[1]);
            // Ejected backends count as well.
            desired.set_silent([(path(1, 4), Evidence::Own)].into());
            desired.sync();
            let found = desired.unresponsive(&readings(1, late, answered), NOW, &mut None);
            let want: Vec<Path> = want.iter().map(|nth| path(1, *nth)).collect();
            assert_eq!(
                found.into_iter().flatten().collect::<Vec<_>>(),
                want,
                "{mode:?} {late:?}"
            );
        }
    }

    #[test]
    fn looks_go_through_service_ports_in_turn() {
        let desired = desired(HealthMode::On, &[1, 2, 3]);
        let readings: Readings = (1..=3)
            .flat_map(|nth| readings(nth, &[1, 2, 3], &[5, 6]))
            .collect();
        let mut turn = Some(path(2, 1).service);
        let found = desired.unresponsive(&readings, NOW, &mut turn);
        let ports: Vec<_> = found
            .iter()
            .map(|paths| paths.first().unwrap().service)
            .collect();
        assert_eq!(
            (ports, turn),
            ([2, 3, 1].map(|nth| path(nth, 1).service).to_vec(), None)
        );
    }

    #[test]
    fn look_has_a_limit_of_endpoints() {
        let mut desired = desired(HealthMode::On, &[1, 2, 3, 4, 5, 6]);
        // With the other slices' 18 endpoints each, five of the Services exceed the limit.
        for (nth, count) in [
            (1, 4_078),
            (2, 4_000),
            (3, 4_000),
            (4, 4_000),
            (5, 4_000),
            (6, 4_079),
        ] {
            let mut more = slice(&format!("web{nth}-3"), &format!("web{nth}")).tcp(8080);
            for number in 0..count {
                more = more.ready(&format!(
                    "10.{}.{}.{}",
                    100 + nth,
                    number / 250,
                    number % 250
                ));
            }
            desired.apply(more.into());
        }
        desired.sync();
        let readings: Readings = (1..=6)
            .flat_map(|nth| readings(nth, &[1, 2, 3], &[5, 6]))
            .collect();
        let mut turn = None;
        let mut look = || {
            let found = desired.unresponsive(&readings, NOW, &mut turn);
            let services = found
                .iter()
                .map(|paths| paths.first().unwrap().service.to_string());
            services
                .map(|service| service["10.96.0.".len()..][..1].to_owned())
                .collect::<String>()
        };
        assert_eq!(
            [look(), look(), look()],
            ["1234", "5123", "4512"],
            "one has too many endpoints"
        );
    }
}
