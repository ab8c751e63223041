//! IPv6 extension headers (RFC 8200 §4): the way from the IPv6 header to the transport.

use proxy_common::addr::Proto;
use proxy_common::counter::Reason;

use crate::net::Place;
use crate::skb::Skb;

/// As many as are followed. Nobody needs more than four.
const MAX: u32 = 6;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const ENCRYPTED: u8 = 50;
const AUTHENTICATION: u8 = 51;
const NONE: u8 = 59;
const DESTINATION: u8 = 60;

/// The first 4 bytes of any extension header.
#[derive(Clone, Copy)]
#[repr(C)]
struct Extension {
    next: u8,
    /// In units of 8 bytes, without the first of them.
    len: u8,
    /// Of a fragment header: where the fragment belongs in the packet, in units of 8 bytes, and whether more follow.
    /// Of a routing header: its type, and how many routers are still to be visited.
    offset_more: [u8; 2],
}

/// What the extension headers lead to, in one register.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Way(pub u64);

impl Way {
    const PROTOCOL: Self = Self(0);
    const MALFORMED: Self = Self(1);

    #[inline(always)]
    fn new(proto: u8, l4: u32, place: Place, split: u8, fragment: u32) -> Self {
        let bytes = u32::from_le_bytes([proto, place.0, split, 0]);
        Self(u64::from(bytes) << 32 | u64::from(fragment & 0xffff) << 16 | u64::from(l4 & 0xffff))
    }

    #[inline(always)]
    pub fn result(self) -> Result<Self, Reason> {
        if self.l4() > 1 {
            return Ok(self);
        }
        Err(if self.0 == Self::MALFORMED.0 { Reason::Malformed } else { Reason::Protocol })
    }

    /// Offset of the transport header.
    #[inline(always)]
    pub fn l4(self) -> u32 {
        (self.0 & 0xffff) as u32
    }

    /// Offset of the fragment header, if there is one.
    #[inline(always)]
    pub fn fragment(self) -> u32 {
        (self.0 >> 16 & 0xffff) as u32
    }

    #[inline(always)]
    pub fn proto(self) -> Proto {
        Proto((self.0 >> 32) as u8)
    }

    #[inline(always)]
    pub fn place(self) -> Place {
        Place((self.0 >> 40) as u8)
    }

    /// What follows the fragment header.
    #[inline(always)]
    pub fn split(self) -> Proto {
        Proto((self.0 >> 48) as u8)
    }
}

/// Follows the extension headers that start at `at` with one of the kind `next`.
///
/// Not past what is encrypted, nor past what authenticates the addresses, nor to a transport that is meant for the next
/// router of a list, nor to a fragment of a fragment.
#[inline(always)]
pub fn walk(skb: Skb, next: u8, at: u32) -> Way {
    let (mut next, mut at) = (next, at);
    let (mut place, mut split, mut fragment) = (Place::WHOLE, 0, 0);
    for _ in 0..=MAX {
        match next {
            HOP_BY_HOP | ROUTING | DESTINATION | FRAGMENT => {}
            ENCRYPTED | AUTHENTICATION | NONE => return Way::PROTOCOL,
            transport => return Way::new(transport, at, place, split, fragment),
        }
        let Ok(header) = skb.load::<Extension>(at) else { return Way::MALFORMED };
        if next == FRAGMENT && fragment == 0 {
            let offset_more = u16::from_be_bytes(header.offset_more);
            (place, split, fragment) = (Place::of(offset_more >> 3, offset_more & 1), header.next, at);
            at += 8;
            if place == Place::LATER {
                return Way::new(header.next, at, place, split, fragment);
            }
        } else if next == FRAGMENT || next == ROUTING && header.offset_more[1] != 0 {
            return Way::PROTOCOL;
        } else {
            at += (u32::from(header.len) + 1) * 8;
        }
        next = header.next;
    }
    Way::PROTOCOL
}
