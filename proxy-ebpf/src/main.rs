//! kpx's kernel programs.
//!
//! `kpx_ingress` and `kpx_egress` sit on every device whose packets have an Ethernet header;
//! `kpx_ingress_l3` and `kpx_egress_l3` on those whose packets start with IP. The host's own
//! packets to services start on the egress of the anchor, with `kpx_anchor`. If the service's
//! address is the host's own, they start on the egress of lo, with `kpx_lo`.
//! Two rules hold on devices: an ingress hook rewrites only a packet's destination address, an
//! egress hook only its source address. So routing, rp_filter, conntrack and network
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
mod flow;
mod foreign_nat;
mod fragment;
mod global_fn;
mod headerless;
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
mod sctp;
mod select;
mod setting;
mod skb;
mod socket;
mod state_change;
mod tcp;

use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use proxy_common::addr::{Addr4, Addr6};
use proxy_common::counter::{Event, Reason, Verdict};
use proxy_common::flow::Hook;
use proxy_common::hook::PacketHook;

use crate::maps::Memory;
use crate::net::Net;
use crate::outcome::{Action, Outcome};
use crate::reject::Exit;
use crate::skb::{LinkHeader, PacketMark, Skb};

#[classifier]
pub fn kpx_ingress(ctx: TcContext) -> i32 {
    let skb = Skb::new(&ctx);
    // SAFETY: this is the entry of a tc program, and the only call here.
    let mut memory = unsafe { Memory::of_hook() };
    skb.clear_foreign_mark();
    if ingress::is_for_macvlan(skb) {
        maps::count(Reason::NotOurs);
        return Action::PASS.0;
    }
    match skb.ethertype() {
        Addr4::ETHERTYPE => {
            let outcome = arriving4(skb, memory.lend())
                .or_slow(|| ingress4(skb, LinkHeader::Ethernet, memory.lend()));
            conclude::<Addr4>(
                skb,
                outcome.or_error(|| {
                    icmp4(
                        skb,
                        LinkHeader::Ethernet,
                        Hook::INGRESS,
                        PacketMark::NONE,
                        memory.lend(),
                    )
                }),
                PacketHook::Ingress,
                memory,
            )
        }
        Addr6::ETHERTYPE => {
            let outcome = arriving6(skb, memory.lend())
                .or_slow(|| ingress6(skb, LinkHeader::Ethernet, memory.lend()));
            conclude::<Addr6>(
                skb,
                outcome.or_error(|| {
                    icmp6(
                        skb,
                        LinkHeader::Ethernet,
                        Hook::INGRESS,
                        PacketMark::NONE,
                        memory.lend(),
                    )
                }),
                PacketHook::Ingress,
                memory,
            )
        }
        _ if ingress::is_hidden_by_tags(skb) => {
            maps::count(Reason::Spoofed);
            Action::DROP.0
        }
        _ => not_ip(Action::PASS),
    }
}

#[classifier]
pub fn kpx_egress(ctx: TcContext) -> i32 {
    let skb = Skb::new(&ctx);
    // SAFETY: this is the entry of a tc program, and the only call here.
    let mut memory = unsafe { Memory::of_hook() };
    let mark = skb.packet_mark();
    match skb.ethertype() {
        Addr4::ETHERTYPE => {
            let outcome = leaving4(skb, memory.lend())
                .or_slow(|| egress4(skb, LinkHeader::Ethernet, memory.lend()));
            conclude::<Addr4>(
                skb,
                outcome.or_error(|| {
                    icmp4(skb, LinkHeader::Ethernet, Hook::EGRESS, mark, memory.lend())
                }),
                PacketHook::Egress,
                memory,
            )
        }
        Addr6::ETHERTYPE => {
            let outcome = leaving6(skb, memory.lend())
                .or_slow(|| egress6(skb, LinkHeader::Ethernet, memory.lend()));
            conclude::<Addr6>(
                skb,
                outcome.or_error(|| {
                    icmp6(skb, LinkHeader::Ethernet, Hook::EGRESS, mark, memory.lend())
                }),
                PacketHook::Egress,
                memory,
            )
        }
        _ => not_ip(Action::PASS),
    }
}

