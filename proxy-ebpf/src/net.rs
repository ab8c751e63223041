//! The differences between IPv4 and IPv6, as a trait with instances in `ipv4.rs` and `ipv6.rs`; the
//! look-up of routes, and source validation by them.

use core::mem::transmute;
use core::ptr::from_mut;

use aya_ebpf::bindings::{
    BPF_FIB_LKUP_RET_FWD_DISABLED, BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_NOT_FWDED,
    BPF_FIB_LKUP_RET_SUCCESS, BPF_FIB_LKUP_RET_UNSUPP_LWT, BPF_FIB_LOOKUP_OUTPUT,
    BPF_FIB_LOOKUP_SRC, bpf_fib_lookup as FibLookup,
};
use aya_ebpf::helpers::generated::{bpf_fib_lookup, bpf_skb_load_bytes};
use proxy_common::addr::{Addr, Addr4, Proto, SockAddr};
use proxy_common::counter::Reason;
use proxy_common::device::{Device, Node};
use proxy_common::hook::{PacketHook, SlowProgram};
use proxy_macros::global_fn;

use crate::established::Head;
use crate::maps::{self, Maps, Moment, again};
use crate::setting::ZERO;
use crate::skb::{LinkHeader, Skb};

pub use crate::checksum::{NO_DIFF, UNREAD, diff, diff_words, fold, is_seed, sum};
pub use crate::fragment::FragmentPart;

/// An address family in the packet path.
pub trait Net: Addr + Maps {
    const IS_IPV4: bool = Self::AF == Addr4::AF;
    /// In network order, as `__sk_buff.protocol` has it.
    const ETHERTYPE: u32;
    /// The kernel's number for the family.
    const AF: u8;
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
    /// An IP header, in words.
    type IpHeader: Copy;
    /// The part of a packet that an ICMP error quotes: its IP header and 8 bytes, in words.
    type Quote: Copy;
    /// The same for SCTP: the IP header and 20 bytes.
    type SctpQuote: Copy;

    /// The address as aya-log takes it.
    #[cfg(feature = "log")]
    type Logged: aya_log_ebpf::macro_support::Argument + aya_log_ebpf::macro_support::IpFormatter;
    #[cfg(feature = "log")]
    fn log(self) -> Self::Logged;

    /// Returns this family's program with the slow path of a hook.
    fn slow(hook: PacketHook) -> SlowProgram;
    /// Reads the IP header at offset `at`, and its options or extension headers.
    fn read(skb: Skb, at: u32) -> Result<Header<Self>, Reason>;
    /// Reads the usual headers in place. `None` for any other headers: see `established.rs`.
    fn peek(skb: Skb) -> Option<Head<Self>>;
    /// Replaces the addresses and ports of a packet with the usual headers, and updates its
    /// checksums.
    fn rewrite(
        skb: Skb,
        head: &Head<Self>,
        src: &SockAddr<Self>,
        dst: &SockAddr<Self>,
    ) -> Result<(), Reason>;
    /// Returns true for an address from and to which the kernel forwards packets.
    fn is_unicast(self) -> bool;
    /// Returns true for a loopback address, which only the host's packets to itself may have.
    fn is_loopback(self) -> bool;
    /// Returns true for the type of an ICMP message that quotes a packet.
    fn is_icmp_error(kind: u8) -> bool;
    /// Returns true for the type and code of an ICMP error that reports an unreachable destination.
    fn is_unreachable(kind: u8, code: u8) -> bool;
    /// Replaces an address in the packet that an ICMP error quotes. `at` is the offset of the
    /// quoted header, `place` that of the address in it, `check` that of the ICMP checksum.
    fn store_quoted_addr(
        skb: Skb,
        at: u32,
        place: u32,
        check: u32,
        from: Self,
        to: Self,
    ) -> Result<(), Reason>;
    fn store_addr(skb: Skb, at: u32, place: u32, from: Self, to: Self) -> Result<(), Reason>;
    /// Updates a transport checksum for a changed address.
    fn replace_pseudo_checksum(
        skb: Skb,
        offset: u32,
        flags: u32,
        from: Self,
        to: Self,
    ) -> Result<(), Reason>;
    /// Returns the header of a packet that this host generates, with `len` bytes of payload.
    fn ip_header(src: Self, dst: Self, proto: Proto, len: u16) -> Self::IpHeader;
    /// Sum of the pseudo header (RFC 9293 §3.1, RFC 8200 §8.1).
    fn pseudo_sum(src: Self, dst: Self, proto: Proto, len: u16) -> u32;
    /// The same for ICMP: 0 for IPv4, where ICMP has no pseudo header.
    fn icmp_pseudo_sum(src: Self, dst: Self, len: u16) -> u32;
    fn fib_addrs(fib: &mut FibLookup, src: Self, dst: Self);
    /// Copies the fields by which the kernel chooses among several next hops from a packet with
    /// Ethernet header, if [`Self::CHOOSES_AGAIN`].
    fn fib_choice(skb: Skb, fib: &mut FibLookup);
    /// Returns true for a spoofed packet that may hide its transport header from kpx, but not from
    /// conntrack.
    fn is_hidden_and_spoofed(skb: Skb, link: LinkHeader) -> bool;

