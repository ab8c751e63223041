//! The slow path: the hooks' work for all packets that no fast path has finished.
//!
//! One program of each family contains it for all hooks (`kpx_slow4`, `kpx_slow6`; with `_l3` for
//! devices without Ethernet header), so that a start verifies each of its parts once. The hooks'
//! programs reach it by a tail call ([`maps::call_slow`]). The kernel empties the program array with
//! the array's last descriptor or pin. Without a pin, the loader takes those programs of the hooks
//! that contain the slow path ([`SlowPath::Contained`]).

use proxy_common::addr::{Addr4, Addr6};
use proxy_common::counter::{Event, Reason, Verdict};
use proxy_common::flow::Hook;
use proxy_common::hook::{Direction, HookId, PacketHook};
use proxy_macros::global_fn;

use crate::maps::{self, Marked, Memory};
use crate::net::{IpVersion, Net};
use crate::outcome::{Action, Outcome};
use crate::redirect::Forward;
use crate::reject::{self, Exit};
use crate::setting::HANDS_OVER;
use crate::skb::{LinkHeader, PacketMark, Skb};
use crate::{anchor, egress, handover, icmp, ingress, lo, log, monitor, not_ip};

/// The place of the slow path of a hook's program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum SlowPath {
    /// A program of its own.
    Called,
    /// This program.
    Contained,
}

/// Finishes a packet with the outcome of a fast path, or leaves the packet to the slow path.
#[inline(always)]
pub fn finish<A: Forward>(
    skb: Skb,
    link: LinkHeader,
    hook: PacketHook,
    slow_path: SlowPath,
    outcome: Outcome,
    mut memory: Memory,
) -> i32 {
    if slow_path == SlowPath::Contained {
        return run::<A>(skb, link, hook, outcome, memory);
    }
    if let Some(Action(action)) = ended(hook, &outcome) {
        log::packet::<A>(skb, link, outcome.0, memory.lend());
        return action;
    }
    skb.hand_over(hook, &outcome);
    maps::call_slow(skb, A::slow(hook));
    // The array lacks the program.
    let reason = match outcome.result() {
        Err(reason) => reason,
        Ok(_) if may_have_flow::<A>(skb, link) => Reason::SlowPathMissing,
        Ok(_) => Reason::NoFlow,
    };
    maps::count(reason);
    match verdict(hook, reason) {
        Verdict::Pass if handover::is_from_tunnel::<A>(hook, memory) => Action::DROP.0,
        Verdict::Pass => {
            if hook.direction() == Direction::Egress {
                skb.clear_packet_mark();
            }
            Action::PASS.0
        }
        Verdict::Drop | Verdict::Reject => Action::DROP.0,
    }
}

/// Returns true if an end of the packet has flows: untranslated, the packet would reset its
/// connection. Other packets pass, so that the node stays reachable without a slow path.
#[inline(never)]
fn may_have_flow<A: Net>(skb: Skb, link: LinkHeader) -> bool {
    let head = match link {
        LinkHeader::Ethernet => A::peek(skb),
        LinkHeader::None => None,
    };
    head.is_some_and(|head| Marked::of(head.src(), head.dst()) != Marked::NONE)
}

/// Leaves a packet to the slow path, at a hook without a fast path.
#[inline(always)]
pub fn leave_all(
    skb: Skb,
    link: LinkHeader,
    hook: PacketHook,
    slow_path: SlowPath,
    memory: Memory,
) -> i32 {
    let outcome = Outcome::NOT_ESTABLISHED;
    match skb.ethertype() {
        Addr4::ETHERTYPE => finish::<Addr4>(skb, link, hook, slow_path, outcome, memory),
        Addr6::ETHERTYPE => finish::<Addr6>(skb, link, hook, slow_path, outcome, memory),
        _ => not_ip(Action::PASS),
    }
}

