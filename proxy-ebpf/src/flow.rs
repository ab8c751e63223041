//! Find, follow, open and close flows.

use aya_ebpf::helpers::bpf_ktime_get_boot_ns;
use proxy_common::addr::{Port, Proto, SockAddr};
use proxy_common::counter::{Event, Reason};
use proxy_common::flow::{Flow, FlowKey, Hook, Kind, SOURCE_PORT_FIRST, Seen};

use crate::maps::{self, Entry, Refused};
use crate::net::Net;
use crate::packet::Packet;
use crate::{Answer, lookup};

/// Source ports tried before a flow is given up. At nine tenths full one in five flows would need more.
const PORT_TRIES: u32 = 16;

/// Finds the flow that `packet` belongs to at `hook`, and brings it up to date with the packet. One that is known to be
/// on its way `forward` to a backend is nobody's reply, even if it looks like one.
#[inline(always)]
pub fn follow<A: Net>(packet: &Packet<A>, hook: Hook, forward: bool, flow: &mut Flow<A>) -> bool {
    let Some(entry) = maps::flow(&packet.flow_key(hook), flow) else { return false };
    match flow.kind {
        Kind::DNAT => {
            let now_secs = now_secs();
            if packet.opens() && flow.yields_to_opener(packet.proto, now_secs) {
                close(flow, packet.proto);
                return false;
            }
            there(&entry, flow, packet, now_secs);
        }
        Kind::UNDNAT if forward => return false,
        Kind::UNDNAT => back(&entry, flow, packet),
        // Both directions pass one of the above as well.
        _ => {}
    }
    true
}

/// A packet towards the backend.
#[inline(always)]
fn there<A: Net>(entry: &Entry<A>, flow: &Flow<A>, packet: &Packet<A>, now_secs: u32) {
    let tx = see(flow.tx, packet);
    if tx != flow.tx {
        entry.set_tx(tx);
    }
    // A side that goes on talking has not accepted the other's RST, so that was not the end.
    if flow.rx.has(Seen::RST) && !packet.resets() {
        entry.set_rx(flow.rx.without(Seen::RST));
    }
    if flow.last_secs != now_secs {
        entry.set_last_secs(now_secs);
    }
    // If the backend does not accept this RST, its next packet shall tell the opener so at once.
    if packet.resets()
        && let Some(undnat) = maps::undnat(flow, packet.proto)
    {
        undnat.set_last_secs(0);
    }
}

/// A packet from the backend. The opener's entry is told once a second, when the state changes, and of
/// every RST: it may have heard from the client since the last one.
#[inline(always)]
fn back<A: Net>(entry: &Entry<A>, flow: &Flow<A>, packet: &Packet<A>) {
    let now_secs = now_secs();
    let rx = see(flow.rx, packet);
    if rx == flow.rx && flow.last_secs == now_secs && !packet.resets() {
        return;
    }
    entry.set_rx(rx);
    entry.set_last_secs(now_secs);
    let Some(opener) = maps::opener(flow, packet.proto) else { return };
    opener.set_rx(rx);
    opener.set_last_secs(now_secs);
    if opener.tx().has(Seen::RST) && !packet.resets() {
        opener.set_tx(opener.tx().without(Seen::RST));
    }
}

#[inline(always)]
fn see<A: Net>(before: Seen, packet: &Packet<A>) -> Seen {
    let before = if packet.resets() { before } else { before.without(Seen::RST) };
    before.with(packet.seen())
}

/// How a new flow changes its client's address.
#[derive(Clone, Copy)]
pub struct Source<A> {
    /// What the backend shall see; the client's own address to keep it.
    pub addr: A,
    /// The client's port must not be used, because another conversation with this backend has it.
    pub port_taken: bool,
}

/// Opens a flow: claims a source port by making the entries that must be unique, and the opener's entry last, so that
/// no packet of the flow can come back before its reply entries stand.
#[inline(always)]
pub fn open<A: Net>(
    packet: &Packet<A>,
    backend: SockAddr<A>,
    source: Source<A>,
    flags: u8,
    flow: &mut Flow<A>,
) -> Result<(), Reason> {
    let client = SockAddr::new(source.addr, packet.src.port);
    *flow = Flow::new(packet.src, packet.dst, backend, client, flags, now_secs());
    // A changed address brings the client's port among the node's own: there it must come from our range.
    let mut keep_port = !flow.is_snat() && !source.port_taken;
    let mut answer = TAKEN;
    for _ in 0..PORT_TRIES {
        if !keep_port {
            flow.source.port = Port::new(SOURCE_PORT_FIRST + lookup::below(SOURCE_PORTS) as u16);
        }
        keep_port = false;
        answer = claim(flow, packet.proto);
        if answer != TAKEN {
            break;
        }
    }
    if answer == TAKEN && evict(flow, packet.proto) {
        answer = claim(flow, packet.proto);
    }
    match answer {
        CLAIMED => {
            maps::count(Event::FlowOpened);
            Ok(())
        }
        // Another CPU has opened this very flow meanwhile, for a copy of the same packet: its choice counts.
        OPENED => {
            let opener = packet.flow_key(if flags == 0 { Hook::INGRESS } else { Hook::ANCHOR });
            maps::flow(&opener, flow).map(|_winner| ()).ok_or(Reason::NoSourcePort)
        }
        TAKEN => Err(Reason::NoSourcePort),
        _ => Err(Reason::FlowsFull),
    }
}

