//! The fast path of established flows, and of packets of no flow. One look-up and one rewrite, in
//! one function, and nothing copied that is not needed.
//!
//! The slow path would decide the same of these packets. It takes all others: packets that open or
//! reset a flow, fragments, options and SCTP. It takes headers that cannot be read at once, IPv6
//! replies to the host's own flows, and the first packet of a flow in every second.

use aya_ebpf::bindings::{BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR};
use proxy_common::addr::{Addr, Port, Proto, SockAddr};
use proxy_common::counter::{Event, Reason};
use proxy_common::device::Node;
use proxy_common::flow::{
    Acked, EntryKind, Flow, FlowKey, Hook, Kind, Seen, Sender, Signals, is_settled, is_stream, step,
};

use crate::maps::about_now_secs;
use crate::maps::{self, Entry, Marked, Memory, Scratch};
use crate::net::{self, At, Net};
use crate::outcome::Outcome;
use crate::packet::{self, Packet};
use crate::skb::{ETH_LEN, LinkHeader, PacketMark, Skb};
use crate::tcp::{self, Numbers, TcpHeader, TcpStart};
use crate::{Action, foreign_nat, host, lookup, state_change};

/// A packet's headers, if they are the usual ones: TCP or UDP right behind an IP header without
/// options.
#[derive(Clone, Copy)]
pub struct Head<A: Addr> {
    pub src: SockAddr<A>,
    pub dst: SockAddr<A>,
    pub proto: Proto,
    /// The flags of TCP, or 0.
    pub flags: u8,
    pub numbers: Numbers,
    /// The word of an IPv4 header that ends with the checksum.
    pub check: u32,
    /// Bytes of transport header and payload.
    pub len: u32,
}

impl<A: Net> Head<A> {
    /// Returns what the packet tells its flow.
    #[inline(always)]
    fn signals(&self) -> Signals {
        // A datagram has no flags.
        tcp::signals(self.flags)
    }

    // Copies, field by field: what is copied as a whole, or lent to the kernel, lies in memory, and
    // with it all other fields.

    #[inline(always)]
    pub fn src(&self) -> SockAddr<A> {
        SockAddr::new(self.src.addr, self.src.port)
    }

    #[inline(always)]
    pub fn dst(&self) -> SockAddr<A> {
        SockAddr::new(self.dst.addr, self.dst.port)
    }

    /// Returns true if the packet tells its flow nothing but that it goes on.
    #[inline(always)]
    fn is_plain(&self) -> bool {
        self.flags & (tcp::SYN | tcp::FIN | tcp::RST) == 0
    }

    /// Returns true if both addresses are hosts'. Only such packets have entries.
    #[inline(always)]
    fn is_between_hosts(&self) -> bool {
        self.src.addr.is_unicast() && self.dst.addr.is_unicast()
    }
}