#[classifier]
pub fn kpx_anchor(ctx: TcContext) -> i32 {
    let skb = Skb::new(&ctx);
    // SAFETY: this is the entry of a tc program, and the only call here.
    let mut memory = unsafe { Memory::of_hook() };
    match skb.ethertype() {
        Addr4::ETHERTYPE => conclude::<Addr4>(
            skb,
            sent4(skb)
                .or_slow(|| anchor4(skb, memory.lend()))
                .or_error(|| {
                    icmp4(
                        skb,
                        LinkHeader::Ethernet,
                        Hook::ANCHOR,
                        PacketMark::NONE,
                        memory.lend(),
                    )
                }),
            PacketHook::Anchor,
            memory,
        ),
        Addr6::ETHERTYPE => conclude::<Addr6>(
            skb,
            sent6(skb)
                .or_slow(|| anchor6(skb, memory.lend()))
                .or_error(|| {
                    icmp6(
                        skb,
                        LinkHeader::Ethernet,
                        Hook::ANCHOR,
                        PacketMark::NONE,
                        memory.lend(),
                    )
                }),
            PacketHook::Anchor,
            memory,
        ),
        _ => not_ip(Action::DROP),
    }
}

#[classifier]
pub fn kpx_lo(ctx: TcContext) -> i32 {
    let skb = Skb::new(&ctx);
    // SAFETY: this is the entry of a tc program, and the only call here.
    let mut memory = unsafe { Memory::of_hook() };
    let mark = skb.packet_mark();
    match skb.ethertype() {
        Addr4::ETHERTYPE => {
            let outcome = lo4(skb, memory.lend())
                .or_error(|| icmp4(skb, LinkHeader::Ethernet, Hook::EGRESS, mark, memory.lend()));
            conclude::<Addr4>(
                skb,
                outcome.or_error(|| {
                    icmp4(
                        skb,
                        LinkHeader::Ethernet,
                        Hook::ANCHOR,
                        PacketMark::NONE,
                        memory.lend(),
                    )
                }),
                PacketHook::Lo,
                memory,
            )
        }
        Addr6::ETHERTYPE => {
            let outcome = lo6(skb, memory.lend())
                .or_error(|| icmp6(skb, LinkHeader::Ethernet, Hook::EGRESS, mark, memory.lend()));
            conclude::<Addr6>(
                skb,
                outcome.or_error(|| {
                    icmp6(
                        skb,
                        LinkHeader::Ethernet,
                        Hook::ANCHOR,
                        PacketMark::NONE,
                        memory.lend(),
                    )
                }),
                PacketHook::Lo,
                memory,
            )
        }
        _ => not_ip(Action::PASS),
    }
}

#[classifier]
pub fn kpx_ingress_l3(ctx: TcContext) -> i32 {
    // SAFETY: this is the entry of a tc program, and the only call here.
    headerless::ingress(Skb::new(&ctx), unsafe { Memory::of_hook() })
}

#[classifier]
pub fn kpx_egress_l3(ctx: TcContext) -> i32 {
    // SAFETY: this is the entry of a tc program, and the only call here.
    headerless::egress(Skb::new(&ctx), unsafe { Memory::of_hook() })
}

// Bodies are functions of their own, one per family. So the verifier's work stays small, and their
// stack is free again before anything is answered or logged.

#[inline(always)]
fn arriving4(skb: Skb, memory: Memory) -> Outcome {
    if redirect::is_on() {
        quick4(skb, memory)
    } else {
        settled4(skb, memory)
    }
}

#[inline(always)]
fn arriving6(skb: Skb, memory: Memory) -> Outcome {
    if redirect::is_on() {
        quick6(skb, memory)
    } else {
        settled6(skb, memory)
    }
}

#[inline(always)]
fn quick4(skb: Skb, _: Memory) -> Outcome {
    Outcome(global_fn::kpx_quick4(skb.as_ptr()))
}

#[inline(always)]
fn quick6(skb: Skb, _: Memory) -> Outcome {
    Outcome(global_fn::kpx_quick6(skb.as_ptr()))
}

// One for each hook: what a hook never meets costs it nothing.

#[inline(never)]
fn settled4(skb: Skb, memory: Memory) -> Outcome {
    established::run::<Addr4>(skb, Hook::INGRESS, memory)
}

#[inline(never)]
fn settled6(skb: Skb, memory: Memory) -> Outcome {
    established::run::<Addr6>(skb, Hook::INGRESS, memory)
}

