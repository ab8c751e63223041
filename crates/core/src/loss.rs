//! Finds backends that may have been lost with their nodes. The agent queries the API server for
//! node states and passes them in.
//!
//! ```text
//!   listed, serves ──▶ listed, fails ──────▶ suspect ◀────── not listed any more
//!        ▲                                    │   │ its node is there, for two minutes
//!        └──── listed, serves or terminates ──┘   └─────▶ forgotten, if it is not listed
//! ```
//!
//! The agent queries the node of each suspect with open connections, and ends these connections if
//! the node is lost. Terminating endpoints are not suspects: their connections end by agreement of
//! the peers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use crate::compact::Shared;
use crate::health::Path;
use crate::model::ObjectRef;

/// The node and state of an endpoint, from its EndpointSlice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    pub node: Shared,
    pub standing: Standing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    Serves,
    Terminates,
    /// Neither serves nor terminates: the probe fails, or the node has lost contact.
    Fails,
}

/// The TCP ports of Services with `reset-on-node-loss`, and their endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placements {
    /// The Service of each port, with its uid.
    pub services: BTreeMap<SocketAddr, (ObjectRef, Option<Box<str>>)>,
    pub endpoints: BTreeMap<Path, Placed>,
}

/// The time from the first report "node is there" until an unlisted endpoint is forgotten. The
/// control plane needs up to a minute to notice a dead node. Queries are irregular, so their number
/// means nothing.
const FORGET: Duration = Duration::from_secs(120);

/// The suspects among the endpoints.
#[derive(Debug, Default)]
pub struct Losses {
    /// The nodes of the endpoints in the last list.
    listed: BTreeMap<Path, Shared>,
    suspects: BTreeMap<Path, Suspect>,
    /// The endpoints whose connections the agent may have ended, until they serve again.
    ended: BTreeSet<Path>,
    back: BTreeSet<Path>,
}

#[derive(Debug)]
struct Suspect {
    node: Shared,
    is_listed: bool,
    /// The time of the first report "node is there".
    there: Option<Duration>,
}

impl Suspect {
    const fn new(node: Shared, is_listed: bool) -> Self {
        Self {
            node,
            is_listed,
            there: None,
        }
    }
}

impl Losses {
    /// Records the current endpoints.
    pub fn see(&mut self, now: &Placements) {
        let Self {
            listed,
            suspects,
            ended,
            back,
        } = self;
        suspects.retain(|path, _| now.services.contains_key(&path.service));
        ended.retain(|path| now.services.contains_key(&path.service));
        back.retain(|path| now.services.contains_key(&path.service));
        for (path, node) in std::mem::take(listed) {
            if now.services.contains_key(&path.service) && !now.endpoints.contains_key(&path) {
                suspects.insert(path, Suspect::new(node, false));
            }
        }
        for (path, Placed { node, standing }) in &now.endpoints {
            listed.insert(*path, node.clone());
            match standing {
                Standing::Fails => drop(suspects.insert(*path, Suspect::new(node.clone(), true))),
                Standing::Serves => {
                    suspects.remove(path);
                    back.extend(ended.take(path));
                }
                // The control plane also marks a dead node's pods as terminating when it evicts
                // them.
                Standing::Terminates => drop(suspects.remove(path)),
            }
        }
    }

    /// Records that connections to these endpoints were ended, perhaps only in part.
    pub fn were_ended(&mut self, paths: impl IntoIterator<Item = Path>) {
        self.ended.extend(paths);
    }

    /// Returns the endpoints that serve again after their connections were ended, until
    /// [`Self::were_spared`].
    pub const fn back(&self) -> &BTreeSet<Path> {
        &self.back
    }

    /// Records that the connections to these endpoints are no longer marked for a reset.
    pub fn were_spared(&mut self, paths: &BTreeSet<Path>) {
        self.back.retain(|path| !paths.contains(path));
    }

    /// Returns true if an endpoint on this node is still suspect.
    pub fn suspects_on(&self, path: &Path, node: &str) -> bool {
        self.suspects
            .get(path)
            .is_some_and(|suspect| *suspect.node == *node)
    }

    pub fn suspects(&self) -> impl Iterator<Item = (&Path, &Shared)> {
        self.suspects
            .iter()
            .map(|(path, suspect)| (path, &suspect.node))
    }