    /// Returns the address in four words in network byte order; an IPv4 address is the first word.
    fn words(&self) -> [u32; 4];
    fn of_words(words: [u32; 4]) -> Self;

    /// Reads and checks a packet's IP header.
    #[inline(always)]
    fn header(skb: Skb, link: LinkHeader) -> Result<Header<Self>, Reason> {
        let header = Self::whole_header(skb, link)?;
        if !are_fit(&header.src, &header.dst, false) {
            return Err(Reason::NotUnicast);
        }
        Ok(header)
    }

    /// The same for a packet with any addresses.
    #[inline(always)]
    fn whole_header(skb: Skb, link: LinkHeader) -> Result<Header<Self>, Reason> {
        let header = Self::read(skb, link.len())?;
        if header.l4 > header.end || header.end > skb.len() {
            return Err(Reason::Malformed);
        }
        Ok(header)
    }
}

/// Returns true if both addresses are unicast. Packets `WITHIN_HOST` may also go to a loopback
/// address, from a loopback or unicast address.
#[inline(always)]
pub fn are_fit<A: Net>(src: &A, dst: &A, within_host: bool) -> bool {
    if src.is_unicast() && dst.is_unicast() {
        return true;
    }
    within_host && dst.is_loopback() && (src.is_loopback() || src.is_unicast())
}

/// Looks up the next hop of a packet from `src` to `dst` that came in through this device.
#[inline(always)]
pub fn route<A: Net>(skb: Skb, ifindex: u32, src: &A, dst: &A) -> Result<NextHop, Reason> {
    next_hop(look_up_route(skb, ifindex, src, dst, 0))
}

/// Looks up the next hop of the host's own packet from `src` to `dst`, as if it came in through the
/// anchor.
#[inline(always)]
pub fn way<A: Net>(skb: Skb, node: &Node, src: &A, dst: &A) -> Result<NextHop, Reason> {
    next_hop(look_up_way(skb, node.anchor_ifindex, src, dst))
}

/// Does the same, and sets `source` to the address that the kernel selects for the route:
/// unspecified if the kernel returns none (before Linux 6.7).
#[inline(always)]
pub fn way_and_source<A: Net>(
    skb: Skb,
    node: &Node,
    source: &mut A,
    dst: &A,
) -> Result<NextHop, Reason> {
    next_hop(look_up_source::<A, true>(
        skb,
        node.anchor_ifindex,
        source,
        dst,
    ))
}

/// Does the same as [`route`], and sets `source` as [`way_and_source`] does.
#[inline(always)]
pub fn route_and_source<A: Net>(
    skb: Skb,
    ifindex: u32,
    source: &mut A,
    dst: &A,
) -> Result<NextHop, Reason> {
    next_hop(look_up_source::<A, false>(skb, ifindex, source, dst))
}

#[inline(always)]
fn next_hop(found: u32) -> Result<NextHop, Reason> {
    match found {
        NO_ROUTE | UNKNOWN => Err(Reason::NoRoute),
        HOST => Ok(NextHop::Host),
        ifindex => Ok(NextHop::Device(ifindex)),
    }
}

/// Returns true if the source of a packet from `src` to `dst` is spoofed: it is an address of the
/// node, or the route back to it leads through another device. The route counts if either device is
/// a pod's or a bridge of pods, or if the kernel validates strictly here.
///
/// The kernel's check (`rp_filter`) runs after this hook, and only for IPv4.
#[inline(always)]
pub fn is_spoofed<A: Net>(skb: Skb, at: At, src: &A, dst: &A) -> bool {
    match at {
        At::Here => is_spoofed_here(skb, src, dst),
        At::Before => is_spoofed_before(skb, src, dst),
    }
}

// Two functions: the addresses of an IPv6 packet leave no register for `At`.

#[global_fn(kpx_spoofed4, kpx_spoofed6)]
fn is_spoofed_here<A: Net>(skb: Skb, src: &A, dst: &A) -> bool {
    spoofed(skb, At::Here, src, dst)
}

#[global_fn(kpx_spoofed_before4, kpx_spoofed_before6)]
fn is_spoofed_before<A: Net>(skb: Skb, src: &A, dst: &A) -> bool {
    spoofed(skb, At::Before, src, dst)
}