const SOURCE_PORTS: u32 = u16::MAX as u32 + 1 - SOURCE_PORT_FIRST as u32;

// What `claim` answers, in a register.
const CLAIMED: Answer = 0;
const TAKEN: Answer = 1;
const OPENED: Answer = 2;
const FULL: Answer = 3;

/// Makes room for `flow` where a flow that is over still has its tuple, before the agent has swept it. True if so.
///
/// Not at every try: where few ports are taken, it is better to leave those alone that a backend may still remember.
#[inline(always)]
fn evict<A: Net>(flow: &Flow<A>, proto: Proto) -> bool {
    let Some(old) = maps::scratch::<A>(1) else { return false };
    if maps::flow(&flow.undnat_key(proto), old).is_none() || old.kind != Kind::UNDNAT {
        return false;
    }
    let opener = old.opener_key(proto);
    if maps::flow(&opener, old).is_none() || !old.is_over(proto, now_secs()) {
        return false;
    }
    close(old, proto);
    true
}

/// Makes all entries of `flow`, or none.
#[inline(always)]
fn claim<A: Net>(flow: &mut Flow<A>, proto: Proto) -> Answer {
    let snat = flow.is_snat_on_devices();
    let mut answer = put(flow, Kind::UNDNAT, proto);
    if answer != CLAIMED {
        return answer;
    }
    if snat {
        answer = put(flow, Kind::UNSNAT, proto);
        if answer == CLAIMED {
            answer = put(flow, Kind::SNAT, proto);
            if answer != CLAIMED {
                remove(flow, Kind::UNSNAT, proto);
            }
        }
    }
    if answer == CLAIMED {
        answer = put(flow, Kind::DNAT, proto);
        if answer == CLAIMED {
            return CLAIMED;
        }
        if answer == TAKEN {
            answer = OPENED;
        }
        if snat {
            remove(flow, Kind::SNAT, proto);
            remove(flow, Kind::UNSNAT, proto);
        }
    }
    remove(flow, Kind::UNDNAT, proto);
    answer
}

#[inline(always)]
fn put<A: Net>(flow: &mut Flow<A>, kind: Kind, proto: Proto) -> Answer {
    flow.kind = kind;
    match maps::claim_flow(&flow.key_as(kind, proto), flow) {
        Ok(()) => CLAIMED,
        Err(Refused::Taken) => TAKEN,
        Err(Refused::Full) => FULL,
    }
}

#[inline(always)]
fn remove<A: Net>(flow: &Flow<A>, kind: Kind, proto: Proto) {
    maps::remove_flow(&flow.key_as(kind, proto));
}

/// Removes all entries of a flow, the opener's last.
#[inline(always)]
fn close<A: Net>(flow: &Flow<A>, proto: Proto) {
    remove(flow, Kind::UNDNAT, proto);
    if flow.is_snat_on_devices() {
        remove(flow, Kind::SNAT, proto);
        remove(flow, Kind::UNSNAT, proto);
    }
    remove(flow, Kind::DNAT, proto);
}

/// Is there a flow of ours whose packets to its backend look just like this one?
#[inline(always)]
pub fn shadows<A: Net>(packet: &Packet<A>, flow: &mut Flow<A>) -> bool {
    let back = FlowKey::new(Hook::EGRESS, packet.proto, packet.dst, packet.src);
    if maps::flow(&back, flow).is_none() || flow.kind != Kind::UNDNAT {
        return false;
    }
    // Unless this is itself a reply: two peers may dial each other's services from the ports that they serve.
    let itself = FlowKey::new(Hook::EGRESS, packet.proto, packet.src, packet.dst);
    maps::flow(&itself, flow).is_none() || flow.kind != Kind::UNDNAT
}

/// Seconds since boot, sleep included.
#[inline(always)]
fn now_secs() -> u32 {
    // SAFETY: the helper takes no arguments and cannot fail.
    (unsafe { bpf_ktime_get_boot_ns() } / 1_000_000_000) as u32
}
