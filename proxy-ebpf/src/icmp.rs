//! ICMP errors about packets of flows. An error quotes the packet as it was where the error arose.
//! The receiver knows the packet as it was on the receiver's side of the hook.
//!
//! The quoted packet went in the other direction, so its swapped tuple is the key of a flow's entry
//! at this hook. The hook applies the entry's rewrite to the error and, mirrored, to the quote. The
//! quoted transport checksum stays unchanged: receivers do not check it, and a quote rarely has all
//! bytes that it covers. Errors do not open, refresh or close flows. An error about a SYN that did
//! not reach its backend counts against the backend.

use proxy_common::addr::{Addr, Port, Proto, SockAddr};
use proxy_common::connect::{Outcome, Voter};
use proxy_common::counter::{Event, Reason};
use proxy_common::flow::{AtHook, Flow, FlowKey, Hook, Kind, Seen};

use crate::maps::{Memory, Scratch};
use crate::net::Net;
use crate::outcome::Action;
use crate::packet::Packet;
use crate::redirect::{self, Forward};
use crate::route::way;
use crate::setting::HANDS_OVER;
use crate::skb::{ETH_LEN, FragmentPart, LinkHeader, PacketMark, Skb};
use crate::spoof::{At, leads_back};
use crate::{fast_path, handover, host, maps};

/// The length of an ICMP header, and the least transport bytes in a quote (RFC 792).
const HEADER_LEN: u32 = 8;
const QUOTED_LEN: u32 = 8;
/// The offset of the checksum in an ICMP header.
const CHECK_OFFSET: u32 = 2;

/// The value of [`Error::is_unreachable`] for a "port unreachable".
const PORT_UNREACHABLE: u32 = 2;

/// An ICMP error, and the packet that it quotes. In map memory, as a
/// [`Packet`](crate::packet::Packet) is.
#[derive(Clone, Copy)]
pub struct Error<A: Addr> {
    /// Offset of the IP header.
    at: u32,
    src: A,
    dst: A,
    icmp: u32,
    end: u32,
    /// Not 0 if the destination is unreachable; [`PORT_UNREACHABLE`] if its host has no such
    /// socket.
    is_unreachable: u32,
    quote: Quote<A>,
    becomes: Translated<A>,
}

#[derive(Clone, Copy)]
pub struct Quote<A: Addr> {
    src: SockAddr<A>,
    dst: SockAddr<A>,
    proto: Proto,
    l4: u32,
}

/// The addresses of an error after translation.
#[derive(Clone, Copy)]
pub struct Translated<A: Addr> {
    src: A,
    dst: A,
    quoted_src: SockAddr<A>,
    quoted_dst: SockAddr<A>,
}

/// Translates an ICMP error at `hook`; `mark` as in [`flow::follow`](crate::flow::follow).
#[inline(always)]
pub fn run<A: Forward>(
    skb: Skb,
    link: LinkHeader,
    hook: Hook,
    mark: PacketMark,
    mut memory: Memory,
) -> Result<Action, Reason> {
    let (Scratch { error, .. }, _) = memory.lend().scratch::<A>().ok_or(Reason::Protocol)?;
    error.read(skb, link)?;
    if hook == Hook::INGRESS && skb.is_seen_before() {
        return Err(Reason::SeenBefore);
    }
    error.becomes.src = error.src;
    error.becomes.dst = error.dst;
    error.becomes.quoted_src = error.quote.src;
    error.becomes.quoted_dst = error.quote.dst;
    if hook == Hook::INGRESS
        && fast_path::opens_flows()
        && let Some(delivered) = redirect::error::<A>(skb, memory.lend())
    {
        return delivered;
    }
    let (Scratch { error, flow, .. }, _) = memory.lend().scratch::<A>().ok_or(Reason::Protocol)?;
    if maps::flow(&error.key(hook), flow).is_none() {
        if HANDS_OVER.get() != 0 && hook == Hook::INGRESS {
            return handover::send_error::<A>(skb, link, memory).result();
        }
        return Err(Reason::Protocol);
    }
    // Only at egress can an earlier hook have left a mark.
    let mark = skb.weigh(mark, false);
    match hook.known() {
        Some(AtHook::Ingress) => ingress(skb, error, flow),
        // Errors from this node about a foreign NAT connection with a new port are rare. They quote
        // a port that the peer does not know.
        Some(AtHook::Egress) if flow.kind == Kind::DNAT => Err(Reason::Protocol),
        Some(AtHook::Egress) if flow.kind == Kind::UNDNAT && mark.is_forward() => {
            Err(Reason::Protocol)
        }
        Some(AtHook::Egress) if flow.is_snat_on_devices() && mark.is_unmarked_ingress(false) => {
            Err(Reason::Protocol)
        }
        Some(AtHook::Egress) => egress(skb, link, error, flow),
        Some(AtHook::Anchor) | None => at_anchor(skb, error, flow),
    }
}

