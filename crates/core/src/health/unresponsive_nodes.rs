//! Finds unresponsive nodes by their backends' unanswered SYNs.
//!
//! Evidence against each of ten backends takes ten times as long as evidence against their node.
//! EndpointSlices may name any node, so the evidence of each service port comes from its own
//! connections.

use proxy_common::connect::{Asked, DialTime};

/// A backend's recent unanswered SYNs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unanswered {
    /// The unanswered SYNs since the last answer.
    pub asked: Asked,
    /// The time of the last SYN with any response, even a RST. [`DialTime::UNKNOWN`] if there is
    /// none.
    pub heard: DialTime,
    /// The backend has answered, and almost always promptly.
    pub is_prompt: bool,
}

impl Unanswered {
    /// Returns true if a usually prompt backend is late.
    pub fn is_late(&self, boot_ns: u64) -> bool {
        self.is_prompt && self.asked.is_late(boot_ns)
    }

    fn was_heard_since(&self, since: DialTime) -> bool {
        self.heard != DialTime::UNKNOWN && !self.heard.is_before(since)
    }
}

/// A node's backends and their unanswered SYNs. `None` for a backend without a recent SYN.
pub(crate) struct NodeUnanswered {
    pub(crate) backends: Vec<Option<Unanswered>>,
    /// Set for this node. This node answers without a network, so its answers are no evidence about
    /// the network.
    pub(crate) is_here: bool,
}

/// The minimum number of late backends on a node.
const LATE: usize = 3;
/// The minimum number of late backends for each of two clients. A single lost SYN proves nothing.
const FOR_EACH_CLIENT: usize = 2;
const CLIENTS: usize = 2;
/// The minimum number of backends on other nodes that answered in the same time. Without these
/// answers the fault may be this node's or the network's.
const ANSWERED_ELSEWHERE: usize = 2;

impl NodeUnanswered {
    fn unanswered(&self) -> impl Iterator<Item = &Unanswered> {
        self.backends.iter().flatten()
    }

    fn late(&self, boot_ns: u64) -> impl Iterator<Item = &Unanswered> {
        self.unanswered()
            .filter(move |unanswered| unanswered.is_late(boot_ns))
    }
}

/// Returns the indexes of unresponsive nodes. `boot_ns` is the time since boot.
///
/// An unresponsive node has several late backends, for which two clients wait. None of its backends
/// has responded since the first of these SYNs, while backends of other nodes have answered SYNs
/// sent between the first and the last.
pub(crate) fn unresponsive(nodes: &[NodeUnanswered], boot_ns: u64) -> Vec<usize> {
    let all_late: usize = nodes.iter().map(|node| node.late(boot_ns).count()).sum();
    let is_unresponsive = |(place, node): &(usize, &NodeUnanswered)| {
        let late: Vec<_> = node.late(boot_ns).collect();
        let by_age = |unanswered: &&&Unanswered| unanswered.asked.since().units_until(boot_ns);
        let [Some(first), Some(last)] = [
            late.iter().max_by_key(by_age),
            late.iter().min_by_key(by_age),
        ]
        .map(|unanswered| unanswered.map(|it| it.asked.since())) else {
            return false;
        };
        let waits = |client: u32| {
            late.iter()
                .filter(|unanswered| unanswered.asked.votes().places() & 1 << client != 0)
                .count()
        };
        let clients = (0..u32::BITS)
            .filter(|client| waits(*client) >= FOR_EACH_CLIENT)
            .count();
        let others = nodes
            .iter()
            .enumerate()
            .filter(|(other, node)| other != place && !node.is_here);
        let is_answer = |unanswered: &&Unanswered| {
            unanswered.was_heard_since(first) && !last.is_before(unanswered.heard)
        };
        let answered_elsewhere = others
            .flat_map(|(_, node)| node.unanswered())
            .filter(is_answer)
            .count();
        late.len() >= node.backends.len().clamp(FOR_EACH_CLIENT, LATE)
            && clients >= CLIENTS
            && !node
                .unanswered()
                .any(|unanswered| unanswered.was_heard_since(first))
            && answered_elsewhere >= ANSWERED_ELSEWHERE.max(all_late - late.len() + 1)
    };
    nodes
        .iter()
        .enumerate()
        .filter(is_unresponsive)
        .map(|(place, _)| place)
        .collect()
}

#[cfg(test)]
mod tests {
    use proxy_common::connect::Voter;

    use super::*;

    const NOW_MS: u64 = 70_000;
    const NOW: u64 = NOW_MS * 1_000_000;

    fn ago(ms: u64) -> DialTime {
        DialTime::at((NOW_MS - ms) * 1_000_000)
    }

    /// A backend with unanswered SYNs (age in milliseconds, client). Its last response is three
    /// seconds old.
    fn unanswered_syns(syns: &[(u64, u8)]) -> Option<Unanswered> {
        let add = |asked: Asked, (ms, client): &(u64, u8)| {
            asked.with(Voter(*client), (NOW_MS - ms) * 1_000_000)
        };
        Some(Unanswered {
            asked: syns.iter().fold(Asked::NOTHING, add),
            heard: ago(3_000),
            is_prompt: true,
        })
    }

