//! What became of UDP flows: the counts that programs, views and metrics share.

use serde::{Deserialize, Serialize};

/// The port of DNS.
const DNS: u16 = 53;

/// The UDP flows to a Service port or a backend, as this node saw them since its agent started. A
/// flow is what a client sends from one port: most DNS clients send one question in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UdpOutcomes {
    /// The number of flows that the backend answered, in the table and ended.
    pub answered: u64,
    /// The number of flows that ended without an answer and without a refusal: 30 s after the last
    /// datagram, unless the node sets another timeout.
    pub unanswered: u64,
    /// The number of datagrams that the backend refused by an ICMP "port unreachable" instead of its
    /// first answer.
    pub refused: u64,
}

impl UdpOutcomes {
    /// Returns the counts since `before`. A count that decreased, because the agent restarted, is
    /// 0.
    #[must_use]
    pub const fn since(self, before: Self) -> Self {
        Self {
            answered: self.answered.saturating_sub(before.answered),
            unanswered: self.unanswered.saturating_sub(before.unanswered),
            refused: self.refused.saturating_sub(before.refused),
        }
    }

    /// Returns the sum of both. It saturates, because another node may report any number.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            answered: self.answered.saturating_add(other.answered),
            unanswered: self.unanswered.saturating_add(other.unanswered),
            refused: self.refused.saturating_add(other.refused),
        }
    }

    /// Returns the number of outcomes.
    pub const fn all(self) -> u64 {
        self.answered
            .saturating_add(self.unanswered)
            .saturating_add(self.refused)
    }

    /// Returns the answered flows of all, such as `97/100`; empty before the first outcome.
    pub fn text(self) -> String {
        match self.all() {
            0 => String::new(),
            all => format!("{}/{all}", self.answered),
        }
    }

    /// Returns true if an unanswered flow to the Service port with these outcomes is a failure: a
    /// backend has answered a flow, or the port is that of DNS. Syslog and the like are rightly
    /// unanswered.
    pub const fn expect_answers(self, port: u16) -> bool {
        self.answered > 0 || port == DNS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unanswered_flow_is_a_failure_where_a_backend_answers() {
        let of = |answered| UdpOutcomes {
            answered,
            unanswered: 3,
            refused: 1,
        };
        assert!(!of(0).expect_answers(514));
        assert!(of(0).expect_answers(53));
        assert!(of(1).expect_answers(514));
        assert_eq!(
            of(2).since(of(1)).plus(of(1)),
            UdpOutcomes {
                unanswered: 3,
                refused: 1,
                answered: 2
            }
        );
        assert_eq!((of(2).text(), of(2).all()), ("2/6".to_owned(), 6));
    }
}