/// The device by which a packet came in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// The hook's device.
    Here,
    /// The device through which the packet entered the host, for a hook that it reaches later.
    Before,
}

impl At {
    #[inline(always)]
    fn ifindex(self, skb: Skb) -> u32 {
        match self {
            Self::Here => skb.ifindex(),
            Self::Before => skb.ingress_ifindex(),
        }
    }
}

/// See [`is_spoofed`]. One look-up of the routes per term serves all packets between two addresses
/// that come in through one device.
#[inline(always)]
pub fn spoofed<A: Net>(skb: Skb, at: At, src: &A, dst: &A) -> bool {
    let ifindex = at.ifindex(skb);
    // Read before the routes: a result from before a change must not count for the epoch after it.
    let term = maps::about_now_secs().wrapping_add(maps::epoch());
    // Read again: otherwise the compiler also spills the addresses' registers to the stack.
    if maps::is_sender(&again(src), &again(dst), Moment::new(ifindex, term)) {
        return false;
    }
    // Behind netfilter's reverse NAT, a container's reply has a node address as its source.
    // `ingress::has_node_source` has validated the source with which it came in.
    if at == At::Before && maps::own_addr(src).is_some() {
        return false;
    }
    let is_spoofed = is_out_of_place(skb, at.ifindex(skb), src, dst);
    if !is_spoofed {
        maps::keep_sender(&again(src), &again(dst), Moment::new(at.ifindex(skb), term));
    }
    is_spoofed
}

/// Returns true if the packet came in through the device to which the route from `from` to `to`
/// leads: only a sender behind that device may report on `to`. The node's own packets have no
/// ingress device and count, except on nodes with macvlans: a macvlan's packets look the same at
/// the egress of its parent. Stricter than [`is_spoofed`].
#[inline(never)]
pub fn leads_back<A: Net>(skb: Skb, at: At, from: &A, to: &A) -> bool {
    let ifindex = at.ifindex(skb);
    if ifindex == 0 {
        return maps::node().is_some_and(|node| !node.has(Node::MACVLANS));
    }
    let (_, back, next_hop) = route_back(skb, ifindex, from, to);
    next_hop == back
}

/// Looks up the route from `from` to `to` of a packet that comes in through this device. Returns
/// the device's flags, the device by which the kernel routes (a port's bridge), and the result of
/// [`look_up_route`].
#[inline(always)]
fn route_back<A: Net>(skb: Skb, ifindex: u32, from: &A, to: &A) -> (u32, u32, u32) {
    let (flags, bridge) = maps::place_of(ifindex);
    let back = if bridge != 0 { bridge } else { ifindex };
    let mut next_hop = look_up_route(skb, back, from, to, 0);
    if next_hop == UNKNOWN
        && let Some(node) = maps::node()
    {
        // kpx enables forwarding at the anchor. It may be off at the device.
        next_hop = look_up_route(skb, node.anchor_ifindex, from, to, 0);
    }
    (flags, back, next_hop)
}

/// Returns true if only pods of this node are behind the device.
#[inline(always)]
fn leads_to_pods(ifindex: u32) -> bool {
    maps::place_of(ifindex).0 & (Device::POD | Device::POD_BRIDGE) != 0
}

/// Validates a source by addresses and routes: see [`is_spoofed`].
#[inline(always)]
fn is_out_of_place<A: Net>(skb: Skb, ifindex: u32, src: &A, dst: &A) -> bool {
    if maps::own_addr(src).is_some() {
        return true;
    }
    let (flags, back, next_hop) = route_back(skb, ifindex, dst, src);
    if next_hop == back || next_hop == UNKNOWN {
        return false;
    }
    if flags & (Device::POD | Device::POD_BRIDGE) == 0 {
        // A strict kernel drops this packet as well.
        return flags & A::STRICT != 0 || leads_to_pods(next_hop);
    }
    if flags & Device::LOOSE != 0 {
        return leads_to_pods(next_hop);
    }
    // There may be several routes to a pod, one of them through this device.
    let through = look_up_route(skb, back, dst, src, BPF_FIB_LOOKUP_OUTPUT);
    through != back && through != UNKNOWN
}

// The results of `look_up_route` other than the index of a device, in one register.
const HOST: u32 = 0;
const NO_ROUTE: u32 = u32::MAX;
/// The kernel returns no route: the device does not forward, or the route encapsulates.
const UNKNOWN: u32 = u32::MAX - 1;

/// Looks up the route of a packet that comes in through the device or, with BPF_FIB_LOOKUP_OUTPUT
/// in `flags`, leaves through it. Returns a device index, or a constant above.
#[inline(never)]
fn look_up_route<A: Net>(skb: Skb, ifindex: u32, src: &A, dst: &A, flags: u32) -> u32 {
    let mut fib = empty();
    ask(skb, ifindex, (src, dst), &mut fib, flags)
}

