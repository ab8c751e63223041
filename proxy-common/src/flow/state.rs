//! The states of a flow, and how long it may be silent in each.

use super::Seen;
use crate::addr::Proto;

/// The state of a flow, from the packets of both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// Nothing has come back yet.
    New,
    /// The backend has answered, and the client has said nothing since: it may not exist.
    Answered,
    /// Both sides have spoken, each knowing of the other.
    Established,
    /// One FIN.
    HalfClosed,
    /// Both FINs.
    Closed,
    /// A RST, and no packet since.
    Reset,
}

impl State {
    /// From what was seen from the client, and from the backend.
    #[inline(always)]
    pub const fn of(tx: Seen, rx: Seen) -> Self {
        if tx.has(Seen::RST) || rx.has(Seen::RST) {
            Self::Reset
        } else if tx.has(Seen::FIN.with(Seen::LEAVING)) && rx.has(Seen::FIN) {
            Self::Closed
        } else if tx.has(Seen::FIN) || rx.has(Seen::FIN) {
            Self::HalfClosed
        } else if tx.has(Seen::ASSURED) || rx.has(Seen::ASSURED) {
            Self::Established
        } else if rx.has(Seen::PACKET) {
            Self::Answered
        } else {
            Self::New
        }
    }

    /// Returns true if both sides have ended the flow.
    #[inline(always)]
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Closed | Self::Reset)
    }

    /// How long a flow may be silent in this state before it is forgotten.
    #[inline(always)]
    pub const fn timeout_secs(self, proto: Proto, timeouts: Timeouts) -> u32 {
        let tcp = proto.0 == Proto::TCP.0;
        match self {
            Self::New if proto.0 == Proto::UDP.0 => timeouts.udp,
            // Five retries of a SYN, at 1, 2, 4, 8 and 16 s.
            Self::New => 30,
            // Five retries of what answers a SYN; each of them counts as a sign of life.
            Self::Answered if tcp || proto.0 == Proto::SCTP.0 => 60,
            Self::Established if tcp => timeouts.tcp_established,
            // A lost path shows within minutes, by heartbeats (RFC 9260 §8.3).
            Self::Established if proto.0 == Proto::SCTP.0 => 18_000,
            Self::Answered | Self::Established => timeouts.udp_stream,
            Self::HalfClosed if tcp => timeouts.tcp_half_closed,
            Self::HalfClosed => 120,
            // TIME-WAIT as Linux counts it.
            Self::Closed => 60,
            Self::Reset => 10,
        }
    }
}

/// The times for which flows may be silent, in seconds, as far as the operator or conntrack sets
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    pub tcp_established: u32,
    /// One side has sent its FIN, and the other may go on sending: conntrack's CLOSE_WAIT.
    pub tcp_half_closed: u32,
    /// The backend has not answered.
    pub udp: u32,
    /// The backend has answered.
    pub udp_stream: u32,
}

impl Timeouts {
    /// kube-proxy's times for TCP (`conntrack.tcpEstablishedTimeout`, `tcpCloseWaitTimeout`). The
    /// second one for UDP is longer than the kernel's.
    pub const DEFAULT: Self = Self {
        tcp_established: 86_400,
        tcp_half_closed: 3_600,
        udp: 30,
        udp_stream: 180,
    };
}

impl Default for Timeouts {
    fn default() -> Self {
        Self::DEFAULT
    }
}
