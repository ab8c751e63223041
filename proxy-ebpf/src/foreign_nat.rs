//! Connections of other programs that leave with an address of the node's and a source port out of
//! kpx's ranges. Most are those of netfilter's masquerading, which knows nothing of the ports that
//! kpx has drawn.
//!
//! The host's servers have ports in the lower range, and must not pay for that: of TCP's packets
//! with such a port the programs look at those that begin or end a connection.
//!
//! Such a connection is remembered, so that kpx draws no such port towards that peer. If an expired
//! flow has the tuple already, it makes way. Beside a flow that lives, the connection gets another
//! source port here, and its replies the old one.
//!
//! So are datagrams that leave from a frontend's port of UDP, such as those of the host's NTP
//! client: what comes back is an answer ([`is_answer`]), as it is for conntrack, and no client of
//! that frontend.

use proxy_common::addr::{Port, Proto, SockAddr};
use proxy_common::counter::{Event, Reason};
use proxy_common::device::OwnAddr;
use proxy_common::flow::{
    CLIENT_PORT_FIRST, CLIENT_PORT_LAST, Flow, FlowKey, Hook, Kind, SOURCE_PORT_FIRST, Seen,
    Signals,
};
use proxy_common::foreign_nat::{self, ForeignNat};
use proxy_common::frontend::FrontendKey;

use crate::clock::now_secs;
use crate::flow::close;
use crate::maps::about_now_secs;
use crate::maps::{self, Memory, Scratch};
use crate::net::Net;
use crate::open;
use crate::opening::{Opening, Source, Way};
use crate::packet::Packet;
use crate::setting::timeouts;

/// Returns true if a packet with this source, which tells that much of its connection, is one of
/// theirs that counts.
#[inline(always)]
pub fn counts<A: Net>(src: &SockAddr<A>, proto: Proto, signals: Signals) -> bool {
    // A copy, for the kernel reads it in memory: the caller has the source in registers.
    let addr = src.addr;
    if proto == Proto::UDP {
        return maps::own_addr_here(&addr)
            .is_some_and(|own| may_be(src, proto, signals) || is_frontend(addr, src.port, own));
    }
    may_be(src, proto, signals) && maps::own_addr_here(&addr).is_some()
}

/// Returns true if datagrams to this port of the node's address open flows.
#[inline(never)]
fn is_frontend<A: Net>(addr: A, port: Port, own: OwnAddr) -> bool {
    maps::has_frontend(&FrontendKey::new(addr, port, Proto::UDP))
        || own.takes_node_ports()
            && maps::has_frontend(&FrontendKey::<A>::node_port(port, Proto::UDP))
}

/// Returns true if a datagram answers what has left from there.
#[inline(never)]
pub fn is_answer<A: Net>(packet: &Packet<A>) -> bool {
    packet.proto == Proto::UDP
        && maps::foreign_nat(&packet.flow_key(Hook::INGRESS)).is_there(about_now_secs())
}

/// Returns true if a packet with this source, which tells that much of its connection, may be one
/// of theirs that counts.
#[inline(always)]
fn may_be<A: Net>(src: &SockAddr<A>, proto: Proto, signals: Signals) -> bool {
    let port = src.port.get();
    port >= SOURCE_PORT_FIRST || is_low(port) && is_known_by(proto, signals)
}

/// Returns true if a packet is one that a connection with a port of the lower range is known by.
#[inline(always)]
pub fn is_known_by(proto: Proto, signals: Signals) -> bool {
    proto != Proto::TCP || signals != Signals::PACKET
}

/// Returns true for a port of the lower range.
#[inline(always)]
fn is_low(port: u16) -> bool {
    port.wrapping_sub(CLIENT_PORT_FIRST) <= CLIENT_PORT_LAST - CLIENT_PORT_FIRST
}

