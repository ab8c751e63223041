//! Open flows that skip the stack beside conntrack. Which may is judged here; which must, and when,
//! is left to the tables of packets.

use std::net::SocketAddr;

use testbed::reference::place::{self, Device, Family};

use super::flow::{Flow, Leg, Table};
use super::wire::{self, Ip, Part, TCP, UDP};
use super::{At, Model, Packet, Sent, is_forged};
use crate::fast::Fast;

impl Model {
    /// Tells if a packet of an open flow to the `next` end may skip the stack because the agent has
    /// answered.
    pub(super) fn is_tolerated(&self, sent: &Sent, flow: &Flow, next: SocketAddr) -> bool {
        let At::Ingress(device) = sent.at else {
            return false;
        };
        let Some(exit) = place::route(next.ip()) else {
            return false;
        };
        let is_bare = [device, exit]
            .into_iter()
            .all(|device| self.fast.is_bare(device));
        let is_of_pods = device.leads_to_pods() && exit.leads_to_pods() && !self.is_outside(flow);
        self.fast.has(Fast::OPENED)
            && self.fast.has(Fast::LEASE)
            && is_bare
            && (!exit.leads_to_pods() || self.fast.has_peer(exit))
            && [TCP, UDP].contains(&flow.proto)
            && !flow.changes_address()
            && (is_of_pods || self.is_tolerated_from_outside(flow, next))
            && self.is_answered(flow)
    }

    /// Tells if those of clients outside may.
    fn is_tolerated_from_outside(&self, flow: &Flow, next: SocketAddr) -> bool {
        let leads_to_pods =
            |at: SocketAddr| place::route(at.ip()).is_some_and(Device::leads_to_pods);
        self.fast.has(Fast::OPENED_OUTSIDE)
            && flow.is_from_outside()
            && leads_to_pods(flow.backend)
            && (next == flow.backend || next == flow.client)
            && flow.proto == UDP
            && !self.is_outside_between(flow.backend.ip(), flow.backend.ip())
    }

    /// Tells if a packet without a flow may be dropped because it could end a flow in conntrack's
    /// eyes.
    pub(super) fn may_be_blind(&self, sent: &Sent, packet: &Packet) -> bool {
        let (src, dst) = packet.peers();
        let is_end = packet.ip.part != Part::Whole
            || packet.says(|transport| {
                transport.opens || transport.ends || transport.resets || transport.answer.is_some()
            });
        let of = |src, dst| self.index.get(&(Table::Leaving, packet.proto, src, dst));
        let is_answered =
            |(id, leg): &(u64, Leg)| *leg == Leg::ToClient && self.is_answered(&self.flows[id]);
        let is_of_answered = [of(src, dst), of(dst, src)]
            .into_iter()
            .flatten()
            .any(is_answered);
        packet.proto == TCP
            && is_end
            && is_of_answered
            && is_forged(sent.at, packet.proto, src, dst)
    }

    /// Tells if a packet, whose headers cannot be followed, may be dropped because it could hide an
    /// end from the hook.
    pub(super) fn may_hide_end(&self, sent: &Sent, family: Family) -> bool {
        let Some((src, dst)) = wire::addrs(&sent.frame, family) else {
            return false;
        };
        let at = |addr| SocketAddr::new(addr, 0);
        family == Family::V6 && self.fast.is_on() && is_forged(sent.at, TCP, at(src), at(dst))
    }

    /// Tells if a fragment, of whose transport header a part is there, could be joined to such a
    /// packet.
    pub(super) fn is_blind_stub(&self, sent: &Sent, ip: &Ip) -> bool {
        let [src, dst] = [ip.src, ip.dst].map(|ip| SocketAddr::new(ip, 0));
        ip.proto == TCP && self.fast.is_on() && is_forged(sent.at, TCP, src, dst)
    }

    fn is_answered(&self, flow: &Flow) -> bool {
        self.answered
            .contains(&(flow.proto, flow.client, flow.frontend))
    }
}
