//! Foreign NAT ports: connections of other programs that leave with an address of the node and a
//! source port in kpx's ranges. Most come from netfilter's masquerading, which does not see the
//! ports that kpx has drawn.
//!
//! The host's servers have ports in the lower range. To keep them fast, the programs check only
//! those TCP packets with such a port that begin or end a connection.
//!
//! Such a connection is stored, so that kpx draws no such port towards that peer. If an expired
//! flow has the tuple already, kpx closes the flow. If a live flow has it, the connection gets
//! another source port, and its replies get the old port back.
//!
//! Datagrams that leave from a UDP frontend's port, such as those of the host's NTP client, are
//! stored as well. What comes back is a reply ([`is_answer`]), as for conntrack, and opens no flow
//! to the frontend. Where packets without a flow are handed over to other nodes, the same holds for
//! TCP.

use proxy_common::addr::{Port, Proto, SockAddr};
use proxy_common::counter::{Event, Reason};
use proxy_common::device::OwnAddr;
use proxy_common::flow::{
    CLIENT_PORT_FIRST, CLIENT_PORT_LAST, Flow, FlowKey, Hook, Kind, SOURCE_PORT_FIRST, Seen,
    Signals,
};
use proxy_common::foreign_nat::{self, ForeignNat};
use proxy_common::frontend::FrontendKey;
use proxy_macros::global_fn;

use crate::clock::now_secs;
use crate::flow::close;
use crate::maps::about_now_secs;
use crate::maps::{self, Memory, Scratch};
use crate::net::Net;
use crate::open;
use crate::opening::{Opening, Source, Way};
use crate::packet::Packet;
use crate::setting::{HANDS_OVER, timeouts};

/// Returns true if a packet with this source and these signals must be tracked as a foreign NAT
/// connection.
#[inline(always)]
pub fn counts<A: Net>(src: &SockAddr<A>, proto: Proto, signals: Signals) -> bool {
    // The helper needs the address in memory; the caller has the source in registers.
    let addr = src.addr;
    if may_meet_frontend(proto) && is_known_by(proto, signals) {
        return maps::own_addr_here(&addr).is_some_and(|own| {
            may_be(src, proto, signals) || is_frontend(addr, src.port, proto, own)
        });
    }
    may_be(src, proto, signals) && maps::own_addr_here(&addr).is_some()
}

/// Returns true if a reply to the host could be taken for a packet to a frontend.
#[inline(always)]
fn may_meet_frontend(proto: Proto) -> bool {
    proto == Proto::UDP || HANDS_OVER.get() != 0 && proto == Proto::TCP
}

/// Returns true if packets to this port of the node's address go to a Service.
#[inline(never)]
fn is_frontend<A: Net>(addr: A, port: Port, proto: Proto, own: OwnAddr) -> bool {
    maps::has_frontend(&FrontendKey::new(addr, port, proto))
        || own.takes_node_ports() && maps::has_frontend(&FrontendKey::<A>::node_port(port, proto))
}

/// Returns true if a packet is the reply to a tracked packet. A TCP connection's row records only
/// the packets that begin and end it, so each reply prolongs the row.
#[inline(never)]
pub fn is_answer<A: Net>(packet: &Packet<A>) -> bool {
    if !may_meet_frontend(packet.proto) {
        return false;
    }
    let key = packet.flow_key(Hook::INGRESS);
    let (row, now_secs) = (maps::foreign_nat(&key), about_now_secs());
    if !row.is_there(now_secs) {
        return false;
    }
    if HANDS_OVER.get() != 0 && packet.proto == Proto::TCP {
        let prolonged = row.after_reply(now_secs);
        if prolonged.differs_from(&row) {
            maps::set_foreign_nat(&key, &prolonged);
        }
    }
    true
}

/// Returns the same for a source address of the node, except for a frontend's port.
#[inline(always)]
fn may_be<A: Net>(src: &SockAddr<A>, proto: Proto, signals: Signals) -> bool {
    let port = src.port.get();
    port >= SOURCE_PORT_FIRST || is_low(port) && is_known_by(proto, signals)
}

/// Returns true if a packet with a port in the lower range is tracked: a TCP packet that begins or
/// ends a connection, or any packet of another protocol.
#[inline(always)]
pub fn is_known_by(proto: Proto, signals: Signals) -> bool {
    proto != Proto::TCP || signals != Signals::PACKET
}

/// Returns true for a port in the lower range.
#[inline(always)]
fn is_low(port: u16) -> bool {
    port.wrapping_sub(CLIENT_PORT_FIRST) <= CLIENT_PORT_LAST - CLIENT_PORT_FIRST
}

/// Tracks a packet that leaves without a flow. Returns true if the packet must leave by
/// `scratch.flow`, with another port.
#[inline(always)]
pub fn meet<A: Net>(mut memory: Memory) -> Result<bool, Reason> {
    if remember::<A>(false, memory.lend()) && is_taken::<A>(memory.lend()) {
        open::flow::<A>(memory.lend())?;
        let (scratch, _) = memory.scratch::<A>().ok_or(Reason::NotOurs)?;
        // The replies now come in with another tuple.
        forget(&scratch.packet);
        maps::count(Event::PortMoved);
        return Ok(true);
    }
    Ok(false)
}

/// Tracks a packet to a backend that leaves with an address of the node, because netfilter has
/// masqueraded it. The packet keeps its port, because TCP packets in the middle of a connection
/// skip the look-up. A flow with the tuple is closed if it is half-open and silent.
#[inline(always)]
pub fn track<A: Net>(mut memory: Memory) {
    if remember::<A>(true, memory.lend())
        && is_taken::<A>(memory.lend())
        && let Some((scratch, _)) = memory.scratch::<A>()
    {
        open::end_if_silent(&scratch.other, scratch.packet.proto);
    }
}

/// Stores a connection of another program. Returns true if the packet appears to open the
/// connection.
#[global_fn(kpx_foreign4, kpx_foreign6)]
fn remember<A: Net>(is_seen_alone: bool, memory: Memory) -> bool {
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
    // Without a stored connection, such a packet may be a server's answer, which is not tracked.
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
            && (is_seen_alone || packet.src.port.get() < SOURCE_PORT_FIRST),
    }
}

/// Returns true if a live flow receives the replies to this packet. Then `scratch.opening` holds
/// the opening of a flow with another port.
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
        // Without an original entry there is no flow to close. The agent's sweep removes the
        // remaining entries.
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
