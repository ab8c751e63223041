//! The validation of a packet's source by addresses and routes.

use aya_ebpf::bindings::BPF_FIB_LOOKUP_OUTPUT;
use proxy_common::device::{Device, Node};
use proxy_macros::global_fn;

use crate::maps::{self, Moment, again};
use crate::net::Net;
use crate::route::{UNKNOWN, look_up_route};
use crate::skb::Skb;

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
