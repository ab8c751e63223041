//! kpx's kernel programs.
//!
//! `kpx_ingress` and `kpx_egress` sit on every device with Ethernet headers, `kpx_ingress_l3` and
//! `kpx_egress_l3` on devices where packets start with the IP header. The host's own packets to
//! services start on the egress of the anchor, with `kpx_anchor`. `kpx_tunnel` takes the packets of
//! external clients that other nodes hand over. If the service's address is the
//! host's own, they start on the egress of lo, with `kpx_lo`. Two rules hold on devices: an ingress
//! hook rewrites only a packet's destination address, an egress hook only its source address (and the
//! MSS of SYN-ACKs, where clients are handed over). So routing, rp_filter, conntrack and network
//! policy in between see "client to backend" and back, and nothing else.
//!
//! The crate also builds for the host, as an empty program, so that one clippy run covers the
//! workspace.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]
#![allow(
    unreachable_pub,
    reason = "a program has no users: `pub` means visible to the other modules"
)]
#![cfg_attr(
    not(target_arch = "bpf"),
    allow(dead_code, reason = "on the host nothing calls the hooks")
)]

mod anchor;
mod checksum;
mod clock;
mod decide;
mod egress;
mod established;
mod extension;
mod fast_path;
mod flow;
mod foreign_nat;
mod fragment;
mod global_fn;
mod handover;
mod header;
mod host;
mod icmp;
mod ingress;
mod ipv4;
mod ipv6;
mod lo;
mod log;
mod lookup;
mod maps;
mod monitor;
mod net;
mod open;
mod opening;
mod outcome;
mod packet;
mod random;
mod redirect;
mod reject;
mod ring;
mod route;
mod sctp;
mod select;
mod setting;
mod skb;
mod slow;
mod socket;
mod spoof;
mod state_change;
mod tcp;
mod udp;

use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use proxy_common::addr::{Addr4, Addr6};
use proxy_common::counter::Reason;
use proxy_common::flow::Hook;
use proxy_common::hook::PacketHook;

use crate::maps::Memory;
use crate::net::{IpVersion, Net};
use crate::outcome::{Action, Outcome};
use crate::redirect::Forward;
use crate::skb::{LinkHeader, Skb};
use crate::slow::SlowPath;

/// Defines the two programs of each hook: the first calls the slow path, the second contains it.
macro_rules! hooks {
    ($($called:ident, $contained:ident => $hook:ident;)*) => {
        $(
            #[classifier]
            pub fn $called(ctx: TcContext) -> i32 {
                $hook(&ctx, SlowPath::Called)
            }

            #[classifier]
            pub fn $contained(ctx: TcContext) -> i32 {
                $hook(&ctx, SlowPath::Contained)
            }
        )*
    };
}

hooks! {
    kpx_ingress, kpx_ingress_whole => at_ingress;
    kpx_egress, kpx_egress_whole => at_egress;
    kpx_anchor, kpx_anchor_whole => at_anchor;
    kpx_lo, kpx_lo_whole => at_lo;
    kpx_ingress_l3, kpx_ingress_l3_whole => at_headerless_ingress;
    kpx_egress_l3, kpx_egress_l3_whole => at_headerless_egress;
}

#[inline(always)]
fn at_ingress(ctx: &TcContext, slow_path: SlowPath) -> i32 {
    let skb = Skb::new(ctx);
    // SAFETY: this is the entry of a tc program, and the only call here.
    let memory = unsafe { Memory::of_hook() };
    skb.clear_foreign_mark();
    if ingress::is_for_macvlan(skb) {
        maps::count(Reason::NotOurs);
        return Action::PASS.0;
    }
    match skb.ethertype() {
        Addr4::ETHERTYPE => arriving::<Addr4>(skb, slow_path, memory),
        Addr6::ETHERTYPE => arriving::<Addr6>(skb, slow_path, memory),
        _ if ingress::is_hidden_by_tags(skb) => {
            maps::count(Reason::Spoofed);
            Action::DROP.0
        }
        _ => not_ip(Action::PASS),
    }
}

#[inline(always)]
fn at_egress(ctx: &TcContext, slow_path: SlowPath) -> i32 {
    let skb = Skb::new(ctx);
    // SAFETY: this is the entry of a tc program, and the only call here.
    let memory = unsafe { Memory::of_hook() };
    match skb.ethertype() {
        Addr4::ETHERTYPE => leaving::<Addr4>(skb, slow_path, memory),
        Addr6::ETHERTYPE => leaving::<Addr6>(skb, slow_path, memory),
        _ => not_ip(Action::PASS),
    }
}

#[inline(always)]
fn at_anchor(ctx: &TcContext, slow_path: SlowPath) -> i32 {
    let skb = Skb::new(ctx);
    // SAFETY: this is the entry of a tc program, and the only call here.
    let memory = unsafe { Memory::of_hook() };
    match skb.ethertype() {
        Addr4::ETHERTYPE => sent::<Addr4>(skb, slow_path, memory),
        Addr6::ETHERTYPE => sent::<Addr6>(skb, slow_path, memory),
        _ => not_ip(Action::DROP),
    }
}

