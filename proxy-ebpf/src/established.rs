//! The fast path of established flows, and of packets without a flow: one look-up and one rewrite,
//! in one function, with as few copies as possible.
//!
//! The slow path would decide the same about these packets. It takes all other packets: packets
//! that open or reset a flow, fragments, IP options and SCTP, headers that cannot be read in place,
//! IPv6 replies to the host's own flows, and the first packet of a flow in each second.

use proxy_common::addr::Proto;
use proxy_common::counter::{Event, Reason};
use proxy_common::device::Node;
use proxy_common::flow::{
    Acked, EntryKind, Flow, FlowKey, Hook, Kind, Seen, Sender, is_settled, is_stream, step,
};

use crate::header::Head;
use crate::maps::{self, Entry, Marked, Memory, Scratch, about_now_secs};
use crate::net::Net;
use crate::outcome::{Action, Outcome};
use crate::packet::Packet;
use crate::setting::HANDS_OVER;
use crate::skb::{LinkHeader, PacketMark, Skb};
use crate::spoof::{self, At};
use crate::tcp;
use crate::{foreign_nat, host, lookup, state_change};

/// Translates a packet, or passes a packet without a flow. Returns [`Outcome::NOT_ESTABLISHED`] if
/// the slow path has to take the packet, which is unchanged then.
#[inline(always)]
pub fn run<A: Net>(skb: Skb, hook: Hook, memory: Memory) -> Outcome {
    let mark = skb.packet_mark();
    if hook == Hook::EGRESS && mark.is_done() && !skb.may_be_class() {
        skb.settle_packet_mark();
        return Outcome::new(Err(Reason::NotOurs));
    }
    let Some(head) = head::<A>(skb, hook, mark) else {
        return Outcome::NOT_ESTABLISHED;
    };
    if hook == Hook::EGRESS && mark.port_shows() {
        if !is_plain(skb, &head) {
            return Outcome::NOT_ESTABLISHED;
        }
        skb.settle_packet_mark();
        return Outcome::new(Err(Reason::NotOurs));
    }
    // TCP openers take the slow path, with a flow or without.
    if hook == Hook::INGRESS && head.proto == Proto::TCP && tcp::opens(head.flags) {
        return Outcome::NOT_ESTABLISHED;
    }
    // An earlier hook has rewritten all other packets, or may have: they may have flows.
    if !mark.is_translated() && !mark.is_lost() {
        let marked = if hook == Hook::EGRESS {
            // Of the untranslated packets that leave, only replies have entries. Their marked end
            // is the destination.
            Marked::of(head.dst(), head.src())
        } else {
            Marked::of(head.src(), head.dst())
        };
        if marked == Marked::NONE {
            return missed(skb, hook, &head, Others::NONE, memory);
        }
        if hook == Hook::INGRESS && marked.is_answer_to_client(head.dst.port.get()) {
            return missed(skb, hook, &head, Others::ANY, memory);
        }
    }
    let key = FlowKey::new(hook, head.proto, head.src, head.dst);
    let Some(entry) = maps::live_flow_here(&key) else {
        return missed(skb, hook, &head, Others::ANY, memory);
    };
    translate(skb, (hook, mark), &head, (&key, &entry), memory, || {
        is_spoofed(skb, hook, &head)
    })
}

