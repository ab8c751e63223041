//! The hooks of devices whose packets start with their IP header: tunnels, WireGuard, PPP, tun.
//!
//! They do what the hooks of Ethernet devices do, by the slow path alone. Nothing is delivered past
//! the stack from or to such a device. It is never an edge
//! ([`Device::EDGE`](proxy_common::device::Device::EDGE)), so nothing clears a mark here.

use proxy_common::addr::{Addr4, Addr6};
use proxy_common::counter::Reason;
use proxy_common::flow::Hook;
use proxy_common::hook::PacketHook;

use crate::maps::Memory;
use crate::net::Net;
use crate::skb::{LinkHeader, PacketMark, Skb};
use crate::{
    Action, Outcome, conclude, egress4, egress6, icmp4, icmp6, ingress4, ingress6, not_ip,
};

const LINK: LinkHeader = LinkHeader::None;

#[inline(always)]
pub fn ingress(skb: Skb, mut memory: Memory) -> i32 {
    let hook = PacketHook::HeaderlessIngress;
    match skb.ethertype() {
        Addr4::ETHERTYPE => {
            let icmp = |memory| icmp4(skb, LINK, Hook::INGRESS, PacketMark::NONE, memory);
            let outcome = ingress4(skb, LINK, memory.lend()).or_error(|| icmp(memory.lend()));
            conclude::<Addr4>(skb, outcome, hook, memory)
        }
        Addr6::ETHERTYPE => {
            let icmp = |memory| icmp6(skb, LINK, Hook::INGRESS, PacketMark::NONE, memory);
            let outcome = ingress6(skb, LINK, memory.lend()).or_error(|| icmp(memory.lend()));
            conclude::<Addr6>(skb, outcome, hook, memory)
        }
        _ => not_ip(Action::PASS),
    }
}

#[inline(always)]
pub fn egress(skb: Skb, mut memory: Memory) -> i32 {
    let hook = PacketHook::HeaderlessEgress;
    let mark = skb.packet_mark();
    match skb.ethertype() {
        Addr4::ETHERTYPE => {
            let icmp = |memory| icmp4(skb, LINK, Hook::EGRESS, mark, memory);
            let outcome = unless_done(skb, mark, || egress4(skb, LINK, memory.lend()))
                .or_error(|| icmp(memory.lend()));
            conclude::<Addr4>(skb, outcome, hook, memory)
        }
        Addr6::ETHERTYPE => {
            let icmp = |memory| icmp6(skb, LINK, Hook::EGRESS, mark, memory);
            let outcome = unless_done(skb, mark, || egress6(skb, LINK, memory.lend()))
                .or_error(|| icmp(memory.lend()));
            conclude::<Addr6>(skb, outcome, hook, memory)
        }
        _ => not_ip(Action::PASS),
    }
}

/// Leaves a packet alone to which no hook has anything left to do.
#[inline(always)]
fn unless_done(skb: Skb, mark: PacketMark, egress: impl FnOnce() -> Outcome) -> Outcome {
    // A fragment, perhaps; the hook weighs the mark again once it knows.
    if skb.weigh(mark, true).is_done() {
        skb.settle_packet_mark();
        return Outcome::new(Err(Reason::NotOurs));
    }
    egress()
}
