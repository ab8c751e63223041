//! Shortens idle timeouts as the flow table fills up.

use proxy_common::addr::Proto;
use proxy_common::flow::{State, Timeouts};

/// How full a flow table is with flows that cannot be evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub enum Pressure {
    #[default]
    None,
    /// At least 80 % full: timeouts are halved, to at most 67 minutes for a TCP connection.
    High,
    /// At least 95 % full: timeouts are quartered, to at most 33 minutes for a TCP connection, and
    /// sweeps run without pauses.
    Emergency,
}

impl Pressure {
    pub(super) fn of(entries: u32, max_entries: u32) -> Self {
        let entries = u64::from(entries);
        let room = u64::from(max_entries);
        if entries * 20 >= room * 19 {
            Self::Emergency
        } else if entries * 5 >= room * 4 {
            Self::High
        } else {
            Self::None
        }
    }

    /// Returns the idle timeout of a flow in this state, in seconds.
    pub(super) fn timeout_secs(self, state: State, proto: Proto, timeouts: Timeouts) -> u32 {
        match self {
            Self::None => state.timeout_secs(proto, timeouts),
            Self::High => state.timeout_secs(proto, at_most(timeouts)) / 2,
            Self::Emergency => state.timeout_secs(proto, at_most(timeouts)) / 4,
        }
    }
}

/// Returns timeouts that let a full table drain within the hour; longer timeouts of the operator
/// apply below this pressure. Before the division, an established connection outlives the 2 h after
/// which keep-alives start (RFC 9293 §3.8.4).
fn at_most(timeouts: Timeouts) -> Timeouts {
    Timeouts {
        tcp_established: timeouts.tcp_established.min(8_100),
        tcp_half_closed: timeouts.tcp_half_closed.min(120),
        ..timeouts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fuller_table_waits_less() {
        let timeouts = |entries| {
            let pressure = Pressure::of(entries, 1_000);
            let states = [
                State::New,
                State::Answered,
                State::Established,
                State::Closed,
            ];
            states.map(|state| pressure.timeout_secs(state, Proto::TCP, Timeouts::DEFAULT))
        };
        assert_eq!(timeouts(799), [30, 60, 86_400, 60]);
        assert_eq!(timeouts(800), [15, 30, 4_050, 30]);
        assert_eq!(timeouts(949), [15, 30, 4_050, 30]);
        assert_eq!(timeouts(950), [7, 15, 2_025, 15]);
        assert_eq!(timeouts(1_000), [7, 15, 2_025, 15]);
    }
}