/// Translates a packet with the entry found for it. Returns the same as [`run`]. `is_spoofed` is
/// called only for a packet that changes the flow's state.
#[inline(always)]
pub fn translate<A: Net>(
    skb: Skb,
    (hook, mark): (Hook, PacketMark),
    head: &Head<A>,
    (key, entry): (&FlowKey<A>, &Entry<A>),
    memory: Memory,
    is_spoofed: impl FnOnce() -> bool,
) -> Outcome {
    let Some(kind) = entry.read(|flow| flow.kind).known() else {
        return Outcome::NOT_ESTABLISHED;
    };
    let (src, dst) = match kind {
        EntryKind::Dnat if hook == Hook::INGRESS => (
            entry.read(Flow::client_between),
            entry.read(|flow| flow.backend),
        ),
        EntryKind::Unsnat => (head.src(), entry.read(Flow::client_between)),
        EntryKind::Snat if mark.source_changes() => (entry.read(|flow| flow.source), head.dst()),
        EntryKind::Undnat
            if hook == Hook::EGRESS && !mark.is_forward() || is_for_host(hook, entry) =>
        {
            (
                entry.read(|flow| flow.frontend),
                entry.read(|flow| flow.client),
            )
        }
        EntryKind::Dnat | EntryKind::Snat | EntryKind::Undnat => return Outcome::NOT_ESTABLISHED,
    };
    // The slow path takes other state changes, and packets that may belong to another flow.
    let is_change = match kind {
        EntryKind::Dnat => changes_opener(entry, head),
        EntryKind::Undnat => changes_reply(entry, head) || advances(entry, head),
        EntryKind::Snat | EntryKind::Unsnat => false,
    };
    let may_be_anothers = || kind == EntryKind::Undnat && may_be_anothers(entry, mark);
    // Delivery to the host's socket skips the kernel's source validation.
    let is_given_back = hook == Hook::INGRESS && kind == EntryKind::Undnat;
    if is_given_back && spoof::is_spoofed(skb, At::Here, &head.src().addr, &head.dst().addr) {
        return Outcome::NOT_ESTABLISHED;
    }
    let is_spoofed = || !is_given_back && is_spoofed();
    if is_change && (!state_change::may_be_taken(head) || is_spoofed()) || may_be_anothers() {
        return Outcome::NOT_ESTABLISHED;
    }
    let starts_on_lo = is_given_back && entry.read(Flow::starts_on_lo);
    let source_changes = hook == Hook::INGRESS && entry.read(Flow::is_snat_on_devices);
    // The compiler cannot move the reads above behind this call, so `is_at` covers them.
    let now_secs = about_now_secs();
    if !entry.is_at(key) {
        return Outcome::NOT_ESTABLISHED;
    }
    if matches!(kind, EntryKind::Dnat | EntryKind::Undnat) {
        if entry.read(|flow| flow.last_secs) != now_secs {
            return Outcome::NOT_ESTABLISHED;
        }
        if is_change && !take_change(entry, head, kind == EntryKind::Dnat) {
            return Outcome::NOT_ESTABLISHED;
        }
        entry.count(skb.segments(), skb.len());
        note_acked(entry, head);
        maps::count(if kind == EntryKind::Dnat {
            Event::Forwarded
        } else {
            Event::Returned
        });
    }
    if let Err(reason) = A::rewrite(skb, head, &src, &dst) {
        if let Some((Scratch { packet, .. }, _)) = memory.scratch::<A>() {
            name(head, packet);
        }
        return Outcome::new(Err(reason));
    }
    if is_given_back {
        return Outcome::new(host::inject::<A>(skb, LinkHeader::Ethernet, starts_on_lo));
    }
    note(skb, hook, kind, source_changes, head);
    Outcome::new(Ok(Action::PASS))
}

/// Returns true if the entry's replies go to a socket of the host, and this hook may deliver them
/// on the short path.
#[inline(always)]
fn is_for_host<A: Net>(hook: Hook, entry: &Entry<A>) -> bool {
    hook == Hook::INGRESS && A::SHORT_WAYS_JUDGE && entry.read(|flow| flow.has(Flow::<A>::HOST))
}

/// Returns the headers of a packet that a short path may take, if they are the usual headers. The
/// addresses may be non-unicast, unlike those of a packet with an entry.
#[inline(always)]
pub fn head<A: Net>(skb: Skb, hook: Hook, mark: PacketMark) -> Option<Head<A>> {
    // The slow path checks whether a mark is a class.
    if skb.is_in_vlan() || mark.is_done() || hook == Hook::INGRESS && mark.is_translated() {
        return None;
    }
    A::peek(skb)
}

