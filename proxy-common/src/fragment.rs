//! The ports of fragmented packets, which only the first fragment carries.

use crate::addr::{Addr, Addr4, Addr6, Port, Proto};
use crate::assert_size;
use crate::flow::Hook;

/// Key of `FRAGMENTS`: the common fields of one packet's fragments at one hook (RFC 791 §2.3, RFC
/// 8200 §4.5).
///
/// The addresses are last, as in an IP header, so that a program can load them in place.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FragmentKey<A: Addr> {
    /// The identification in network byte order. 16 bits for IPv4.
    id: u32,
    /// The protocol after the fragment header, not always a transport.
    proto: Proto,
    hook: Hook,
    pad: u16,
    src: A,
    dst: A,
}
assert_size!(FragmentKey<Addr4> = 16);
assert_size!(FragmentKey<Addr6> = 40);

impl<A: Addr> FragmentKey<A> {
    /// The offset of the addresses in bytes.
    pub const ADDRS_OFFSET: u32 = core::mem::offset_of!(Self, src) as u32;

    /// Completes a key that has only its addresses.
    #[inline(always)]
    pub const fn set(&mut self, hook: Hook, proto: Proto, id: u32) {
        (self.id, self.proto, self.hook, self.pad) = (id, proto, hook, 0);
    }
}

/// Value of `FRAGMENTS`: the fields that only the first fragment carries.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    pub src: Port,
    pub dst: Port,
    /// The transport. For IPv6 it may differ from the key's protocol, because extension headers may
    /// follow.
    pub proto: Proto,
    // Two fields instead of an array, which the compiler would clear by a function call.
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
