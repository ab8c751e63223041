//! The ports of fragmented packets, which only their first fragment has.

use crate::addr::{Addr, Addr4, Addr6, Port, Proto};
use crate::assert_size;
use crate::flow::Hook;

/// Key of `FRAGMENTS`: what the fragments of one packet share, at one hook (RFC 791 §2.3, RFC 8200
/// §4.5).
///
/// The addresses are last, as in an IP header: so a program can read them to their place.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FragmentKey<A: Addr> {
    /// Identification, as it lies in the packet; IPv4's has 16 bits.
    id: u32,
    /// The protocol behind the header that splits the packet: not always a transport.
    proto: Proto,
    hook: Hook,
    pad: u16,
    src: A,
    dst: A,
}
assert_size!(FragmentKey<Addr4> = 16);
assert_size!(FragmentKey<Addr6> = 40);

impl<A: Addr> FragmentKey<A> {
    /// Bytes before the addresses.
    pub const ADDRS_OFFSET: u32 = core::mem::offset_of!(Self, src) as u32;

    /// Makes a key of one that has the addresses, and anything before them.
    #[inline(always)]
    pub const fn set(&mut self, hook: Hook, proto: Proto, id: u32) {
        (self.id, self.proto, self.hook, self.pad) = (id, proto, hook, 0);
    }
}

/// Value of `FRAGMENTS`: the fields that only the first fragment shows.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    pub src: Port,
    pub dst: Port,
    /// The transport. Not always the key's protocol: what IPv6 splits may begin with more extension
    /// headers.
    pub proto: Proto,
    // Not an array: the compiler would call a function to clear it.
    pad: u8,
    pad2: u16,
}
assert_size!(Ports = 2 + 2 + 1 + 1 + 2);

impl Ports {
    #[inline(always)]
    pub const fn new(src: Port, dst: Port, proto: Proto) -> Self {
        Self {
            src,
            dst,
            proto,
            pad: 0,
            pad2: 0,
        }
    }
}