/// Takes in a packet that leaves and belongs to no flow. True if it shall leave by `scratch.flow`,
/// with another port.
#[inline(always)]
pub fn meet<A: Net>(mut memory: Memory) -> Result<bool, Reason> {
    if A::remember_foreign_nat(false, memory.lend()) && is_taken::<A>(memory.lend()) {
        open::flow::<A>(memory.lend())?;
        let (scratch, _) = memory.scratch::<A>().ok_or(Reason::NotOurs)?;
        // Its replies come in with another tuple now.
        forget(&scratch.packet);
        maps::count(Event::PortMoved);
        return Ok(true);
    }
    Ok(false)
}

/// Takes in a packet to a backend that leaves with an address of the node's, because netfilter has
/// masqueraded it. It keeps its port, because TCP's packets in the middle of a connection pass no
/// look-up. A flow that has the tuple makes way if it is half-open and silent.
#[inline(always)]
pub fn learn<A: Net>(mut memory: Memory) {
    if A::remember_foreign_nat(true, memory.lend())
        && is_taken::<A>(memory.lend())
        && let Some((scratch, _)) = memory.scratch::<A>()
    {
        open::end_if_silent(&scratch.other, scratch.packet.proto);
    }
}

/// Remembers a connection of another program's. Returns true if the packet opens it, as far as is
/// known.
#[inline(always)]
pub fn remember<A: Net>(is_seen_alone: bool, memory: Memory) -> bool {
    let Some((Scratch { packet, .. }, _)) = memory.scratch::<A>() else {
        return false;
    };
    if !counts(&packet.src, packet.proto, packet.signals()) {
        return false;
    }
    let key = FlowKey::new(Hook::INGRESS, packet.proto, packet.dst, packet.src);
    let now_secs = about_now_secs();
    let before = maps::foreign_nat(&key);
    let summary = summary(packet, is_seen_alone);
    let foreign_nat = ForeignNat::after(before, summary, packet.proto, now_secs);
    // A server's answer in the lower range is the end of no connection that counts.
    let is_new = before != ForeignNat::NONE || packet.opens() || !summary.is_seen_alone;
    if is_new && foreign_nat.differs_from(&before) {
        maps::set_foreign_nat(&key, &foreign_nat);
    }
    packet.opens() && (packet.proto != Proto::UDP || !before.is_there(now_secs))
}

#[inline(never)]
fn forget<A: Net>(packet: &Packet<A>) {
    maps::remove_foreign_nat(&FlowKey::new(
        Hook::INGRESS,
        packet.proto,
        packet.dst,
        packet.src,
    ));
}

#[inline(always)]
fn summary<A: Net>(packet: &Packet<A>, is_seen_alone: bool) -> foreign_nat::Packet {
    foreign_nat::Packet {
        opens: packet.opens() && packet.proto != Proto::UDP,
        ends: packet.seen().has(Seen::FIN),
        resets: packet.resets(),
        is_seen_alone: packet.proto == Proto::TCP
            && (is_seen_alone || is_low(packet.src.port.get())),
    }
}

/// Returns true if a flow that lives takes the replies to this packet. Then what was decided of the
/// packet is in `scratch.opening`.
#[inline(never)]
fn is_taken<A: Net>(memory: Memory) -> bool {
    let Some((scratch, _)) = memory.scratch::<A>() else {
        return false;
    };
    let Scratch {
        packet,
        other,
        opening,
        ..
    } = scratch;
    let replies = FlowKey::new(Hook::INGRESS, packet.proto, packet.dst, packet.src);
    if maps::flow(&replies, other).is_none() || !matches!(other.kind, Kind::UNSNAT | Kind::UNDNAT) {
        return false;
    }
    let opener = other.opener_key(packet.proto);
    if maps::flow(&opener, other).is_none() {
        // Without an opener there is no flow to close. The agent's sweep removes what else is left.
        maps::remove_flow(&replies);
        return false;
    }
    if other.is_expired(packet.proto, now_secs(), timeouts()) {
        close(&opener);
        return false;
    }
    let source = Source {
        addr: packet.src.addr,
        port_taken: true,
        generation: maps::generation(),
    };
    let service = FrontendKey::address(A::UNSPECIFIED);
    *opening = Opening {
        service,
        backend: packet.dst,
        source,
        flags: Flow::<A>::FOREIGN_NAT,
        device: 0,
        way: Way::STACK,
    };
    true
}
