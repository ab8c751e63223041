//! The look-up of routes.

use core::mem::transmute;
use core::ptr::from_mut;

use aya_ebpf::bindings::{
    BPF_FIB_LKUP_RET_FWD_DISABLED, BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_NOT_FWDED,
    BPF_FIB_LKUP_RET_SUCCESS, BPF_FIB_LKUP_RET_UNSUPP_LWT, BPF_FIB_LOOKUP_SRC,
    bpf_fib_lookup as FibLookup,
};
use aya_ebpf::helpers::generated::{bpf_fib_lookup, bpf_skb_load_bytes};
use proxy_common::counter::Reason;
use proxy_common::device::Node;

use crate::maps;
use crate::net::Net;
use crate::setting::ZERO;
use crate::skb::{ETH_LEN, Skb};

/// The next hop of a packet.
#[derive(Clone, Copy)]
pub enum NextHop {
    /// A socket of the host.
    Host,
    /// The device with this interface index.
    Device(u32),
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

/// Returns the host's source address on a device: the route's source, or else the device's own
/// address. `None` if the device has no address: the kernel would then use the address of any other
/// device.
#[inline(always)]
pub fn source_at<A: Net>(ifindex: u32, by_route: &A) -> Option<A> {
    let own = maps::address_of(ifindex)?;
    Some(if by_route.is_unicast() {
        *by_route
    } else {
        own
    })
}

#[inline(always)]
fn next_hop(found: u32) -> Result<NextHop, Reason> {
    match found {
        NO_ROUTE | UNKNOWN => Err(Reason::NoRoute),
        HOST => Ok(NextHop::Host),
        ifindex => Ok(NextHop::Device(ifindex)),
    }
}

// The results of `look_up_route` other than the index of a device, in one register.
const HOST: u32 = 0;
const NO_ROUTE: u32 = u32::MAX;
/// The kernel returns no route: the device does not forward, or the route encapsulates.
pub const UNKNOWN: u32 = u32::MAX - 1;

/// Looks up the route of a packet that comes in through the device or, with BPF_FIB_LOOKUP_OUTPUT
/// in `flags`, leaves through it. Returns a device index, or a constant above.
#[inline(never)]
pub fn look_up_route<A: Net>(skb: Skb, ifindex: u32, src: &A, dst: &A, flags: u32) -> u32 {
    let mut fib = empty();
    ask(skb, ifindex, (src, dst), &mut fib, flags)
}

/// Looks up the route of the host's own packet.
#[inline(never)]
fn look_up_way<A: Net>(skb: Skb, ifindex: u32, src: &A, dst: &A) -> u32 {
    let mut fib = empty();
    choose_as_sent::<A>(skb, &mut fib);
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
        choose_as_sent::<A>(skb, &mut fib);
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

/// Copies the fields by which the kernel chooses among several next hops from a packet with Ethernet
/// header, if [`CHOOSES_AGAIN`](crate::net::IpVersion::CHOOSES_AGAIN).
///
/// `__bpf_redirect_neigh_v6` looks up the route by traffic class, flow label and next header. (The
/// kernel masks the version, which is in the same word.)
#[inline(always)]
fn choose_as_sent<A: Net>(skb: Skb, fib: &mut FibLookup) {
    if A::CHOOSES_AGAIN {
        load_into(skb, ETH_LEN, &mut fib.__bindgen_anon_2);
        load_into(skb, ETH_LEN + 6, &mut fib.l4_protocol);
    }
}

/// Loads a field of the look-up from the packet; 0 if the packet is too short.
#[inline(always)]
fn load_into<T: Copy>(skb: Skb, offset: u32, field: &mut T) {
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
