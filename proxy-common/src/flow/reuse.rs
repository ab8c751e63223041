//! When an opener may take the place of an older flow of the same client.

use super::{ANSWER_SECS, Flow, REDIAL_SECS, Seen, Timeouts, Told};
use crate::addr::{Addr, Proto};

impl<A: Addr> Flow<A> {
    /// Returns true, in the opener's entry, if an opener of the same client may take the flow's place and choose again.
    ///
    /// The sender of a SYN in the client's name does not end a TCP flow: the SYN goes to the backend, as [`Self::is_redialled_by`]
    /// says. A backend that knows the connection answers (RFC 5961 §4), and a client that does not know it resets it then. A flow that the
    /// agent has ended has no backend to ask.
    #[inline(always)]
    pub const fn may_be_reused(&self, proto: Proto, now_secs: u32, timeouts: Timeouts) -> bool {
        let idle_secs = self.idle_secs(now_secs);
        let forgotten = match proto {
            Proto::UDP => false,
            // With its FIN the client has said itself that it goes.
            Proto::TCP if self.tx.has(Seen::FIN) && idle_secs > REDIAL_SECS => true,
            Proto::TCP => self.is_lost() || self.tx.has(Seen::REDIALLED) && idle_secs >= ANSWER_SECS,
            _ => idle_secs > REDIAL_SECS,
        };
        forgotten || self.is_expired(proto, now_secs, timeouts)
    }

    /// Returns true, in the opener's entry, if the backend has to answer the client's SYN for the flow to stay.
    #[inline(always)]
    pub const fn is_redialled_by(&self, packet: Told, now_secs: u32) -> bool {
        packet.opens_connection() && (self.idle_secs(now_secs) > REDIAL_SECS || self.may_survive_reset(Proto::TCP))
    }
}