/// Handles a packet that a hook's program has handed over by a tail call.
#[inline(always)]
pub fn take<A: Forward>(skb: Skb, link: LinkHeader, memory: Memory) -> i32 {
    match skb.handed_over() {
        Some((hook, outcome)) => run::<A>(skb, link, hook, outcome, memory),
        None => not_ip(Action::PASS),
    }
}

#[inline(always)]
fn run<A: Forward>(
    skb: Skb,
    link: LinkHeader,
    hook: PacketHook,
    outcome: Outcome,
    mut memory: Memory,
) -> i32 {
    if !outcome.is_for_slow_path() {
        return conclude::<A>(skb, hook, outcome, memory);
    }
    let mark = match hook {
        PacketHook::Egress | PacketHook::Lo | PacketHook::HeaderlessEgress => skb.packet_mark(),
        PacketHook::Ingress
        | PacketHook::Anchor
        | PacketHook::HeaderlessIngress
        | PacketHook::Tunnel => PacketMark::NONE,
    };
    let outcome = match link {
        LinkHeader::Ethernet => with_ethernet::<A>(skb, hook, memory.lend()),
        LinkHeader::None => headerless::<A>(skb, hook, mark, memory.lend()),
    };
    let outcome = if outcome.is_other_protocol() {
        error::<A>(skb, link, hook, mark, memory.lend())
    } else {
        outcome
    };
    conclude::<A>(skb, hook, outcome, memory)
}

#[inline(always)]
fn with_ethernet<A: Forward>(skb: Skb, hook: PacketHook, memory: Memory) -> Outcome {
    match hook {
        PacketHook::Ingress => ingress::<A>(skb, LinkHeader::Ethernet, memory),
        PacketHook::Egress => egress::<A>(skb, LinkHeader::Ethernet, memory),
        PacketHook::Anchor => anchor::<A>(skb, memory),
        PacketHook::Lo => lo::<A>(skb, memory),
        PacketHook::HeaderlessIngress | PacketHook::HeaderlessEgress | PacketHook::Tunnel => {
            Outcome::new(Err(Reason::SlowPathMissing))
        }
    }
}

/// Handles a packet at a device whose packets start with their IP header (tunnels, WireGuard, PPP,
/// tun), as the hooks of Ethernet devices do.
///
/// Packets from and to such a device always take the stack. The device is never an edge
/// ([`Device::EDGE`](proxy_common::device::Device::EDGE)), so nothing clears a mark here.
#[inline(always)]
fn headerless<A: Forward>(skb: Skb, hook: PacketHook, mark: PacketMark, memory: Memory) -> Outcome {
    if hook != PacketHook::HeaderlessEgress {
        return ingress::<A>(skb, LinkHeader::None, memory);
    }
    // The packet may be a fragment. The hook checks the mark again after parsing.
    if skb.weigh(mark, true).is_done() {
        skb.settle_packet_mark();
        return Outcome::new(Err(Reason::NotOurs));
    }
    egress::<A>(skb, LinkHeader::None, memory)
}

/// Handles a packet of another protocol, if it is an ICMP error about a packet of a flow.
#[inline(always)]
fn error<A: Forward>(
    skb: Skb,
    link: LinkHeader,
    hook: PacketHook,
    mark: PacketMark,
    mut memory: Memory,
) -> Outcome {
    let at = match hook {
        PacketHook::Ingress | PacketHook::HeaderlessIngress | PacketHook::Tunnel => Hook::INGRESS,
        PacketHook::Egress | PacketHook::HeaderlessEgress | PacketHook::Lo => Hook::EGRESS,
        PacketHook::Anchor => Hook::ANCHOR,
    };
    if HANDS_OVER.get() != 0 && at == Hook::INGRESS && handover::is_spoofed::<A>(skb, link) {
        return Outcome::new(Err(Reason::Spoofed));
    }
    let outcome = icmp::<A>(skb, link, at, mark, memory.lend());
    if hook == PacketHook::Lo && outcome.is_other_protocol() {
        return icmp::<A>(skb, link, Hook::ANCHOR, PacketMark::NONE, memory);
    }
    outcome
}