#[inline(always)]
fn at_lo(ctx: &TcContext, slow_path: SlowPath) -> i32 {
    without_fast_path(ctx, LinkHeader::Ethernet, PacketHook::Lo, slow_path)
}

#[inline(always)]
fn at_headerless_ingress(ctx: &TcContext, slow_path: SlowPath) -> i32 {
    let hook = PacketHook::HeaderlessIngress;
    without_fast_path(ctx, LinkHeader::None, hook, slow_path)
}

#[inline(always)]
fn at_headerless_egress(ctx: &TcContext, slow_path: SlowPath) -> i32 {
    let hook = PacketHook::HeaderlessEgress;
    without_fast_path(ctx, LinkHeader::None, hook, slow_path)
}

#[inline(always)]
fn without_fast_path(
    ctx: &TcContext,
    link: LinkHeader,
    hook: PacketHook,
    slow_path: SlowPath,
) -> i32 {
    // SAFETY: this is the entry of a tc program, and the only call here.
    let memory = unsafe { Memory::of_hook() };
    slow::leave_all(Skb::new(ctx), link, hook, slow_path, memory)
}

#[classifier]
pub fn kpx_slow4(ctx: TcContext) -> i32 {
    called::<Addr4>(&ctx, LinkHeader::Ethernet)
}

#[classifier]
pub fn kpx_slow6(ctx: TcContext) -> i32 {
    called::<Addr6>(&ctx, LinkHeader::Ethernet)
}

#[classifier]
pub fn kpx_slow4_l3(ctx: TcContext) -> i32 {
    called::<Addr4>(&ctx, LinkHeader::None)
}

#[classifier]
pub fn kpx_slow6_l3(ctx: TcContext) -> i32 {
    called::<Addr6>(&ctx, LinkHeader::None)
}

#[inline(always)]
fn called<A: Forward>(ctx: &TcContext, link: LinkHeader) -> i32 {
    // SAFETY: this is the entry of a tc program, and the only call here. The program that called it
    // by a tail call has ended.
    let memory = unsafe { Memory::of_hook() };
    slow::take::<A>(Skb::new(ctx), link, memory)
}

#[classifier]
pub fn kpx_tunnel(ctx: TcContext) -> i32 {
    let skb = Skb::new(&ctx);
    // SAFETY: this is the entry of a tc program, and the only call here.
    let memory = unsafe { Memory::of_hook() };
    match skb.ethertype() {
        Addr4::ETHERTYPE => handover::receive::<Addr4>(skb, memory),
        Addr6::ETHERTYPE => handover::receive::<Addr6>(skb, memory),
        _ => not_ip(Action::DROP),
    }
}

#[inline(always)]
fn arriving<A: Forward>(skb: Skb, slow_path: SlowPath, mut memory: Memory) -> i32 {
    let handed_over = handover::arrives::<A>(skb, memory.lend());
    let outcome = if fast_path::is_on() {
        redirect::quick::<A>(skb, memory.lend())
    } else {
        settled::<A>(skb, memory.lend())
    };
    // A node port of another node is no frontend on the fast path.
    let outcome = if handed_over && outcome.action().is_none() {
        Outcome::NOT_ESTABLISHED
    } else {
        outcome
    };
    slow::finish::<A>(
        skb,
        LinkHeader::Ethernet,
        PacketHook::Ingress,
        slow_path,
        outcome,
        memory,
    )
}

#[inline(always)]
fn leaving<A: Forward>(skb: Skb, slow_path: SlowPath, mut memory: Memory) -> i32 {
    let outcome = unsettled::<A>(skb, memory.lend());
    slow::finish::<A>(
        skb,
        LinkHeader::Ethernet,
        PacketHook::Egress,
        slow_path,
        outcome,
        memory,
    )
}

#[inline(always)]
fn sent<A: Forward>(skb: Skb, slow_path: SlowPath, memory: Memory) -> i32 {
    let outcome = by_kept_link::<A>(skb);
    slow::finish::<A>(
        skb,
        LinkHeader::Ethernet,
        PacketHook::Anchor,
        slow_path,
        outcome,
        memory,
    )
}

// One function for each hook, so that a hook contains no code for packets that it never sees. The
// function's stack is free again before the program rejects or logs a packet.

#[inline(never)]
fn settled<A: Net>(skb: Skb, memory: Memory) -> Outcome {
    established::run::<A>(skb, Hook::INGRESS, memory)
}

#[inline(never)]
fn unsettled<A: Net>(skb: Skb, memory: Memory) -> Outcome {
    established::run::<A>(skb, Hook::EGRESS, memory)
}

#[inline(never)]
fn by_kept_link<A: Net>(skb: Skb) -> Outcome {
    anchor::quick::<A>(skb)
}

#[inline(always)]
fn not_ip(Action(action): Action) -> i32 {
    maps::count(Reason::NotIp);
    action
}

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}

/// The kernel reserves `bpf_redirect_neigh` and other helpers for programs with a GPL-compatible
/// licence.
#[cfg_attr(
    target_arch = "bpf",
    unsafe(link_section = "license"),
    unsafe(no_mangle)
)]
#[used]
static LICENSE: [u8; 4] = *b"GPL\0";

#[cfg(not(target_arch = "bpf"))]
fn main() {}
