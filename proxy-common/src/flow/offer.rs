//! A flow's request for a liberal conntrack entry, so that it may bypass the stack.

use super::FlowKey;
use crate::addr::{Addr, Addr4, Addr6};
use crate::assert_size;

/// A key of either family: its words, with the family in the upper bits of the last word. A single
/// map serves both families, because Linux limits a program to 64 maps.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AnyKey([u64; 5]);

/// The lowest bit of the family, above the packed fields.
const FAMILY: u32 = 48;
const V4: u64 = 4;
const V6: u64 = 6;

impl AnyKey {
    #[inline(always)]
    pub fn of<A: Addr>(key: &FlowKey<A>) -> Self {
        let [a, b, c, d, rest] = key.words();
        if A::IS_IPV4 {
            Self([a | c << 32, 0, 0, 0, rest | V4 << FAMILY])
        } else {
            Self([a, b, c, d, rest | V6 << FAMILY])
        }
    }

    pub fn v4(&self) -> Option<FlowKey<Addr4>> {
        let [addrs, .., rest] = self.0;
        (rest >> FAMILY == V4)
            .then(|| FlowKey::from_words([addrs & u64::from(u32::MAX), 0, addrs >> 32, 0, rest]))
    }

    pub fn v6(&self) -> Option<FlowKey<Addr6>> {
        let [.., rest] = self.0;
        (rest >> FAMILY == V6).then(|| FlowKey::from_words(self.0))
    }
}

/// A flow that could bypass the stack with a liberal conntrack entry: an element of `OFFERS`. The
/// agent replies with a row in `TOLERATED`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The key of the original entry.
    pub key: AnyKey,
    /// The second since boot of the request, which becomes the value in `TOLERATED`.
    pub secs: u32,
    pad: u32,
}
assert_size!(Offer = 5 * 8 + 4 + 4);

impl Offer {
    #[inline(always)]
    pub const fn new(key: AnyKey, secs: u32) -> Self {
        Self { key, secs, pad: 0 }
    }
}

/// Returns true if a reply to a request of `asked_secs` is for this flow, which made its request
/// before `now_secs`, and not for an earlier flow with the same tuple. A flow's first request comes
/// in a later second than its opening.
#[inline(always)]
pub const fn is_for_asker(asked_secs: u32, now_secs: u32) -> bool {
    asked_secs.saturating_add(1) >= now_secs
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::super::Hook;
    use super::*;
    use crate::addr::{Port, Proto, SockAddr};

    #[test]
    fn key_of_either_family_is_read_back() {
        let ports = [Port::new(0xfedc), Port::new(80)];
        let at = |nth: usize| Addr4::from(Ipv4Addr::new(10, 244, 1, nth as u8));
        let [src, dst] = [0, 1].map(|nth| SockAddr::new(at(nth), ports[nth]));
        let v4 = FlowKey::new(Hook::ANCHOR, Proto::SCTP, src, dst);
        let at = |nth: u16| Addr6::from(Ipv6Addr::new(0xfd00, 1, 2, 3, 4, 5, 6, nth));
        let [src, dst] = [0, 1].map(|nth: usize| SockAddr::new(at(nth as u16), ports[nth]));
        let v6 = FlowKey::new(Hook::INGRESS, Proto::TCP, src, dst);
        assert_eq!(
            (AnyKey::of(&v4).v4(), AnyKey::of(&v4).v6()),
            (Some(v4), None)
        );
        assert_eq!(
            (AnyKey::of(&v6).v4(), AnyKey::of(&v6).v6()),
            (None, Some(v6))
        );
    }

    #[test]
    fn only_a_fresh_answer_is_for_its_asker() {
        assert!(
            is_for_asker(7, 7)
                && is_for_asker(7, 8)
                && !is_for_asker(7, 9)
                && is_for_asker(u32::MAX, 9)
        );
    }
}
