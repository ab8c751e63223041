//! Source ports on the node's own addresses that connections of other programs have. Netfilter's
//! masquerading draws from all above 1,023, so a port that kpx would draw may be in use towards the
//! same peer.

use crate::addr::Proto;
use crate::assert_size;

/// Value of `GUESTS`, keyed by the tuple of the connection's replies as they come in
/// ([`crate::flow::FlowKey`]).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guest {
    /// Seconds since boot until which the tuple counts as taken, unless another packet leaves with
    /// it.
    pub until_secs: u32,
    /// Not 0: the connection has sent its FIN or RST.
    ended: u32,
}
assert_size!(Guest = 4 + 4);

/// The time for which netfilter keeps a connection that has sent its FIN
/// (`nf_conntrack_tcp_timeout_fin_wait`).
const ENDED_SECS: u32 = 120;
/// After a RST nothing follows but what was on its way.
const RESET_SECS: u32 = 10;

impl Guest {
    /// Nothing is known.
    pub const NONE: Self = Self {
        until_secs: 0,
        ended: 0,
    };

    /// Returns what is known after a packet that leaves; `before` is what was known.
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

    #[inline(always)]
    pub const fn is_there(&self, now_secs: u32) -> bool {
        self.until_secs > now_secs
    }

    /// Returns true if the difference is worth a write. A minute more of many is not.
    #[inline(always)]
    pub const fn differs_from(&self, other: &Self) -> bool {
        self.ended != other.ended || self.until_secs.abs_diff(other.until_secs) > 30
    }
}

/// The bits that a packet tells of its connection. UDP has no openers: each datagram is like
/// another.
#[derive(Clone, Copy, Debug, Default)]
pub struct Packet {
    pub opens: bool,
    pub ends: bool,
    pub resets: bool,
    /// No packet between the connection's first ones and its last ones is looked at.
    pub is_seen_alone: bool,
}

/// How long netfilter keeps a silent connection, at the least.
#[inline(always)]
const fn silence_secs(proto: Proto, opens: bool) -> u32 {
    if proto.0 == Proto::UDP.0 {
        180
    } else if opens {
        120
    } else {
        // Longer than the 2 h after which keep-alives start (RFC 9293 §3.8.4).
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
            let all = packets.iter().fold(Guest::NONE, |guest, packet| {
                Guest::after(guest, *packet, Proto::TCP, NOW)
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
            Guest::after(Guest::NONE, goes_on, Proto::UDP, NOW).until_secs,
            NOW + 180
        );
    }
}