#[inline(never)]
fn leaving4(skb: Skb, memory: Memory) -> Outcome {
    established::run::<Addr4>(skb, Hook::EGRESS, memory)
}

#[inline(never)]
fn leaving6(skb: Skb, memory: Memory) -> Outcome {
    established::run::<Addr6>(skb, Hook::EGRESS, memory)
}

#[inline(never)]
fn ingress4(skb: Skb, link: LinkHeader, memory: Memory) -> Outcome {
    Outcome::new(ingress::run::<Addr4>(skb, link, memory))
}

#[inline(never)]
fn ingress6(skb: Skb, link: LinkHeader, memory: Memory) -> Outcome {
    Outcome::new(ingress::run::<Addr6>(skb, link, memory))
}

#[inline(never)]
fn egress4(skb: Skb, link: LinkHeader, memory: Memory) -> Outcome {
    Outcome::new(egress::run::<Addr4>(skb, link, memory))
}

#[inline(never)]
fn egress6(skb: Skb, link: LinkHeader, memory: Memory) -> Outcome {
    Outcome::new(egress::run::<Addr6>(skb, link, memory))
}

#[inline(never)]
fn sent4(skb: Skb) -> Outcome {
    anchor::quick::<Addr4>(skb)
}

#[inline(never)]
fn anchor4(skb: Skb, memory: Memory) -> Outcome {
    Outcome::new(anchor::run::<Addr4>(skb, memory))
}

#[inline(never)]
fn sent6(skb: Skb) -> Outcome {
    anchor::quick::<Addr6>(skb)
}

#[inline(never)]
fn anchor6(skb: Skb, memory: Memory) -> Outcome {
    Outcome::new(anchor::run::<Addr6>(skb, memory))
}

#[inline(never)]
fn lo4(skb: Skb, memory: Memory) -> Outcome {
    Outcome::new(lo::run::<Addr4>(skb, memory))
}

#[inline(never)]
fn lo6(skb: Skb, memory: Memory) -> Outcome {
    Outcome::new(lo::run::<Addr6>(skb, memory))
}

#[inline(never)]
fn icmp4(skb: Skb, link: LinkHeader, hook: Hook, mark: PacketMark, memory: Memory) -> Outcome {
    Outcome::new(icmp::run::<Addr4>(skb, link, hook, mark, memory))
}

#[inline(never)]
fn icmp6(skb: Skb, link: LinkHeader, hook: Hook, mark: PacketMark, memory: Memory) -> Outcome {
    Outcome::new(icmp::run::<Addr6>(skb, link, hook, mark, memory))
}

/// Counts a reason and does what its verdict says. Nothing else decides the fate of a packet that
/// is not translated.
#[inline(always)]
fn conclude<A: Net>(skb: Skb, outcome: Outcome, hook: PacketHook, mut memory: Memory) -> i32 {
    let exit = match hook {
        PacketHook::Anchor | PacketHook::Lo => Exit::Host,
        PacketHook::Ingress | PacketHook::Egress => Exit::Device,
        PacketHook::HeaderlessIngress | PacketHook::HeaderlessEgress => Exit::Headerless,
    };
    log::packet::<A>(skb, exit.link(), outcome.0, memory.lend());
    // Most packets of a node that are not translated: what follows here would find the same.
    if hook != PacketHook::Anchor
        && let Some(reason) = outcome.is_of_others()
    {
        maps::count(reason);
        return Action::PASS.0;
    }
    let reason = match outcome.result() {
        Ok(Action(action)) => return action,
        Err(reason) => reason,
    };
    maps::count(reason);
    let verdict = if hook == PacketHook::Anchor {
        reason.verdict_at_anchor()
    } else {
        reason.verdict()
    };
    monitor::refused::<A>(skb, hook, reason, verdict, memory);
    let Action(action) = match verdict {
        Verdict::Pass => Action::PASS,
        Verdict::Drop => Action::DROP,
        Verdict::Reject if !reject::may_answer(skb, exit) => {
            maps::count(Event::Unanswered);
            Action::DROP
        }
        Verdict::Reject => {
            let answer = A::reject(skb, exit);
            if answer != Action::DROP {
                maps::count(Event::Rejected);
            }
            answer
        }
    };
    action
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

/// The kernel lends `bpf_redirect_neigh` and others only to programs that declare a GPL-compatible
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