/// Sets the mark for later hooks at ingress, and settles it at other hooks.
#[inline(always)]
fn note<A: Net>(skb: Skb, hook: Hook, kind: EntryKind, source_changes: bool, head: &Head<A>) {
    if hook != Hook::INGRESS {
        skb.settle_packet_mark();
    } else if kind == EntryKind::Dnat {
        let port_shows = foreign_nat::is_known_by(head.proto, head.signals());
        skb.set_packet_mark(PacketMark::forward(source_changes, port_shows));
    } else {
        skb.set_packet_mark(PacketMark::BACK);
    }
}

/// Returns true if a packet that an ingress hook has rewritten can leave without the slow path,
/// which records foreign NAT ports.
#[inline(always)]
fn is_plain<A: Net>(skb: Skb, head: &Head<A>) -> bool {
    head.is_between_hosts()
        && !foreign_nat::counts(&head.src, head.proto, head.signals())
        && !skb.may_be_class()
}

/// Stores the acknowledged number of a TCP packet. The original entry of a half-open flow holds the
/// proof there, which the client must not overwrite.
#[inline(always)]
pub fn note_acked<A: Net>(entry: &Entry<A>, head: &Head<A>) {
    let is_kept = entry.read(|flow| {
        flow.has(Flow::<A>::NUMBERED) && (flow.kind == Kind::UNDNAT || flow.tx.has(Seen::ASSURED))
    });
    if head.proto == Proto::TCP && head.flags & tcp::ACK != 0 && is_kept {
        entry.set_acked(Acked(u32::from_be(head.numbers.acked)));
    }
}

/// Returns true if a backend's packet is the first that acknowledges more. Its source is validated,
/// because the number counts.
#[inline(always)]
pub fn advances<A: Net>(entry: &Entry<A>, head: &Head<A>) -> bool {
    let is_more = |flow: &Flow<A>| {
        flow.generation != u32::from_be(head.numbers.acked) && !flow.rx.has(Seen::ADVANCED)
    };
    head.proto == Proto::TCP && entry.read(is_more)
}

/// Stores the tuple of a dropped packet for `kpx monitor`. The scratch still holds the slow path's
/// last packet.
#[inline(always)]
pub fn name<A: Net>(head: &Head<A>, packet: &mut Packet<A>) {
    packet.src = head.src();
    packet.dst = head.dst();
    packet.proto = head.proto;
    packet.decided = false;
}

/// The entries that a packet without an entry at its hook may have at other hooks.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Others(u32);

impl Others {
    pub const ANY: Self = Self(0);
    /// The packet is not a reply of a flow.
    pub const NO_ANSWER: Self = Self(1);
    /// Neither the packet's tuple nor that of its reply has an entry.
    pub const NONE: Self = Self(2);
}

/// Handles a packet without an entry. An incoming datagram may open a flow, unless it is a reply. A
/// TCP packet to a Service may have its flow on another node, to which it is handed over.
#[inline(always)]
pub fn missed<A: Net>(
    skb: Skb,
    hook: Hook,
    head: &Head<A>,
    others: Others,
    memory: Memory,
) -> Outcome {
    if !head.is_between_hosts() {
        return Outcome::NOT_ESTABLISHED;
    }
    if hook == Hook::EGRESS {
        if foreign_nat::counts(&head.src, head.proto, head.signals())
            && !skb.packet_mark().is_translated()
        {
            return Outcome::NOT_ESTABLISHED;
        }
        skb.clear_packet_mark();
        return Outcome::new(Err(Reason::NotOurs));
    }
    // The helper needs the address in memory.
    let addr = head.src.addr;
    if others == Others::ANY && maps::own_addr_here(&addr).is_some() {
        return Outcome::NOT_ESTABLISHED;
    }
    let is_tcp = head.proto == Proto::TCP;
    if HANDS_OVER.get() == 0 && is_tcp {
        return Outcome::new(Err(Reason::NoFlow));
    }
    if is_not_ours(head, others, memory) {
        Outcome::new(Err(if is_tcp {
            Reason::NoFlow
        } else {
            Reason::NotOurs
        }))
    } else {
        Outcome::NOT_ESTABLISHED
    }
}