/// Rewrites destinations. A reply to the host changes its source as well, so it is injected into
/// the anchor. An error keeps its router as source, and comes in through the device that leads to
/// the router, so it needs no injection.
#[inline(always)]
fn ingress<A: Net>(skb: Skb, error: &mut Error<A>, flow: &Flow<A>) -> Result<Action, Reason> {
    // Before the kind decides anything here: see "Do not" in the README.
    note_unreachable(skb, error, flow, At::Here);
    let to_backend = flow.kind == Kind::DNAT;
    if to_backend {
        error.goes_there(flow);
    }
    let becomes = &mut error.becomes;
    if !to_backend {
        // The kernel accepts no packet from a device to a loopback address. It finds the socket by
        // the quote.
        if !flow.client.addr.is_loopback() {
            becomes.dst = flow.client.addr;
        }
        becomes.quoted_src = flow.client_between();
    }
    if flow.kind == Kind::UNDNAT {
        becomes.quoted_src = flow.client;
        becomes.quoted_dst = flow.frontend;
    }
    if flow.kind != Kind::UNSNAT {
        maps::count(if to_backend {
            Event::Forwarded
        } else {
            Event::Returned
        });
    }
    // The mark comes before the call. Behind it, old kernels would take the branch for dead code:
    // see "Do not" in the README.
    skb.set_packet_mark(if to_backend {
        PacketMark::FORWARD
    } else {
        PacketMark::BACK
    });
    error.rewrite(skb)?;
    Ok(Action::PASS)
}

/// Rewrites sources. In an error to the client, the frontend's address replaces the backend's, and
/// any router's if this node masquerades the client ([`Error::goes_back`]). An error to the backend
/// of a masqueraded client gets the node's address, because the backend's route to the error's
/// sender need not lead back through this node.
#[inline(always)]
fn egress<A: Net>(
    skb: Skb,
    link: LinkHeader,
    error: &mut Error<A>,
    flow: &Flow<A>,
) -> Result<Action, Reason> {
    if flow.kind == Kind::SNAT {
        error.becomes.src = flow.source.addr;
        error.becomes.quoted_dst = flow.source;
        error.rewrite(skb)?;
        return Ok(Action::PASS);
    }
    // Before the call: see "Do not" in the README.
    error.goes_back(flow);
    maps::count(Event::Returned);
    note_unreachable(skb, error, flow, At::Before);
    error.rewrite(skb)?;
    if flow.has(Flow::<A>::HOST) {
        // On lo: the host would not accept this packet without injection.
        return host::inject::<A>(skb, link, flow.starts_on_lo());
    }
    Ok(Action::PASS)
}

/// Counts an error in place of the backend's first packet: the SYN did not reach the backend, or
/// the backend refused the datagram. The error has to come in through the device to which the route
/// to the backend leads, or from the host itself. Any sender behind that device can send it, with
/// its own address.
#[inline(never)]
pub fn note_unreachable<A: Net>(skb: Skb, error: &Error<A>, flow: &Flow<A>, came_in: At) {
    let proto = error.quote.proto;
    let is_refused = proto == Proto::UDP && error.is_unreachable == PORT_UNREACHABLE;
    if !is_refused && (proto != Proto::TCP || error.is_unreachable == 0) {
        return;
    }
    if flow.kind != Kind::UNDNAT
        || flow.rx.has(Seen::PACKET)
        || !leads_back(skb, came_in, &error.dst, &flow.backend.addr)
    {
        return;
    }
    let outcome = if is_refused {
        Outcome::DATAGRAM_REFUSED
    } else {
        Outcome::unreachable(Voter::of(&flow.client.addr, flow.is_far()))
    };
    maps::note_outcome(flow, outcome);
}

