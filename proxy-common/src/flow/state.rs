//! The states of a flow and their timeouts.

use super::Seen;
use crate::addr::Proto;

/// The state of a flow, from the packets of both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// The backend has sent no packet.
    New,
    /// The backend has answered, but the client has not continued and may be spoofed.
    Answered,
    /// Both sides have responded to each other.
    Established,
    /// A FIN of one side.
    HalfClosed,
    /// FINs of both sides.
    Closed,
    /// A RST, and no packet since.
    Reset,
}

impl State {
    /// Takes the bits of the client and of the backend.
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

    /// Returns true if the flow has ended in both directions.
    #[inline(always)]
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Closed | Self::Reset)
    }

    /// Returns the idle time after which a flow in this state is removed.
    #[inline(always)]
    pub const fn timeout_secs(self, proto: Proto, timeouts: Timeouts) -> u32 {
        let tcp = proto.0 == Proto::TCP.0;
        match self {
            Self::New if proto.0 == Proto::UDP.0 => timeouts.udp,
            // Five retries of a SYN, after 1, 2, 4, 8 and 16 s.
            Self::New => 30,
            // Five retries of the answer, each of which resets the idle time.
            Self::Answered if tcp || proto.0 == Proto::SCTP.0 => 60,
            Self::Established if tcp => timeouts.tcp_established,
            // Heartbeats detect a lost path within minutes (RFC 9260 §8.3).
            Self::Established if proto.0 == Proto::SCTP.0 => 18_000,
            Self::Answered | Self::Established => timeouts.udp_stream,
            Self::HalfClosed if tcp => timeouts.tcp_half_closed,
            Self::HalfClosed => 120,
            // Linux's TIME-WAIT.
            Self::Closed => 60,
            Self::Reset => 10,
        }
    }
}

/// The configurable idle timeouts, in seconds. The operator or conntrack sets them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    pub tcp_established: u32,
    /// One side has sent its FIN, and the other may continue: conntrack's CLOSE_WAIT.
    pub tcp_half_closed: u32,
    /// UDP, before the backend has answered.
    pub udp: u32,
    /// UDP, after the backend has answered.
    pub udp_stream: u32,
}

impl Timeouts {
    /// kube-proxy's TCP defaults (`conntrack.tcpEstablishedTimeout`, `tcpCloseWaitTimeout`).
    /// `udp_stream` is longer than the kernel's.
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