/// Returns true if this datagram is a reply, or is neither for a service nor has the tuple of a
/// flow's packets to its backend. [`ingress::run`](crate::ingress::run) decides the same.
#[inline(always)]
fn is_not_ours<A: Net>(head: &Head<A>, others: Others, memory: Memory) -> bool {
    let (Some(node), Some(decision)) = (maps::node(), memory.decision().get()) else {
        return false;
    };
    let is_answered = || {
        others != Others::NONE
            && maps::is_flow(&FlowKey::new(Hook::EGRESS, head.proto, head.dst, head.src))
    };
    node.has(Node::HOST)
        || others == Others::ANY && is_answer(head)
        || lookup::frontend(&head.dst(), head.proto, decision) == Err(Reason::NotOurs)
            && !is_answered()
}

/// Returns true if a datagram has the tuple of a backend's replies: the datagram opens no flow, and
/// the hook where it leaves translates it.
#[inline(always)]
fn is_answer<A: Net>(head: &Head<A>) -> bool {
    maps::is_undnat(&FlowKey::new(Hook::EGRESS, head.proto, head.src, head.dst))
}

/// Returns true if a packet to the backend changes more of its flow than the counters, or if the
/// backend may be gone.
#[inline(always)]
pub fn changes_opener<A: Net>(entry: &Entry<A>, head: &Head<A>) -> bool {
    let tx = entry.read(|flow| flow.tx);
    let rx = entry.read(|flow| flow.rx);
    // The proof is checked where the change is applied.
    let is_step = || {
        step(
            Sender::Client {
                tx,
                rx,
                proves: true,
            },
            head.signals(),
        )
        .is_change
    };
    let may_have_moved =
        || head.proto != Proto::TCP && entry.read(|flow| flow.generation) != maps::generation();
    !(head.is_plain() && is_settled(tx, rx, true)) && is_step() || may_have_moved()
}

/// Returns true if a packet from the backend changes more of its flow than the counters.
#[inline(always)]
pub fn changes_reply<A: Net>(entry: &Entry<A>, head: &Head<A>) -> bool {
    let rx = entry.read(|flow| flow.rx);
    let is_step = || {
        let is_stream = is_stream(head.proto, entry.read(|flow| flow.passed.packets));
        step(Sender::Backend { rx, is_stream }, head.signals()).is_change
    };
    !(head.is_plain() && is_settled(rx, Seen::NOTHING, head.proto == Proto::UDP)) && is_step()
}

/// Returns true if a packet from the backend may belong to another flow.
#[inline(always)]
fn may_be_anothers<A: Net>(entry: &Entry<A>, mark: PacketMark) -> bool {
    mark.is_unmarked_ingress(false) && entry.read(Flow::is_snat_on_devices)
}

/// Returns true if a packet that changes the flow's state has a spoofed source. Like the slow path,
/// this does not validate a client's plain acknowledgement at ingress: its number proves more.
#[inline(always)]
pub fn is_spoofed<A: Net>(skb: Skb, hook: Hook, head: &Head<A>) -> bool {
    let (needs_validation, came_in_by) = match hook {
        // The slow path has to validate the source.
        Hook::INGRESS if !A::SHORT_WAYS_JUDGE => return !head.is_plain(),
        Hook::INGRESS => (!head.is_plain(), At::Here),
        _ => (skb.ingress_ifindex() != 0, At::Before),
    };
    let src = head.src();
    let dst = head.dst();
    needs_validation && spoof::is_spoofed(skb, came_in_by, &src.addr, &dst.addr)
}

/// Applies a packet's state change to its flow. Returns false if the slow path has to, with the
/// flow unchanged.
#[inline(always)]
pub fn take_change<A: Net>(entry: &Entry<A>, head: &Head<A>, is_original: bool) -> bool {
    let seq = u32::from_be(head.numbers.seq);
    let acked = u32::from_be(head.numbers.acked);
    state_change::take(entry, head.signals(), seq, acked, is_original)
}