/// Sends the host's error about a reply to the backend.
#[inline(always)]
fn at_anchor<A: Net>(skb: Skb, error: &mut Error<A>, flow: &Flow<A>) -> Result<Action, Reason> {
    error.becomes.src = error.src_or(flow.client.addr, flow.source.addr);
    error.becomes.dst = flow.backend.addr;
    error.becomes.quoted_src = flow.backend;
    error.becomes.quoted_dst = flow.source;
    error.rewrite(skb)?;
    skb.set_packet_mark(PacketMark::FORWARD);
    // For the reason that `ingress` names, the route is looked up behind the call.
    let node = maps::node().ok_or(Reason::RouteLost)?;
    let next_hop =
        way(skb, node, &error.becomes.src, &flow.backend.addr).map_err(|_| Reason::RouteLost)?;
    maps::count(Event::Forwarded);
    host::leave(skb, next_hop)
}

impl<A: Net> Error<A> {
    /// Reads an error and its quote.
    #[inline(always)]
    pub fn read(&mut self, skb: Skb, link: LinkHeader) -> Result<(), Reason> {
        self.parse(skb, link)?;
        self.quote.parse(skb, self.icmp + HEADER_LEN, self.end)?;
        // An error goes to the sender of the quoted packet.
        if self.quote.src.addr != self.dst {
            return Err(Reason::Protocol);
        }
        Ok(())
    }

    /// Sets the ends of the packet that the quoted packet answers.
    #[inline(always)]
    pub fn answers(&self, packet: &mut Packet<A>) {
        packet.src = self.quote.dst;
        packet.dst = self.quote.src;
        packet.proto = self.quote.proto;
    }

    #[inline(never)]
    fn parse(&mut self, skb: Skb, link: LinkHeader) -> Result<(), Reason> {
        let header = A::header(skb, link)?;
        self.at = header.at;
        if header.proto != A::ICMP || header.part != FragmentPart::WHOLE {
            return Err(Reason::Protocol);
        }
        let kind: u8 = skb.load(header.l4)?;
        if !A::is_icmp_error(kind) {
            return Err(Reason::Protocol);
        }
        // A message that ends here has no quote.
        let code: u8 = skb.load(header.l4 + 1).map_err(|_| Reason::Protocol)?;
        self.is_unreachable = if kind == A::ICMP_TYPE && code == A::ICMP_CODE {
            PORT_UNREACHABLE
        } else {
            A::is_unreachable(kind, code).into()
        };
        (self.src, self.dst, self.icmp, self.end) = (header.src, header.dst, header.l4, header.end);
        Ok(())
    }

    pub fn src(&self) -> &A {
        &self.src
    }

    pub fn dst(&self) -> &A {
        &self.dst
    }

    /// Returns the error's destination after the rewrite.
    pub fn goes_to(&self) -> &A {
        &self.becomes.dst
    }

    /// Returns true if the error has an Ethernet header and no IP options.
    pub fn has_usual_headers(&self) -> bool {
        self.at == ETH_LEN && self.icmp == ETH_LEN + A::IP_LEN
    }

    /// Returns the key at `hook` of the flow whose packet the error quotes.
    #[inline(always)]
    pub fn key(&self, hook: Hook) -> FlowKey<A> {
        FlowKey::new(hook, self.quote.proto, self.quote.dst, self.quote.src)
    }

    /// Sets the translation of an error to the backend.
    #[inline(always)]
    pub fn goes_there(&mut self, flow: &Flow<A>) {
        self.becomes.dst = flow.backend.addr;
        self.becomes.quoted_src = flow.backend;
        self.becomes.quoted_dst = flow.client_between();
    }

