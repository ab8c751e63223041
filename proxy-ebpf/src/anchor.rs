//! The egress hook of the anchor, to which the host's packets to services at other addresses than
//! its own are routed.

use proxy_common::addr::Proto;
use proxy_common::counter::{Event, Reason};
use proxy_common::flow::{Flow, FlowKey, Hook, Kind, Term};

use crate::established;
use crate::header::Head;
use crate::maps::{self, Memory};
use crate::net::Net;
use crate::outcome::{Action, Outcome};
use crate::packet::Reading;
use crate::redirect::Forward;
use crate::skb::{PacketMark, Skb};
use crate::{host, packet, redirect, state_change, tcp};

/// Sends a packet of an open flow straight to its pod's device, by the link that the first packet
/// of this second has stored.
///
/// The slow path ([`run`]) does the same, but looks up the route and the neighbour for each packet.
/// The slow path takes all other packets: [`Outcome::NOT_ESTABLISHED`].
#[inline(always)]
pub fn quick<A: Net>(skb: Skb) -> Outcome {
    let Some(head) = established::head::<A>(skb, Hook::ANCHOR, PacketMark::NONE) else {
        return Outcome::NOT_ESTABLISHED;
    };
    if head.proto == Proto::TCP && head.flags & (tcp::SYN | tcp::RST) != 0 {
        return Outcome::NOT_ESTABLISHED;
    }
    let key = FlowKey::new(Hook::ANCHOR, head.proto, head.src, head.dst);
    let Some(entry) = maps::live_flow_here(&key) else {
        return Outcome::NOT_ESTABLISHED;
    };
    let is_change = established::changes_opener(&entry, &head);
    // Only packets that the host has made change the flow's state here.
    if is_change && (skb.came_in() || !state_change::may_be_taken(&head)) {
        return Outcome::NOT_ESTABLISHED;
    }
    let now_secs = maps::about_now_secs();
    let cached_route = entry.read(Flow::cached_route);
    let is_known = cached_route.holds(skb.ifindex(), Term::new(now_secs, maps::epoch()));
    if !is_known || entry.read(|flow| flow.last_secs != now_secs || flow.kind != Kind::DNAT) {
        return Outcome::NOT_ESTABLISHED;
    }
    let (source, backend) = entry.read(|flow| (flow.source, flow.backend));
    let exit = maps::exit(cached_route.exit(), &backend.addr)
        .filter(|exit| is_within(skb, &head, exit.mtu));
    let Some(exit) = exit else {
        return Outcome::NOT_ESTABLISHED;
    };
    if !entry.is_at(&key) || is_change && !established::take_change(&entry, &head, true) {
        return Outcome::NOT_ESTABLISHED;
    }
    entry.count(skb.segments(), skb.len());
    established::note_acked(&entry, &head);
    maps::count(Event::Forwarded);
    let sent = A::rewrite(skb, &head, &source, &backend).and_then(|()| skb.store(0, &exit.macs, 0));
    skb.set_packet_mark(PacketMark::DONE);
    Outcome::new(sent.map(|()| skb.redirect(exit.ifindex, 0)))
}

/// Returns true if each packet on the wire will fit the link's MTU.
#[inline(always)]
fn is_within<A: Net>(skb: Skb, head: &Head<A>, mtu: u32) -> bool {
    redirect::longest::<A>(skb, head.proto).is_some_and(|len| u32::from(len) <= mtu)
}

#[inline(always)]
pub fn run<A: Forward>(skb: Skb, mut memory: Memory) -> Result<Action, Reason> {
    packet::parse::<A>(skb, Hook::ANCHOR, Reading::ETHERNET, memory.lend())?;
    match host::send::<A>(skb, 0, memory.lend()) {
        Err(Reason::NoFlow) if skb.came_in() && is_met_at_ingress::<A>(memory) => {
            Err(Reason::Unhooked)
        }
        sent => sent,
    }
}

/// Returns true if the packet belongs to a flow that ingress hooks follow.
///
/// If so, another program has removed kpx's hook from the device. The agent soon restores the hook,
/// and the client sends the packet again. A refusal would end the connection.
#[inline(never)]
fn is_met_at_ingress<A: Net>(memory: Memory) -> bool {
    memory
        .scratch::<A>()
        .is_some_and(|(scratch, _)| maps::is_flow(&scratch.packet.flow_key(Hook::INGRESS)))
}
