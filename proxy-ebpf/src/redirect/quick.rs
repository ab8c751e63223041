//! The short way past the stack: packets without news for their flow, both of whose directions skip the stack.
//!
//! The long way ([`super::run`]) would do the same with these packets. All other packets take the long way, as does the
//! first packet of a flow in every second.

use proxy_common::addr::{Proto, SockAddr};
use proxy_common::counter::{Event, Reason};
use proxy_common::flow::{Flow, FlowKey, Hook, Kind, Seen, State, Term};

use super::fib::{find, leave};
use super::{END, Forward};
use crate::established::{self, Head};
use crate::maps::{self, Entry, Memory, Scratch};
use crate::outcome::Outcome;
use crate::skb::{PacketMark, Skb};
use crate::{flow, tcp};

/// Returns [`Outcome::NOT_ESTABLISHED`] if the packet is as it was, and has to take the long way.
#[inline(always)]
pub fn run<A: Forward>(skb: Skb, memory: Memory) -> Outcome {
    let Some(head) = &established::head::<A>(skb, Hook::INGRESS, skb.packet_mark()) else {
        return Outcome::NOT_ESTABLISHED;
    };
    if head.proto == Proto::TCP && head.flags & (tcp::SYN | tcp::FIN | tcp::RST) != 0 {
        return Outcome::NOT_ESTABLISHED;
    }
    let mut key = FlowKey::new(Hook::INGRESS, head.proto, head.src, head.dst);
    if let Some(entry) = maps::live_flow(&key) {
        return there(skb, head, &key, &entry, memory);
    }
    key.set_hook(Hook::EGRESS);
    match maps::live_flow(&key) {
        Some(entry) => back(skb, head, &key, &entry, memory),
        None => established::missed(skb, Hook::INGRESS, head, memory).map_or(Outcome::NOT_ESTABLISHED, Outcome::new),
    }
}

/// A packet to the backend.
#[inline(always)]
fn there<A: Forward>(skb: Skb, head: &Head<A>, key: &FlowKey<A>, entry: &Entry<A>, memory: Memory) -> Outcome {
    let (tx, rx) = (entry.read(|flow| flow.tx), entry.read(|flow| flow.rx));
    let is_fast = tx.has(Seen::DIRECT) && rx.has(Seen::DIRECT) && State::of(tx, rx) == State::Established;
    if !is_fast || entry.read(|flow| flow.kind) != Kind::DNAT || established::is_news_to_opener(entry, head) {
        return Outcome::NOT_ESTABLISHED;
    }
    let Some(exit) = judged_exit(skb, entry) else { return Outcome::NOT_ESTABLISHED };
    let (client, source, backend) =
        (entry.read(|flow| flow.client.addr), entry.read(|flow| flow.source), entry.read(|flow| flow.backend));
    let source_changes = entry.read(Flow::is_snat_on_devices);
    let Some((Scratch { packet, route, .. }, _)) = memory.scratch::<A>() else { return Outcome::NOT_ESTABLISHED };
    if !entry.is_at(key) {
        return Outcome::NOT_ESTABLISHED;
    }
    route.ask(source.port, backend.port, exit);
    if !find(skb, head.proto, route, &client, &backend.addr) {
        return Outcome::NOT_ESTABLISHED;
    }
    let source = if route.to_peer { source } else { SockAddr::new(client, source.port) };
    if let Err(reason) = translate(skb, head, &source, &backend, entry) {
        established::name(head, packet);
        return Outcome::new(Err(reason));
    }
    maps::count(Event::Forwarded);
    if !route.to_peer {
        skb.set_packet_mark(PacketMark::forward(source_changes, false));
    }
    Outcome::new(leave::<A>(skb, route))
}

/// A packet from the backend. The hook of another device gives it the frontend's address, unless it goes into a pod.
#[inline(always)]
fn back<A: Forward>(skb: Skb, head: &Head<A>, key: &FlowKey<A>, entry: &Entry<A>, memory: Memory) -> Outcome {
    let (tx, rx) = (entry.read(|flow| flow.tx), entry.read(|flow| flow.rx));
    let is_fast = tx.has(Seen::DIRECT) && rx.has(Seen::DIRECT) && rx.has(Seen::PACKET) && !rx.has(END);
    if !is_fast
        || entry.read(|flow| flow.kind) != Kind::UNDNAT
        || entry.read(|flow| flow.has(Flow::<A>::HOST) || flow.is_snat())
        || established::is_news_to_reply(entry, head, PacketMark::NONE)
        || established::advances(entry, head)
    {
        return Outcome::NOT_ESTABLISHED;
    }
    let Some(exit) = judged_exit(skb, entry) else { return Outcome::NOT_ESTABLISHED };
    let (frontend, client) = (entry.read(|flow| flow.frontend), entry.read(|flow| flow.client));
    let Some((Scratch { packet, route, .. }, _)) = memory.scratch::<A>() else { return Outcome::NOT_ESTABLISHED };
    if !entry.is_at(key) {
        return Outcome::NOT_ESTABLISHED;
    }
    route.ask(head.src.port, head.dst.port, exit);
    if !find(skb, head.proto, route, &head.src.addr, &client.addr) {
        return Outcome::NOT_ESTABLISHED;
    }
    if route.to_peer {
        if let Err(reason) = translate(skb, head, &frontend, &client, entry) {
            established::name(head, packet);
            return Outcome::new(Err(reason));
        }
        maps::count(Event::Returned);
    }
    Outcome::new(leave::<A>(skb, route))
}

/// Gives a packet other addresses and ports, and brings its flow up to date with it.
#[inline(always)]
fn translate<A: Forward>(
    skb: Skb,
    head: &Head<A>,
    src: &SockAddr<A>,
    dst: &SockAddr<A>,
    entry: &Entry<A>,
) -> Result<(), Reason> {
    A::rewrite(skb, head, src, dst)?;
    entry.count(skb.segments(), skb.len());
    established::note_acked(entry, head);
    Ok(())
}

/// Returns the device in front of the pod that the packet goes to, or 0 if that has to be asked. None if the long way has not
/// judged the sender at this device in this term, or the frame is for another host or has a tag.
#[inline(always)]
fn judged_exit<A: Forward>(skb: Skb, entry: &Entry<A>) -> Option<u32> {
    let now_secs = flow::about_now_secs();
    let is_recent = entry.read(|flow| flow.last_secs) == now_secs;
    let judged = entry.read(Flow::judged);
    let holds = judged.holds(skb.ifindex(), Term::new(now_secs, maps::epoch()));
    (is_recent && holds && skb.is_ours() && !skb.is_tagged()).then(|| judged.exit())
}
