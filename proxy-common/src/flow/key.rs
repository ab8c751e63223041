//! The key of a flow's entry, also as integers for BPF global functions. These take at most five
//! arguments, and pointers only since Linux 5.12.

use super::Hook;
use crate::addr::{Addr, Addr4, Addr6, Port, Proto, SockAddr};
use crate::assert_size;

/// Key of `FLOWS`: a packet's tuple at a hook, before the rewrite.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowKey<A: Addr> {
    src: A,
    dst: A,
    sport: Port,
    dport: Port,
    proto: Proto,
    hook: Hook,
    pad: u16,
}
assert_size!(FlowKey<Addr4> = 16);
assert_size!(FlowKey<Addr6> = 40);

impl<A: Addr> FlowKey<A> {
    #[inline(always)]
    pub const fn new(hook: Hook, proto: Proto, src: SockAddr<A>, dst: SockAddr<A>) -> Self {
        Self {
            src: src.addr,
            dst: dst.addr,
            sport: src.port,
            dport: dst.port,
            proto,
            hook,
            pad: 0,
        }
    }

    #[inline(always)]
    pub const fn set_hook(&mut self, hook: Hook) {
        self.hook = hook;
    }

    #[inline(always)]
    pub const fn set_dport(&mut self, dport: Port) {
        self.dport = dport;
    }

    pub const fn src(&self) -> SockAddr<A> {
        SockAddr::new(self.src, self.sport)
    }

    pub const fn dst(&self) -> SockAddr<A> {
        SockAddr::new(self.dst, self.dport)
    }

    pub const fn proto(&self) -> Proto {
        self.proto
    }

    pub const fn hook(&self) -> Hook {
        self.hook
    }
}

impl<A: Addr> FlowKey<A> {
    /// Returns the registers of both addresses, and the packed fields.
    #[inline(always)]
    pub fn words(&self) -> [u64; 5] {
        let [a, b] = self.src.registers();
        let [c, d] = self.dst.registers();
        [a, b, c, d, self.rest()]
    }

    #[inline(always)]
    pub fn from_words([a, b, c, d, rest]: [u64; 5]) -> Self {
        Self::joined(A::from_registers([a, b]), A::from_registers([c, d]), rest)
    }

    /// Returns the source and the destination.
    #[inline(always)]
    pub const fn addrs(&self) -> (&A, &A) {
        (&self.src, &self.dst)
    }

    /// Packs the fields after the addresses into 48 bits: ports in network byte order, protocol,
    /// hook.
    #[inline(always)]
    pub const fn rest(&self) -> u64 {
        self.sport.wire() as u64
            | (self.dport.wire() as u64) << 16
            | (self.proto.0 as u64) << 32
            | (self.hook.0 as u64) << 40
    }

    /// Builds the key of addresses and packed fields. Ignores the upper 16 bits of `rest`.
    #[inline(always)]
    pub const fn joined(src: A, dst: A, rest: u64) -> Self {
        let sport = Port::from_wire(rest as u16);
        let dport = Port::from_wire((rest >> 16) as u16);
        let proto = Proto((rest >> 32) as u8);
        let hook = Hook((rest >> 40) as u8);
        Self::new(
            hook,
            proto,
            SockAddr::new(src, sport),
            SockAddr::new(dst, dport),
        )
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn key_survives_its_words() {
        let ports = (Port::new(0x1234), Port::new(0xfedc));
        for (hook, proto) in [
            (Hook::INGRESS, Proto::TCP),
            (Hook::EGRESS, Proto::UDP),
            (Hook::ANCHOR, Proto::SCTP),
        ] {
            let [src, dst] =
                [[10, 244, 1, 254], [172, 18, 0, 11]].map(|addr| Addr4::from(Ipv4Addr::from(addr)));
            let key = FlowKey::new(
                hook,
                proto,
                SockAddr::new(src, ports.0),
                SockAddr::new(dst, ports.1),
            );
            assert_eq!(FlowKey::<Addr4>::from_words(key.words()), key);
            let [src, dst] = ["2001:db8:1:2:3:4:5:fedc", "fd00::b"].map(|addr| {
                let addr: Ipv6Addr = addr.parse().expect("an address");
                Addr6::from(addr)
            });
            let key = FlowKey::new(
                hook,
                proto,
                SockAddr::new(src, ports.0),
                SockAddr::new(dst, ports.1),
            );
            assert_eq!(FlowKey::<Addr6>::from_words(key.words()), key);
        }
    }
}
