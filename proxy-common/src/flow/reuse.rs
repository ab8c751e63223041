//! Reuse of a flow's ports by another connection of the same client, shown by an opening packet or
//! by packets of the backend.

use super::{ANSWER_SECS, Flow, LINGER_SECS, REDIAL_SECS, Seen, Signals, Timeouts};
use crate::addr::{Addr, Proto};

impl<A: Addr> Flow<A> {
    /// Returns true if an opening packet of the same client may replace the flow and choose a
    /// backend again. For the original entry.
    ///
    /// A SYN alone does not end a TCP flow, because it may be spoofed: it goes to the backend (see
    /// [`Self::is_redialled_by`]). A backend with that connection answers (RFC 5961 §4), and a
    /// client without it then sends a RST. A flow that the agent has ended has no such backend.
    #[inline(always)]
    pub const fn may_be_reused(&self, proto: Proto, now_secs: u32, timeouts: Timeouts) -> bool {
        let idle_secs = self.idle_secs(now_secs);
        let forgotten = match proto {
            Proto::UDP => false,
            // The client's FIN shows that it has left.
            Proto::TCP if self.tx.has(Seen::FIN) && idle_secs > REDIAL_SECS => true,
            Proto::TCP => {
                self.is_lost() || self.tx.has(Seen::REDIALLED) && idle_secs >= ANSWER_SECS
            }
            _ => idle_secs > REDIAL_SECS,
        };
        forgotten || self.is_expired(proto, now_secs, timeouts)
    }

    /// Returns true if the flow depends on the backend's answer to this SYN. For the original
    /// entry.
    #[inline(always)]
    pub const fn is_redialled_by(&self, packet: Signals, now_secs: u32) -> bool {
        packet.opens_connection()
            && (self.idle_secs(now_secs) > REDIAL_SECS || self.may_survive_reset(Proto::TCP))
    }

    /// Returns true if a packet of the backend belongs to another connection between these ports. A
    /// backend answers a SYN with a SYN-ACK, or with a RST numbered 0 (RFC 9293 §3.10.7.1). A
    /// backend with an open connection at that port sends an acknowledgement instead (RFC 5961 §4).
    /// For the reply entry.
    #[inline(always)]
    pub const fn is_answered_by_another(&self, proto: Proto, packet: Signals, seq: u32) -> bool {
        let refuses = packet.resets() && seq == 0;
        proto.0 == Proto::TCP.0
            && !self.rx.has(Seen::PACKET)
            && !packet.answers_opener()
            && !refuses
    }

    /// Returns true if another connection uses the client's port at the backend: see
    /// [`Seen::CLASHES`]. For the original entry.
    #[inline(always)]
    pub const fn clashes(&self) -> bool {
        self.rx.has(Seen::CLASHES) && !self.rx.has(Seen::PACKET)
    }

    /// Returns true if a packet of the backend follows the flow's end and so belongs to another
    /// connection: an answer to a SYN that bypassed this flow, or any packet after the idle
    /// timeout. For the original entry.
    ///
    /// After a spoofed RST for a client outside, the answer to the flow's own SYN still belongs to
    /// the flow.
    #[inline(always)]
    pub const fn is_outlived_by(
        &self,
        packet: Signals,
        proto: Proto,
        now_secs: u32,
        timeouts: Timeouts,
    ) -> bool {
        let idle_secs = self.idle_secs(now_secs);
        let is_end_certain = self.is_assured() || !self.is_far() || idle_secs > LINGER_SECS;
        let is_next_answer =
            packet.answers_opener() && is_end_certain && self.is_expired(proto, now_secs, timeouts);
        is_next_answer || idle_secs > self.state().timeout_secs(proto, timeouts)
    }
}
