//! The constants of IPv4 and IPv6, and the meaning of their addresses. `header.rs` and `checksum.rs`
//! have the other differences; the instances are in `ipv4.rs` and `ipv6.rs`.

use aya_ebpf::bindings::bpf_fib_lookup as FibLookup;
use proxy_common::addr::{Addr, Proto};
use proxy_common::hook::{PacketHook, SlowProgram};

use crate::checksum::Checksums;
use crate::header::Headers;
use crate::maps::Maps;

/// An address family in the packet path.
pub trait Net: Headers + Checksums {}

impl<A: Headers + Checksums> Net for A {}

/// The constants of an address family, and the meaning of its addresses.
pub trait IpVersion: Addr + Maps {
    /// In network order, as `__sk_buff.protocol` has it.
    const ETHERTYPE: u32;
    /// Length of a header without options or extensions.
    const IP_LEN: u32;
    /// Offsets in the header; the destination follows the source.
    const SRC_OFFSET: u32;
    const DST_OFFSET: u32;
    /// Protocol, type and code of "port unreachable": RFC 792 p. 4, RFC 4443 §3.1.
    const ICMP: Proto;
    const ICMP_TYPE: u8;
    const ICMP_CODE: u8;
    /// True if an ICMP checksum covers the addresses of the packet that carries it.
    const ICMP_HAS_PSEUDO: bool;
    /// The flag of a [`Device`](proxy_common::device::Device) with strict source validation by the
    /// kernel (`rp_filter`); 0 for IPv6, where the kernel has none.
    const STRICT: u32;
    /// True if `bpf_redirect_neigh` may choose a next hop behind another device than the device
    /// that it is given.
    const CHOOSES_AGAIN: bool;
    /// True if the short paths of ingress hooks have enough stack to validate a packet's source.
    const SHORT_WAYS_JUDGE: bool;

    /// The address as aya-log takes it.
    #[cfg(feature = "log")]
    type Logged: aya_log_ebpf::macro_support::Argument + aya_log_ebpf::macro_support::IpFormatter;
    #[cfg(feature = "log")]
    fn log(self) -> Self::Logged;

    /// Returns true for an address from and to which the kernel forwards packets.
    fn is_unicast(self) -> bool;
    /// Returns true for a loopback address, which only the host's packets to itself may have.
    fn is_loopback(self) -> bool;
    /// Returns true for the type of an ICMP message that quotes a packet.
    fn is_icmp_error(kind: u8) -> bool;
    /// Returns true for the type and code of an ICMP error that reports an unreachable destination.
    fn is_unreachable(kind: u8, code: u8) -> bool;
    fn fib_addrs(fib: &mut FibLookup, src: Self, dst: Self);

    /// Returns this family's program with the slow path of a hook.
    #[inline(always)]
    fn slow(hook: PacketHook) -> SlowProgram {
        let [ipv4, ipv6] = hook.slow();
        if Self::IS_IPV4 { ipv4 } else { ipv6 }
    }
}

/// Returns true if both addresses are unicast. Packets `WITHIN_HOST` may also go to a loopback
/// address, from a loopback or unicast address.
#[inline(always)]
pub fn are_fit<A: IpVersion>(src: &A, dst: &A, within_host: bool) -> bool {
    if src.is_unicast() && dst.is_unicast() {
        return true;
    }
    within_host && dst.is_loopback() && (src.is_loopback() || src.is_unicast())
}
