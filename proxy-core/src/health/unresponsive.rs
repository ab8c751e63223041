//! Finds the nodes whose backends have stopped answering all at once.
//!
//! Each connection goes to one backend of many, so evidence against each of a node's ten takes ten times as long as evidence against the
//! node. An endpoint's node is only what its EndpointSlice says, so each service port is judged by its own connections alone.

use proxy_common::connect::{Asked, DialTime, Votes};

/// The SYNs to which a backend owes an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owed {
    /// [`Asked::NOTHING`] if the backend has answered since the last one.
    pub asked: Asked,
    /// The moment of the last one, answered or not.
    pub last: DialTime,
    /// The backend has answered, and hardly ever late.
    pub is_prompt: bool,
}

impl Owed {
    /// Returns true if the backend was always prompt, and is late now.
    pub fn is_late(&self, boot_ns: u64) -> bool {
        self.is_prompt && self.asked.is_late(boot_ns)
    }
}

/// The late backends that speak for all of their node. A healthy node with so many dead backends is rarely taken for a dead one: the first
/// SYNs of its node would have to go to these.
const LATE: usize = 3;

/// Returns true if a node's backends of one service port look unresponsive, at a time in nanoseconds since boot. Each backend has what it owes;
/// None if it was sent no SYN of late.
///
/// Several are late, two clients wait for them, and no backend has answered a SYN that came after the first of those.
pub(crate) fn are_unresponsive(backends: &[Option<Owed>], boot_ns: u64) -> bool {
    let late: Vec<_> = backends.iter().flatten().filter(|owed| owed.is_late(boot_ns)).collect();
    let votes = late.iter().fold(Votes::NONE, |votes, owed| votes.together(owed.asked.votes()));
    let since = late.iter().map(|owed| owed.asked.waited(boot_ns)).max().unwrap_or(0);
    let has_answered = |owed: &Owed| owed.asked == Asked::NOTHING && owed.last.units_until(boot_ns) <= since;
    backends.len() > 1
        && late.len() >= backends.len().min(LATE)
        && votes.is_verdict()
        && !backends.iter().flatten().any(has_answered)
}

#[cfg(test)]
mod tests {
    use proxy_common::connect::Voter;

    use super::*;

    const NOW_MS: u64 = 70_000;
    const NOW: u64 = NOW_MS * 1_000_000;

    /// A backend that owes an answer to SYNs of so many milliseconds ago, each with its client.
    fn owes(syns: &[(u64, u8)]) -> Option<Owed> {
        let at = |ago: u64| (NOW_MS - ago) * 1_000_000;
        let asked = syns.iter().fold(Asked::NOTHING, |asked, (ago, client)| asked.with(Voter(*client), at(*ago)));
        let last = syns.last().map_or(DialTime::UNKNOWN, |(ago, _)| DialTime::at(at(*ago)));
        Some(Owed { asked, last, is_prompt: true })
    }

    /// A backend that has answered the SYN of so many milliseconds ago.
    fn answered(ago: u64) -> Option<Owed> {
        owes(&[(ago, 1)]).map(|owed| Owed { asked: Asked::NOTHING, ..owed })
    }

    #[test]
    fn three_late_backends_and_two_clients_speak_for_all_of_a_node() {
        let late = [owes(&[(400, 1)]), owes(&[(350, 2)]), owes(&[(320, 1)])];
        assert!(are_unresponsive(&[&late[..], &[None; 97]].concat(), NOW));
        assert!(
            are_unresponsive(&[&late[..], &[owes(&[(10, 1)]), answered(450)]].concat(), NOW),
            "and others know nothing"
        );
        let few = |late: &[_]| are_unresponsive(&[late, &[None; 7]].concat(), NOW);
        assert!(!few(&late[..2]), "two of nine");
        assert!(!few(&[late[0], late[2], owes(&[(320, 1)])]), "one client");
        assert!(!few(&[late[0], late[1], owes(&[(290, 2)])]), "the third may answer yet");
        assert!(!few(&[late[0], late[1], owes(&[(2_600, 2)])]), "the third is old");
        assert!(
            !few(&[late[0], late[1], owes(&[(320, 2)]).map(|owed| Owed { is_prompt: false, ..owed })]),
            "it is slow"
        );
    }

    #[test]
    fn backend_that_answers_speaks_for_its_node() {
        let late = [owes(&[(400, 1)]), owes(&[(350, 2)]), owes(&[(320, 1)])];
        for (ago, is_unresponsive) in [(0, false), (300, false), (399, false), (401, true), (2_000, true)] {
            assert_eq!(are_unresponsive(&[&late[..], &[answered(ago)]].concat(), NOW), is_unresponsive, "{ago}");
        }
    }

    #[test]
    fn node_with_few_backends_needs_all_of_them() {
        let two = [owes(&[(400, 1), (390, 1)]), owes(&[(350, 2)])];
        assert!(are_unresponsive(&two, NOW));
        assert!(!are_unresponsive(&two[..1], NOW), "a single one has evidence of its own");
        assert!(!are_unresponsive(&[two[0], None], NOW));
        assert!(!are_unresponsive(&[owes(&[(400, 1)]), owes(&[(350, 2)])], NOW), "two SYNs");
        assert!(!are_unresponsive(&[], NOW));
    }
}