    /// Sets the translation of an error to the client.
    ///
    /// If this node masquerades the client, the frontend's address becomes the source: the router
    /// may be the client's own node, which drops IPv4 packets that come in with its own address.
    /// (Netfilter does so for every DNAT connection.)
    #[inline(always)]
    pub fn goes_back(&mut self, flow: &Flow<A>) {
        self.becomes.src = if flow.is_snat_on_devices() || self.src == flow.backend.addr {
            flow.frontend.addr
        } else {
            self.src
        };
        self.becomes.quoted_src = flow.client;
        self.becomes.quoted_dst = flow.frontend;
    }

    /// Returns the error's source, with `to` in place of `from`.
    #[inline(always)]
    fn src_or(&self, from: A, to: A) -> A {
        if self.src == from { to } else { self.src }
    }

    #[inline(never)]
    pub fn rewrite(&self, skb: Skb) -> Result<(), Reason> {
        let Self {
            quote, becomes: to, ..
        } = self;
        self.replace_quoted_addr(skb, A::SRC_OFFSET, quote.src.addr, to.quoted_src.addr)?;
        self.replace_quoted_addr(skb, A::DST_OFFSET, quote.dst.addr, to.quoted_dst.addr)?;
        self.replace_quoted_port(skb, 0, quote.src.port, to.quoted_src.port)?;
        self.replace_quoted_port(skb, 2, quote.dst.port, to.quoted_dst.port)?;
        self.replace_addr(skb, A::SRC_OFFSET, self.src, to.src)?;
        self.replace_addr(skb, A::DST_OFFSET, self.dst, to.dst)
    }

    #[inline(always)]
    fn replace_quoted_addr(&self, skb: Skb, place: u32, from: A, to: A) -> Result<(), Reason> {
        if from == to {
            return Ok(());
        }
        A::store_quoted_addr(
            skb,
            self.icmp + HEADER_LEN,
            place,
            self.icmp + CHECK_OFFSET,
            from,
            to,
        )
    }

    #[inline(always)]
    fn replace_quoted_port(
        &self,
        skb: Skb,
        offset: u32,
        from: Port,
        to: Port,
    ) -> Result<(), Reason> {
        if from == to {
            return Ok(());
        }
        let size = size_of::<Port>() as u32;
        skb.replace_l4_checksum(
            self.icmp + CHECK_OFFSET,
            from.wire().into(),
            to.wire().into(),
            size,
        )?;
        skb.store(self.quote.l4 + offset, &to.wire(), 0)
    }

    #[inline(always)]
    fn replace_addr(&self, skb: Skb, offset: u32, from: A, to: A) -> Result<(), Reason> {
        if from == to {
            return Ok(());
        }
        if A::ICMP_HAS_PSEUDO {
            A::replace_pseudo_checksum(skb, self.icmp + CHECK_OFFSET, 0, from, to)?;
        }
        A::store_addr(skb, self.at, offset, from, to)
    }
}

impl<A: Net> Quote<A> {
    /// Reads the quote at `at` of an error that ends at `end`. Only a first fragment has ports.
    #[inline(never)]
    fn parse(&mut self, skb: Skb, at: u32, end: u32) -> Result<(), Reason> {
        // An unreadable quote belongs to no flow.
        let header = A::read(skb, at).map_err(|_| Reason::Protocol)?;
        let is_ours = matches!(header.proto, Proto::TCP | Proto::UDP | Proto::SCTP);
        if !is_ours || header.part == FragmentPart::LATER || header.l4 + QUOTED_LEN > end {
            return Err(Reason::Protocol);
        }
        let ports: [u16; 2] = skb.load(header.l4).map_err(|_| Reason::Protocol)?;
        self.src = SockAddr::new(header.src, Port::from_wire(ports[0]));
        self.dst = SockAddr::new(header.dst, Port::from_wire(ports[1]));
        (self.proto, self.l4) = (header.proto, header.l4);
        Ok(())
    }
}