    /// Keeps only the suspects with open connections. Other suspects stay cleared until their
    /// endpoints change again, because no new connection goes there.
    pub fn have_flows(&mut self, flows: &BTreeSet<Path>) {
        self.suspects.retain(|path, _| flows.contains(path));
    }

    /// Records that a node is there. `now` counts from any fixed start.
    pub fn is_there(&mut self, node: &str, now: Duration) {
        self.suspects.retain(|_, suspect| {
            if suspect.is_listed || *suspect.node != *node {
                return true;
            }
            now.saturating_sub(*suspect.there.get_or_insert(now)) < FORGET
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builders::{listed, service, slice};
    use crate::desired::Desired;

    /// Returns the placements of two Services, only the first with the annotation, and the skipped
    /// fields. Each endpoint has an address, a node and its conditions.
    fn placements(
        annotation: &str,
        endpoints: &[(&str, &str, [bool; 3])],
    ) -> (Placements, Vec<String>) {
        let mut desired = Desired::new("here");
        let web = service("web")
            .cluster_ip("10.96.0.1")
            .tcp(80)
            .port("dns", "UDP", 53);
        let web = web.annotation("kpx.dev/reset-on-node-loss", annotation);
        let other = service("other").cluster_ip("10.96.0.2").tcp(80);
        let mut of_web = slice("web-1", "web").tcp(8080);
        let mut of_other = slice("other-1", "other").tcp(8080);
        for (addr, node, [ready, serving, terminating]) in endpoints {
            of_web = of_web
                .conditions(addr, *ready, *serving, *terminating)
                .on(node);
            of_other = of_other
                .conditions(addr, *ready, *serving, *terminating)
                .on(node);
        }
        let objects = [web.into(), other.into(), of_web.into(), of_other.into()];
        listed()
            .into_iter()
            .chain(objects)
            .for_each(|input| desired.apply(input));
        desired.sync();
        (
            desired.placements(),
            desired.skipped().map(ToString::to_string).collect(),
        )
    }

    fn path(backend: &str) -> Path {
        Path {
            service: "10.96.0.1:80".parse().unwrap(),
            backend: format!("{backend}:8080").parse().unwrap(),
        }
    }

    const SERVES: [bool; 3] = [true, true, false];
    const FAILS: [bool; 3] = [false, false, false];
    const DRAINS: [bool; 3] = [false, true, true];
    const TERMINATES: [bool; 3] = [false, false, true];

    /// Applies each state of the endpoint 10.244.1.1 on n1 in turn, next to a serving endpoint.
    /// `None` means unlisted.
    fn shown(states: &[Option<[bool; 3]>]) -> Losses {
        let mut losses = Losses::default();
        for state in states {
            let one = state.map(|state| ("10.244.1.1", "n1", state));
            let all: Vec<_> = [("10.244.2.1", "n2", SERVES)]
                .into_iter()
                .chain(one)
                .collect();
            losses.see(&placements("true", &all).0);
        }
        losses
    }

    fn suspects(losses: &Losses) -> Vec<(String, String)> {
        losses
            .suspects()
            .map(|(path, node)| (path.backend.ip().to_string(), node.to_string()))
            .collect()
    }

    #[test]
    fn endpoint_that_fails_or_leaves_is_suspect_and_one_that_terminates_is_not() {
        let rows: [(&[Option<[bool; 3]>], bool); 10] = [
            (&[Some(SERVES)], false),
            (&[Some(FAILS)], true),
            (&[Some(SERVES), Some(FAILS)], true),
            (&[Some(SERVES), None], true),
            (&[Some(FAILS), None, None], true),
            (&[Some(SERVES), Some(DRAINS)], false),
            (&[Some(SERVES), Some(TERMINATES)], false),
            (&[Some(FAILS), Some(TERMINATES)], false),
            (&[Some(SERVES), None, Some(SERVES)], false),
            (&[None], false),
        ];
        for (states, is_suspect) in rows {
            let want = if is_suspect {
                vec![("10.244.1.1".to_owned(), "n1".to_owned())]
            } else {
                Vec::new()
            };
            assert_eq!(suspects(&shown(states)), want, "{states:?}");
        }
    }

    #[test]
    fn only_tcp_ports_of_services_with_the_annotation_are_placed() {
        let endpoints = [("10.244.1.1", "n1", SERVES), ("10.244.0.1", "here", SERVES)];
        let (placed, skipped) = placements("true", &endpoints);
        assert_eq!(
            placed.endpoints.keys().collect::<Vec<_>>(),
            [&path("10.244.1.1")],
            "nor this node's own"
        );
        let services: Vec<_> = placed
            .services
            .iter()
            .map(|(at, (service, _))| format!("{at} {}", service.name))
            .collect();
        assert_eq!(
            (services, skipped),
            (vec!["10.96.0.1:80 default/web".to_owned()], vec![])
        );
        assert_eq!(
            placements("false", &endpoints),
            (Placements::default(), vec![])
        );
        let (placed, skipped) = placements("yes", &endpoints);
        let want = "Service default/web metadata.annotations[kpx.dev/reset-on-node-loss]: \"yes\" is not one of true, false";
        assert_eq!(
            (placed, skipped),
            (Placements::default(), vec![want.to_owned()])
        );
    }

    #[test]
    fn endpoint_that_serves_again_is_back_until_its_connections_are_spared() {
        let rows: [(&[Option<[bool; 3]>], bool); 5] = [
            (&[None, Some(SERVES)], true),
            (&[Some(SERVES)], true),
            (&[Some(SERVES), Some(FAILS)], true),
            (&[Some(FAILS)], false),
            (&[Some(TERMINATES)], false),
        ];
        let see = |losses: &mut Losses, state: Option<[bool; 3]>| {
            let one = state.map(|state| ("10.244.1.1", "n1", state));
            losses.see(&placements("true", &one.into_iter().collect::<Vec<_>>()).0);
        };
        for (states, is_back) in rows {
            let mut losses = shown(&[Some(SERVES), Some(FAILS)]);
            assert!(
                losses.suspects_on(&path("10.244.1.1"), "n1")
                    && !losses.suspects_on(&path("10.244.1.1"), "n2")
            );
            losses.were_ended([path("10.244.1.1")]);
            states.iter().for_each(|state| see(&mut losses, *state));
            assert_eq!(losses.back().len(), usize::from(is_back), "{states:?}");
            see(&mut losses, Some(SERVES));
            // The iteration over the flows failed, or covered another endpoint.
            losses.were_spared(&[path("10.244.2.1")].into());
            assert_eq!(*losses.back(), [path("10.244.1.1")].into(), "{states:?}");
            losses.were_spared(&[path("10.244.1.1")].into());
            see(&mut losses, Some(SERVES));
            assert_eq!(losses.back().len(), 0, "once");
        }
        let mut losses = shown(&[Some(SERVES), Some(FAILS)]);
        losses.were_ended([path("10.244.1.1")]);
        see(&mut losses, Some(SERVES));
        losses.see(&Placements::default());
        assert_eq!(losses.back().len(), 0, "the annotation is gone");
    }

    #[test]
    fn suspect_without_flows_or_without_its_service_is_forgotten() {
        let mut losses = shown(&[Some(SERVES), None]);
        losses.have_flows(&[path("10.244.1.1")].into());
        assert_eq!(suspects(&losses).len(), 1);
        losses.have_flows(&BTreeSet::new());
        assert_eq!(suspects(&losses).len(), 0);
        let mut losses = shown(&[Some(SERVES), None]);
        losses.see(&Placements::default());
        assert_eq!(suspects(&losses).len(), 0, "the annotation is gone");
    }

    #[test]
    fn node_that_is_there_for_long_clears_what_is_not_listed() {
        const SECOND: Duration = Duration::from_secs(1);
        for (states, is_kept) in [
            (&[Some(SERVES), None], false),
            (&[Some(SERVES), Some(FAILS)], true),
        ] {
            let mut losses = shown(states);
            // Changes of other endpoints cause frequent queries.
            for tenth in 0..1_000 {
                losses.is_there("n1", SECOND + SECOND * tenth / 10);
                losses.is_there("n2", SECOND + SECOND * tenth / 10);
            }
            losses.is_there("n2", FORGET * 2);
            assert_eq!(
                suspects(&losses).len(),
                1,
                "the control plane may still miss the node"
            );
            losses.is_there("n1", FORGET + SECOND);
            assert_eq!(suspects(&losses).len(), usize::from(is_kept));
        }
    }
}
