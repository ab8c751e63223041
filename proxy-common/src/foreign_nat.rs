//! Foreign NAT ports: source ports on the node's addresses that other programs' connections use.
//! Netfilter's masquerading uses all ports above 1,023, so a port drawn by kpx may be in use
//! towards the same peer.

use crate::addr::Proto;
use crate::assert_size;

/// Value of `GUESTS`, keyed by the tuple of the connection's replies at ingress
/// ([`crate::flow::FlowKey`]).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForeignNat {
    /// The seconds since boot until which the port is in use, unless another packet extends it.
    pub until_secs: u32,
    /// Not 0 once the connection has sent a FIN or RST.
    ended: u32,
}
assert_size!(ForeignNat = 4 + 4);

/// Netfilter's timeout after a FIN (`nf_conntrack_tcp_timeout_fin_wait`).
const ENDED_SECS: u32 = 120;
/// After a RST only packets in flight may follow.
const RESET_SECS: u32 = 10;

impl ForeignNat {
    pub const NONE: Self = Self {
        until_secs: 0,
        ended: 0,
    };

    /// Returns the row after an outgoing packet.
    #[inline(always)]
    pub fn after(before: Self, packet: Packet, proto: Proto, now_secs: u32) -> Self {
        let was_ended = before.ended != 0 && before.is_there(now_secs) && !packet.opens;
        let ended = was_ended || packet.ends || packet.resets;
        let silence_secs = if packet.resets {
            RESET_SECS
        } else if ended {
            ENDED_SECS
        } else {
            silence_secs(proto, packet.opens && !packet.is_seen_alone)
        };
        Self {
            until_secs: now_secs.saturating_add(silence_secs),
            ended: ended.into(),
        }
    }

    /// Returns the row of a TCP connection after a reply.
    #[inline(always)]
    pub const fn after_reply(self, now_secs: u32) -> Self {
        if self.ended != 0 {
            return self;
        }
        Self {
            until_secs: now_secs.saturating_add(silence_secs(Proto::TCP, false)),
            ..self
        }
    }

    #[inline(always)]
    pub const fn is_there(&self, now_secs: u32) -> bool {
        self.until_secs > now_secs
    }

    /// Returns true if the difference is worth a write. Extensions up to 30 s are not.
    #[inline(always)]
    pub const fn differs_from(&self, other: &Self) -> bool {
        self.ended != other.ended || self.until_secs.abs_diff(other.until_secs) > 30
    }
}

/// The connection state that a packet shows. UDP packets never open.
#[derive(Clone, Copy, Debug, Default)]
pub struct Packet {
    pub opens: bool,
    pub ends: bool,
    pub resets: bool,
    /// The programs do not process the packets between the connection's first and last packets.
    pub is_seen_alone: bool,
}

/// Netfilter's minimum timeout of an idle connection.
#[inline(always)]
const fn silence_secs(proto: Proto, opens: bool) -> u32 {
    if proto.0 == Proto::UDP.0 {
        180
    } else if opens {
        120
    } else {
        // Longer than 2 h, the default start of keep-alives (RFC 9293 §3.8.4).
        8_100
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u32 = 1_000;

    #[test]
    fn a_guest_stays_as_long_as_its_connection() {
        let opens = Packet {
            opens: true,
            ..Packet::default()
        };
        let goes_on = Packet::default();
        let ends = Packet {
            ends: true,
            ..goes_on
        };
        let resets = Packet {
            resets: true,
            ..goes_on
        };
        let tcp = |packets: &[Packet]| {
            let all = packets
                .iter()
                .fold(ForeignNat::NONE, |foreign_nat, packet| {
                    ForeignNat::after(foreign_nat, *packet, Proto::TCP, NOW)
                });
            all.until_secs - NOW
        };
        assert_eq!(tcp(&[opens]), 120);
        assert_eq!(
            tcp(&[Packet {
                is_seen_alone: true,
                ..opens
            }]),
            8_100,
            "its other packets are not seen"
        );
        assert_eq!(tcp(&[opens, goes_on]), 8_100);
        assert_eq!(
            tcp(&[opens, goes_on, ends, goes_on]),
            120,
            "its last acknowledgement is no new life"
        );
        assert_eq!(tcp(&[opens, goes_on, resets]), 10);
        assert_eq!(
            tcp(&[opens, ends, opens, goes_on]),
            8_100,
            "another connection"
        );
        assert_eq!(
            ForeignNat::after(ForeignNat::NONE, goes_on, Proto::UDP, NOW).until_secs,
            NOW + 180
        );
    }
}