    /// A backend that answered the SYN of `ms` milliseconds ago.
    fn answered(ms: u64) -> Option<Unanswered> {
        Some(Unanswered {
            asked: Asked::NOTHING,
            heard: ago(ms),
            is_prompt: true,
        })
    }

    /// Ten backends, three of them late for two clients.
    fn cut_off() -> Vec<Option<Unanswered>> {
        let late = [
            unanswered_syns(&[(400, 1), (390, 2)]),
            unanswered_syns(&[(380, 2), (370, 1)]),
            unanswered_syns(&[(360, 1)]),
        ];
        [&late[..], &[None; 7]].concat()
    }

    fn answered_elsewhere() -> Vec<Option<Unanswered>> {
        vec![answered(370), answered(380), answered(20), None]
    }

    /// Evaluates a node with `backends` next to a node with `others`.
    fn judge(backends: &[Option<Unanswered>], others: &[Option<Unanswered>]) -> bool {
        let node = |backends: &[_]| NodeUnanswered {
            backends: backends.to_vec(),
            is_here: false,
        };
        unresponsive(&[node(others), node(backends)], NOW).contains(&1)
    }

    fn with(change: impl Fn(&mut Vec<Option<Unanswered>>)) -> bool {
        let mut backends = cut_off();
        change(&mut backends);
        judge(&backends, &answered_elsewhere())
    }

    #[test]
    fn three_late_backends_and_two_clients_speak_for_all_of_a_node() {
        assert!(with(|_| ()));
        assert!(
            with(|backends| backends[4] = unanswered_syns(&[(10, 1)])),
            "another one may answer yet"
        );
        assert!(!with(|backends| backends[0] = None), "two of ten");
        assert!(
            !with(|backends| backends[2] = unanswered_syns(&[(290, 2)])),
            "the third may answer yet"
        );
        assert!(
            !with(|backends| backends[2] = unanswered_syns(&[(2_600, 2)])),
            "the third is old"
        );
        assert!(!with(|backends| backends[2] = unanswered_syns(&[(360, 1)])
            .map(|unanswered| Unanswered {
                is_prompt: false,
                ..unanswered
            })));
        assert!(
            !with(|backends| backends[1] = unanswered_syns(&[(380, 1)])),
            "one SYN of the other client may be lost"
        );
    }

    #[test]
    fn backend_that_is_heard_of_speaks_for_its_node() {
        for (ms, is_unresponsive) in [
            (0, false),
            (300, false),
            (389, false),
            (391, true),
            (2_000, true),
        ] {
            assert_eq!(
                with(|backends| backends[5] = answered(ms)),
                is_unresponsive,
                "{ms}"
            );
            let again = unanswered_syns(&[(5, 1)]).map(|unanswered| Unanswered {
                heard: ago(ms),
                ..unanswered
            });
            assert_eq!(
                with(|backends| backends[5] = again),
                is_unresponsive,
                "{ms}, and a SYN after that"
            );
        }
    }

    #[test]
    fn other_nodes_must_have_answered_meanwhile() {
        for (others, is_unresponsive, why) in [
            (vec![], false, "there is no other one"),
            (vec![answered(370)], false, "one"),
            (
                vec![answered(20), answered(30)],
                false,
                "after the last late SYN",
            ),
            (
                vec![answered(500), answered(370)],
                false,
                "before the first",
            ),
            (vec![answered(370), answered(380)], true, "two"),
            (
                vec![answered(370), answered(380), unanswered_syns(&[(400, 1)])],
                true,
                "more than are late",
            ),
            (
                vec![
                    answered(370),
                    answered(380),
                    unanswered_syns(&[(400, 1)]),
                    unanswered_syns(&[(400, 1)]),
                ],
                false,
                "as many are late",
            ),
        ] {
            assert_eq!(judge(&cut_off(), &others), is_unresponsive, "{why}");
        }
        let here = NodeUnanswered {
            backends: answered_elsewhere(),
            is_here: true,
        };
        let there = || NodeUnanswered {
            backends: cut_off(),
            is_here: false,
        };
        assert_eq!(
            unresponsive(&[here, there()], NOW),
            [0; 0],
            "this node answers without a network"
        );
        let [one, other] = [
            there(),
            NodeUnanswered {
                backends: vec![answered(370); 5],
                is_here: false,
            },
        ];
        assert_eq!(
            unresponsive(&[one, other, there()], NOW),
            [0, 2],
            "two of three"
        );
    }

    #[test]
    fn node_with_few_backends_needs_all_of_them() {
        let two = [
            unanswered_syns(&[(400, 1), (395, 2)]),
            unanswered_syns(&[(350, 2), (345, 1)]),
        ];
        assert!(judge(&two, &answered_elsewhere()));
        assert!(
            !judge(&two[..1], &answered_elsewhere()),
            "a single one has evidence of its own"
        );
        assert!(!judge(&[two[0], None], &answered_elsewhere()));
        assert!(
            !judge(
                &[two[0], unanswered_syns(&[(350, 2)])],
                &answered_elsewhere()
            ),
            "one client waits for one of them"
        );
        assert!(!judge(&[], &answered_elsewhere()));
    }
}