/// Returns [`Outcome::NOT_ESTABLISHED`] if the packet is as it was, and has to take the slow path.
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
    // An opener takes the slow path whether it has a flow or not.
    if hook == Hook::INGRESS && head.proto == Proto::TCP && tcp::opens(head.flags) {
        return Outcome::NOT_ESTABLISHED;
    }
    // A hook has rewritten others: they have flows.
    if !mark.is_translated() && !mark.is_lost() {
        let marked = if hook == Hook::EGRESS {
            // A packet that leaves has the destination of an answer, or none of a flow's ends.
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

/// Translates a packet whose entry has been found. The result is as that of [`run`]. `is_spoofed` is
/// asked of a packet with news.
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
    // The slow path takes a packet with other news than these, and perhaps one of another flow.
    let is_change = match kind {
        EntryKind::Dnat => changes_opener(entry, head),
        EntryKind::Undnat => changes_reply(entry, head) || advances(entry, head),
        EntryKind::Snat | EntryKind::Unsnat => false,
    };
    let may_be_anothers = || kind == EntryKind::Undnat && may_be_anothers(entry, mark);
    // It goes to a socket of the host's, past the kernel's check of sources.
    let is_given_back = hook == Hook::INGRESS && kind == EntryKind::Undnat;
    if is_given_back && net::is_spoofed(skb, At::Here, &head.src().addr, &head.dst().addr) {
        return Outcome::NOT_ESTABLISHED;
    }
    let is_spoofed = || !is_given_back && is_spoofed();
    if is_change && (!state_change::may_be_taken(head) || is_spoofed()) || may_be_anothers() {
        return Outcome::NOT_ESTABLISHED;
    }
    let starts_on_lo = is_given_back && entry.read(Flow::starts_on_lo);
    let source_changes = hook == Hook::INGRESS && entry.read(Flow::is_snat_on_devices);
    // A call of the kernel's: what the compiler has read before, it does not read again behind it.
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

/// Returns true if an entry gives replies to a socket of the host, and this hook may do that on a
/// short way.
#[inline(always)]
fn is_for_host<A: Net>(hook: Hook, entry: &Entry<A>) -> bool {
    hook == Hook::INGRESS && A::SHORT_WAYS_JUDGE && entry.read(|flow| flow.has(Flow::<A>::HOST))
}

/// Returns the headers of a packet that a short way may take, if they are the usual ones. Their
/// addresses may be no hosts', which a packet with an entry does not have.
#[inline(always)]
pub fn head<A: Net>(skb: Skb, hook: Hook, mark: PacketMark) -> Option<Head<A>> {
    // The slow path weighs a mark that may be a class.
    if skb.is_in_vlan() || mark.is_done() || hook == Hook::INGRESS && mark.is_translated() {
        return None;
    }
    A::peek(skb)
}

/// Leaves the mark for the next hook, or takes it away.
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

/// Returns true if the port of a packet, which an ingress hook has rewritten, is none that counts.
/// The slow path learns the others.
#[inline(always)]
fn is_plain<A: Net>(skb: Skb, head: &Head<A>) -> bool {
    head.is_between_hosts()
        && !foreign_nat::counts(&head.src, head.proto, head.signals())
        && !skb.may_be_class()
}

/// Keeps what a TCP packet of an established flow acknowledges. Of a half-open one there is the
/// proof, which the client must not write itself.
#[inline(always)]
pub fn note_acked<A: Net>(entry: &Entry<A>, head: &Head<A>) {
    let is_kept = entry.read(|flow| {
        flow.has(Flow::<A>::NUMBERED) && (flow.kind == Kind::UNDNAT || flow.tx.has(Seen::ASSURED))
    });
    if head.proto == Proto::TCP && head.flags & tcp::ACK != 0 && is_kept {
        entry.set_acked(Acked(u32::from_be(head.numbers.acked)));
    }
}

/// Returns true if a packet of the backend is the first to acknowledge more: its source is judged,
/// for the number counts.
#[inline(always)]
pub fn advances<A: Net>(entry: &Entry<A>, head: &Head<A>) -> bool {
    let is_more = |flow: &Flow<A>| {
        flow.generation != u32::from_be(head.numbers.acked) && !flow.rx.has(Seen::ADVANCED)
    };
    head.proto == Proto::TCP && entry.read(is_more)
}

/// Names the packet, which is dropped, to `kpx monitor`. The scratch still holds the last packet of
/// the slow path.
#[inline(always)]
pub fn name<A: Net>(head: &Head<A>, packet: &mut Packet<A>) {
    packet.src = head.src();
    packet.dst = head.dst();
    packet.proto = head.proto;
    packet.decided = false;
}

/// The entries that a packet without an entry at its hook may have elsewhere.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Others(u32);

impl Others {
    pub const ANY: Self = Self(0);
    /// It answers no flow.
    pub const NO_ANSWER: Self = Self(1);
    /// None has its tuple, nor that of its answer.
    pub const NONE: Self = Self(2);
}

/// There is no flow. A datagram that arrives may open one, unless it answers one.
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
    // A copy, for the kernel reads it in memory.
    let addr = head.src.addr;
    if others == Others::ANY && maps::own_addr_here(&addr).is_some() {
        return Outcome::NOT_ESTABLISHED;
    }
    if head.proto == Proto::TCP {
        return Outcome::new(Err(Reason::NoFlow));
    }
    if is_not_ours(head, others, memory) {
        Outcome::new(Err(Reason::NotOurs))
    } else {
        Outcome::NOT_ESTABLISHED
    }
}

/// Returns true if this datagram is neither for a service, nor has the tuple of a flow, as one of
/// its backend's own may. [`ingress::run`](crate::ingress::run) finds the same.
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

/// Returns true if a datagram has the tuple of a backend's answers: it has opened nothing, and the
/// hook where it leaves translates it.
#[inline(always)]
fn is_answer<A: Net>(head: &Head<A>) -> bool {
    maps::is_undnat(&FlowKey::new(Hook::EGRESS, head.proto, head.src, head.dst))
}

/// Returns true if a packet towards the backend changes more of its flow than counts, or if the
/// backend may have left.
#[inline(always)]
pub fn changes_opener<A: Net>(entry: &Entry<A>, head: &Head<A>) -> bool {
    let tx = entry.read(|flow| flow.tx);
    let rx = entry.read(|flow| flow.rx);
    // The slow path looks for the proof.
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

/// Returns true if a packet from the backend changes more of its flow than counts.
#[inline(always)]
pub fn changes_reply<A: Net>(entry: &Entry<A>, head: &Head<A>) -> bool {
    let rx = entry.read(|flow| flow.rx);
    let is_step = || {
        let is_stream = is_stream(head.proto, entry.read(|flow| flow.passed.packets));
        step(Sender::Backend { rx, is_stream }, head.signals()).is_change
    };
    !(head.is_plain() && is_settled(rx, Seen::NOTHING, head.proto == Proto::UDP)) && is_step()
}

/// Returns true if a packet from the backend perhaps is none of the flow's.
#[inline(always)]
fn may_be_anothers<A: Net>(entry: &Entry<A>, mark: PacketMark) -> bool {
    mark.is_unmarked_ingress(false) && entry.read(Flow::is_snat_on_devices)
}

/// Returns true if a packet with news has a false sender. As the slow path does, it does not ask of
/// a client's acknowledgement, whose number shows more.
#[inline(always)]
pub fn is_spoofed<A: Net>(skb: Skb, hook: Hook, head: &Head<A>) -> bool {
    let (needs_validation, came_in_by) = match hook {
        // The slow path has to find out.
        Hook::INGRESS if !A::SHORT_WAYS_JUDGE => return !head.is_plain(),
        Hook::INGRESS => (!head.is_plain(), At::Here),
        _ => (skb.ingress_ifindex() != 0, At::Before),
    };
    let src = head.src();
    let dst = head.dst();
    needs_validation && net::is_spoofed(skb, came_in_by, &src.addr, &dst.addr)
}

/// Brings a flow up to date with a packet's news. Returns false if that is for the slow path: the
/// flow is as it was then.
#[inline(always)]
pub fn take_change<A: Net>(entry: &Entry<A>, head: &Head<A>, is_original: bool) -> bool {
    let seq = u32::from_be(head.numbers.seq);
    let acked = u32::from_be(head.numbers.acked);
    state_change::take(entry, head.signals(), seq, acked, is_original)
}

/// Reads a transport header of ours that starts at `at`, and has `len` bytes with its payload:
/// TCP's flags and numbers. None if the header is another's, or not all there.
#[inline(always)]
pub fn flags_and_numbers(skb: Skb, proto: Proto, at: u32, len: u32) -> Option<(u8, Numbers)> {
    match proto {
        Proto::TCP if len >= tcp::TCP_LEN => {
            let TcpStart { flags, numbers, .. } = skb.peek::<TcpHeader>(at)?.start;
            Some((flags, numbers))
        }
        Proto::UDP if len >= packet::UDP_LEN => Some((0, Numbers::NONE)),
        _ => None,
    }
}

/// Brings the transport's checksum up to date with other ports, and addresses that make this
/// difference to a sum.
///
/// In two steps: only addresses are part of the seed that the hardware starts a checksum from. If
/// the first step shows that there is such a seed, the second would do nothing.
#[inline(always)]
pub fn replace_checksum<A: Net>(
    skb: Skb,
    head: &Head<A>,
    ports: u32,
    diff: u32,
) -> Result<(), Reason> {
    let at = ETH_LEN + A::IP_LEN + packet::checksum_offset(head.proto);
    let flags = if head.proto == Proto::UDP {
        BPF_F_MARK_MANGLED_0
    } else {
        0
    };
    let ports_before = word(head.src.port, head.dst.port);
    let mut is_seed = false;
    if diff != net::NO_DIFF {
        let sum = || skb.peek::<u16>(at).map_or(net::UNREAD, u32::from);
        let before = sum();
        skb.replace_l4_checksum(at, 0, diff, flags | BPF_F_PSEUDO_HDR)?;
        is_seed = net::is_seed(before, sum(), diff);
    }
    if is_seed || ports_before == ports {
        return Ok(());
    }
    skb.replace_l4_checksum(at, ports_before, ports, flags | size_of::<u32>() as u32)
}

/// Two ports as they lie in a packet.
#[inline(always)]
pub fn word(sport: Port, dport: Port) -> u32 {
    let (first, second) = if cfg!(target_endian = "little") {
        (sport, dport)
    } else {
        (dport, sport)
    };
    u32::from(first.wire()) | u32::from(second.wire()) << 16
}