// Separate functions, so that the verifier's work stays small, and their stack is free again before
// replies and logs.

#[inline(never)]
fn ingress<A: Forward>(skb: Skb, link: LinkHeader, memory: Memory) -> Outcome {
    Outcome::new(ingress::run::<A>(skb, link, memory))
}

#[inline(never)]
fn egress<A: Net>(skb: Skb, link: LinkHeader, memory: Memory) -> Outcome {
    Outcome::new(egress::run::<A>(skb, link, memory))
}

#[inline(never)]
fn anchor<A: Forward>(skb: Skb, memory: Memory) -> Outcome {
    Outcome::new(anchor::run::<A>(skb, memory))
}

#[inline(never)]
fn lo<A: Forward>(skb: Skb, memory: Memory) -> Outcome {
    Outcome::new(lo::run::<A>(skb, memory))
}

#[global_fn(kpx_icmp4, kpx_icmp6)]
fn icmp<A: Forward>(
    skb: Skb,
    link: LinkHeader,
    hook: Hook,
    mark: PacketMark,
    memory: Memory,
) -> Outcome {
    Outcome::new(icmp::run::<A>(skb, link, hook, mark, memory))
}

/// Returns the action of a translated packet. Counts and passes a packet without a flow.
#[inline(always)]
fn ended(hook: PacketHook, outcome: &Outcome) -> Option<Action> {
    if hook != PacketHook::Anchor
        && let Some(reason) = outcome.is_of_others()
    {
        maps::count(reason);
        return Some(Action::PASS);
    }
    outcome.action()
}

#[inline(always)]
fn conclude<A: Net>(skb: Skb, hook: PacketHook, outcome: Outcome, mut memory: Memory) -> i32 {
    log::packet::<A>(skb, exit(hook).link(), outcome.0, memory.lend());
    let outcome = if handover::is_from_tunnel::<A>(hook, memory.lend()) && outcome.passes() {
        Outcome::new(Err(Reason::HandoverRefused))
    } else {
        outcome
    };
    match ended(hook, &outcome) {
        Some(Action(action)) => action,
        None => refuse::<A>(skb, hook.id(), outcome, memory).0,
    }
}

/// Counts a reason, and applies its verdict. No other code decides the fate of an untranslated
/// packet.
#[global_fn(kpx_refuse4, kpx_refuse6)]
fn refuse<A: Net>(skb: Skb, hook: HookId, outcome: Outcome, memory: Memory) -> Action {
    let (Err(reason), Some(hook)) = (outcome.result(), hook.known()) else {
        return Action::PASS;
    };
    maps::count(reason);
    let verdict = verdict(hook, reason);
    monitor::refused::<A>(skb, hook, reason, verdict, memory);
    match verdict {
        Verdict::Pass => Action::PASS,
        Verdict::Drop => Action::DROP,
        Verdict::Reject if !reject::may_answer(skb, exit(hook)) => {
            maps::count(Event::Unanswered);
            Action::DROP
        }
        Verdict::Reject => {
            let answer = reject::<A>(skb, exit(hook));
            if answer != Action::DROP {
                maps::count(Event::Rejected);
            }
            answer
        }
    }
}

#[global_fn(kpx_reject4, kpx_reject6)]
fn reject<A: Net>(skb: Skb, exit: Exit) -> Action {
    reject::run::<A>(skb, exit).unwrap_or(Action::DROP)
}

#[inline(always)]
fn exit(hook: PacketHook) -> Exit {
    match hook {
        PacketHook::Anchor | PacketHook::Lo => Exit::Host,
        PacketHook::Ingress | PacketHook::Egress => Exit::Device,
        PacketHook::HeaderlessIngress | PacketHook::HeaderlessEgress | PacketHook::Tunnel => {
            Exit::Headerless
        }
    }
}

#[inline(always)]
fn verdict(hook: PacketHook, reason: Reason) -> Verdict {
    if hook == PacketHook::Anchor {
        reason.verdict_at_anchor()
    } else {
        reason.verdict()
    }
}
