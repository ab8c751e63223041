//! Packets that may be dropped because conntrack believes any end of a flow that the agent has
//! answered.

use std::net::SocketAddr;

use testbed::reference::place::Family;

use super::flow::{Flow, Leg, Table};
use super::wire::{self, Ip, Part, TCP};
use super::{Model, Packet, Sent, is_spoofed};

impl Model {
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
            && is_spoofed(sent.at, packet.proto, src, dst)
    }

    /// Tells if a packet, whose headers cannot be followed, may be dropped because it could hide an
    /// end from the hook.
    pub(super) fn may_hide_end(&self, sent: &Sent, family: Family) -> bool {
        let Some((src, dst)) = wire::addrs(&sent.frame, family) else {
            return false;
        };
        let at = |addr| SocketAddr::new(addr, 0);
        family == Family::V6 && self.fast.is_on() && is_spoofed(sent.at, TCP, at(src), at(dst))
    }

    /// Tells if a fragment, of whose transport header a part is there, could be joined to such a
    /// packet.
    pub(super) fn is_blind_stub(&self, sent: &Sent, ip: &Ip) -> bool {
        let [src, dst] = [ip.src, ip.dst].map(|ip| SocketAddr::new(ip, 0));
        ip.proto == TCP && self.fast.is_on() && is_spoofed(sent.at, TCP, src, dst)
    }

    pub(super) fn is_answered(&self, flow: &Flow) -> bool {
        self.answered
            .contains(&(flow.proto, flow.client, flow.frontend))
    }
}
