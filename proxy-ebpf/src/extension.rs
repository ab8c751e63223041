//! IPv6 extension headers (RFC 8200 §4): the walk from the IPv6 header to the transport.

use proxy_common::addr::Proto;
use proxy_common::counter::Reason;
use proxy_macros::global_fn;

use crate::skb::{FragmentPart, Skb};

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
    /// In units of 8 bytes, without the first 8 bytes.
    len: u8,
    /// In a fragment header: the fragment's offset in units of 8 bytes, and the bit for more
    /// fragments. In a routing header: its type, and the number of segments left.
    offset_more: [u8; 2],
}

/// The end of a walk through extension headers, in one register.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct ExtHeaders(pub u64);

impl ExtHeaders {
    const PROTOCOL: Self = Self(0);
    const MALFORMED: Self = Self(1);

    #[inline(always)]
    fn new(proto: u8, l4: u32, part: FragmentPart, split: u8, fragment: u32) -> Self {
        let bytes = u32::from_le_bytes([proto, part.0, split, 0]);
        Self(u64::from(bytes) << 32 | u64::from(fragment & 0xffff) << 16 | u64::from(l4 & 0xffff))
    }

    #[inline(always)]
    pub fn result(self) -> Result<Self, Reason> {
        if self.l4() > 1 {
            return Ok(self);
        }
        Err(if self.0 == Self::MALFORMED.0 {
            Reason::Malformed
        } else {
            Reason::Protocol
        })
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
    pub fn part(self) -> FragmentPart {
        FragmentPart((self.0 >> 40) as u8)
    }

    /// The protocol that follows the fragment header.
    #[inline(always)]
    pub fn split(self) -> Proto {
        Proto((self.0 >> 48) as u8)
    }
}

/// Follows the extension headers from offset `at`, where a header of type `next` starts.
///
/// The walk ends with an error at encryption, at authentication (which covers the addresses), at a
/// routing header with segments left, and at a second fragment header.
#[global_fn(kpx_extensions)]
pub fn walk(skb: Skb, next: u8, at: u32) -> ExtHeaders {
    let start = Walker {
        next,
        at,
        part: FragmentPart::WHOLE,
        split: 0,
        fragment: 0,
    };
    match start.follow(skb) {
        Err(headers) => headers,
        Ok(walker) => walker.arrived().err().unwrap_or(ExtHeaders::PROTOCOL),
    }
}

/// The position of the walk, at a header of type `next`.
#[derive(Clone, Copy)]
struct Walker {
    next: u8,
    at: u32,
    part: FragmentPart,
    split: u8,
    fragment: u32,
}

impl Walker {
    /// Follows at most six headers, without a loop: the compiler may lay a loop out so that control
    /// falls through to its start without a jump, which old kernels reject.
    #[inline(always)]
    fn follow(self, skb: Skb) -> Result<Self, ExtHeaders> {
        // No sender needs more than four.
        self.step(skb)?
            .step(skb)?
            .step(skb)?
            .step(skb)?
            .step(skb)?
            .step(skb)
    }

    /// Skips one header, or ends the walk.
    #[inline(always)]
    fn step(self, skb: Skb) -> Result<Self, ExtHeaders> {
        let Self {
            next, at, fragment, ..
        } = self.arrived()?;
        let header: Extension = skb.load(at).map_err(|_| ExtHeaders::MALFORMED)?;
        if next == FRAGMENT && fragment == 0 {
            let offset_more = u16::from_be_bytes(header.offset_more);
            let part = FragmentPart::of(offset_more >> 3, offset_more & 1);
            let past = Self {
                next: header.next,
                at: at + 8,
                part,
                split: header.next,
                fragment: at,
            };
            return if part == FragmentPart::LATER {
                Err(past.headers())
            } else {
                Ok(past)
            };
        }
        if next == FRAGMENT || next == ROUTING && header.offset_more[1] != 0 {
            return Err(ExtHeaders::PROTOCOL);
        }
        Ok(Self {
            next: header.next,
            at: at + (u32::from(header.len) + 1) * 8,
            ..self
        })
    }

    /// Returns an error at the end of the walk.
    #[inline(always)]
    fn arrived(self) -> Result<Self, ExtHeaders> {
        match self.next {
            HOP_BY_HOP | ROUTING | DESTINATION | FRAGMENT => Ok(self),
            ENCRYPTED | AUTHENTICATION | NONE => Err(ExtHeaders::PROTOCOL),
            _ => Err(self.headers()),
        }
    }

    #[inline(always)]
    fn headers(self) -> ExtHeaders {
        ExtHeaders::new(self.next, self.at, self.part, self.split, self.fragment)
    }
}