/// Looks up the route of the host's own packet.
#[inline(never)]
fn look_up_way<A: Net>(skb: Skb, ifindex: u32, src: &A, dst: &A) -> u32 {
    let mut fib = empty();
    A::fib_choice(skb, &mut fib);
    ask(skb, ifindex, (src, dst), &mut fib, 0)
}

/// Looks up a route and its source address: see [`way_and_source`]. `AS_SENT`: for the host's own
/// packet.
#[inline(never)]
fn look_up_source<A: Net, const AS_SENT: bool>(
    skb: Skb,
    ifindex: u32,
    source: &mut A,
    dst: &A,
) -> u32 {
    let mut fib = empty();
    if AS_SENT {
        A::fib_choice(skb, &mut fib);
    }
    let found = ask(skb, ifindex, (source, dst), &mut fib, BPF_FIB_LOOKUP_SRC);
    if found != NO_ROUTE {
        // SAFETY: words, whichever field of the union was written.
        *source = A::of_words(unsafe { fib.__bindgen_anon_3.ipv6_src });
        return found;
    }
    // The kernel lacks BPF_FIB_LOOKUP_SRC, or has no source address there.
    let found = ask(skb, ifindex, (source, dst), &mut fib, 0);
    *source = A::UNSPECIFIED;
    found
}

/// Loads a field of the look-up from the packet; 0 if the packet is too short.
#[inline(always)]
pub fn load_into<T: Copy>(skb: Skb, offset: u32, field: &mut T) {
    // SAFETY: the kernel writes all of the field, where any bits are valid, and nothing behind it.
    let _loaded = unsafe {
        bpf_skb_load_bytes(
            skb.as_ptr().cast(),
            offset,
            from_mut(field).cast(),
            size_of::<T>() as u32,
        )
    };
}

#[inline(always)]
fn empty() -> FibLookup {
    // SAFETY: the words are as long as the structure, which consists of integers and arrays of
    // integers.
    unsafe { transmute([ZERO.get(); size_of::<FibLookup>() / size_of::<u64>()]) }
}

/// Runs the look-up; `fib` holds its optional fields.
#[inline(always)]
fn ask<A: Net>(
    skb: Skb,
    ifindex: u32,
    (src, dst): (&A, &A),
    fib: &mut FibLookup,
    flags: u32,
) -> u32 {
    fib.family = A::AF;
    fib.ifindex = ifindex;
    // With 0 the kernel would check this packet against the MTU. Only the route matters here.
    fib.__bindgen_anon_1.tot_len = 1;
    A::fib_addrs(fib, *src, *dst);
    let size = size_of::<FibLookup>() as i32;
    // SAFETY: the helper takes the context, and a structure that is lent here alone with its size.
    let result = unsafe { bpf_fib_lookup(skb.as_ptr().cast(), from_mut(fib), size, flags) };
    match result as u32 {
        // The kernel resolves the neighbour when it sends the packet.
        BPF_FIB_LKUP_RET_SUCCESS | BPF_FIB_LKUP_RET_NO_NEIGH => fib.ifindex,
        // Not forwarded: the destination is the host itself, or unreachable. The result is the
        // same.
        BPF_FIB_LKUP_RET_NOT_FWDED if maps::own_addr(dst).is_some() => HOST,
        BPF_FIB_LKUP_RET_FWD_DISABLED | BPF_FIB_LKUP_RET_UNSUPP_LWT => UNKNOWN,
        _ => NO_ROUTE,
    }
}

/// The fields of an IP header, and the start of the transport header.
#[derive(Clone, Copy)]
pub struct Header<A> {
    /// The offset of the IP header in the packet, in bytes.
    pub at: u32,
    pub src: A,
    pub dst: A,
    pub proto: Proto,
    pub l4: u32,
    /// The end of the packet, by the length in its IP header.
    pub end: u32,
    pub part: FragmentPart,
    /// The protocol and the identification that a packet's fragments share.
    pub split: Proto,
    pub id: u32,
}

/// Returns the end of a packet, from `start` and the length in its IP header (in network byte
/// order). A length of 0 belongs to a packet of more than 64 KiB that the kernel will segment.
#[inline(always)]
pub fn end(skb: Skb, start: u32, len: u16) -> u32 {
    if len == 0 && skb.len() > u16::MAX.into() {
        skb.len()
    } else {
        start + u32::from(u16::from_be(len))
    }
}

/// The next hop of a packet.
#[derive(Clone, Copy)]
pub enum NextHop {
    /// A socket of the host.
    Host,
    /// The device with this interface index.
    Device(u32),
}
