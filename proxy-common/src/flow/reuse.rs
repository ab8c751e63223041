//! When a flow gives its ports to another connection of the same client: to an opener, or to a
//! connection that a backend's packets show.

use super::{ANSWER_SECS, Flow, LINGER_SECS, REDIAL_SECS, Seen, Timeouts, Told};
use crate::addr::{Addr, Proto};

impl<A: Addr> Flow<A> {
    /// Returns true, in the opener's entry, if an opener of the same client may take the flow's
    /// place and choose again.
    ///
    /// The sender of a SYN in the client's name does not end a TCP flow: the SYN goes to the
    /// backend, as [`Self::is_redialled_by`] says. A backend that knows the connection answers (RFC
    /// 5961 §4), and a client that does not know it resets it then. A flow that the agent has ended
    /// has no backend to ask.
    #[inline(always)]
    pub const fn may_be_reused(&self, proto: Proto, now_secs: u32, timeouts: Timeouts) -> bool {
        let idle_secs = self.idle_secs(now_secs);
        let forgotten = match proto {
            Proto::UDP => false,
            // With its FIN the client has said itself that it goes.
            Proto::TCP if self.tx.has(Seen::FIN) && idle_secs > REDIAL_SECS => true,
            Proto::TCP => {
                self.is_lost() || self.tx.has(Seen::REDIALLED) && idle_secs >= ANSWER_SECS
            }
            _ => idle_secs > REDIAL_SECS,
        };
        forgotten || self.is_expired(proto, now_secs, timeouts)
    }

    /// Returns true, in the opener's entry, if the backend has to answer the client's SYN for the
    /// flow to stay.
    #[inline(always)]
    pub const fn is_redialled_by(&self, packet: Told, now_secs: u32) -> bool {
        packet.opens_connection()
            && (self.idle_secs(now_secs) > REDIAL_SECS || self.may_survive_reset(Proto::TCP))
    }

    /// Returns true, in the reply's entry, if a packet of the backend with this number belongs to
    /// another connection between its port and the client's. To a SYN a backend answers with a
    /// SYN-ACK, or with a RST whose number is 0 (RFC 9293 §3.10.7.1). A backend that already has a
    /// connection with that port acknowledges what it has got there (RFC 5961 §4).
    #[inline(always)]
    pub const fn is_answered_by_another(&self, proto: Proto, packet: Told, seq: u32) -> bool {
        let refuses = packet.resets() && seq == 0;
        proto.0 == Proto::TCP.0
            && !self.rx.has(Seen::PACKET)
            && !packet.answers_opener()
            && !refuses
    }

    /// Returns true, in the opener's entry, if another connection has the client's port at the
    /// backend: see [`Seen::CLASHES`].
    #[inline(always)]
    pub const fn clashes(&self) -> bool {
        self.rx.has(Seen::CLASHES) && !self.rx.has(Seen::PACKET)
    }

    /// Returns true, in the opener's entry, if a packet of the backend comes after the flow's end,
    /// and so belongs to another connection: the answer to a SYN that did not come by this flow, or
    /// any packet after the time for which the flow may be silent.
    ///
    /// A stranger's RST in the name of a client outside does not turn its handshake into such a
    /// flow.
    #[inline(always)]
    pub const fn is_outlived_by(
        &self,
        packet: Told,
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
