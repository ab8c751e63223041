//! Whole flows: connections of this node's pods to pods that go past the stack from their opener
//! on. Which those are, and which of their packets go there, is all known beforehand.

use std::net::{IpAddr, SocketAddr};

use testbed::reference::place::{self, Device, Family};

use super::flow::Flow;
use super::skip::{has_no_hop_left, is_neighbour, is_plain};
use super::wire::{Part, SCTP, TCP};
use super::{At, Model, Packet, Sent, is_forged};
use crate::fast::{Fast, UNCHANGED};

impl Model {
    /// Tells if the flow that a packet has just opened to a backend goes past the stack.
    pub(super) fn opens_past_stack(&mut self, sent: &Sent, packet: &Packet, flow: &Flow) -> bool {
        let At::Ingress(device) = sent.at else {
            return false;
        };
        let Some(exit) = place::route(flow.backend.ip()).filter(|exit| *exit != Device::Lo) else {
            return false;
        };
        if !device.leads_to_pods()
            || place::is_own(flow.backend.ip())
            || !self.fast.has(Fast::OPENS)
        {
            return false;
        }
        let obstacle = self.obstacle(sent, packet, flow, [device, exit]);
        let opened = if exit.leads_to_pods() {
            "whole_opened"
        } else {
            "whole_opened_far"
        };
        *self.ways.entry(obstacle.unwrap_or(opened)).or_default() += 1;
        obstacle.is_none()
    }

    /// Returns what stands against it.
    fn obstacle(
        &self,
        sent: &Sent,
        packet: &Packet,
        flow: &Flow,
        [device, exit]: [Device; 2],
    ) -> Option<&'static str> {
        let obstacles = [
            (!self.fast.opens(), "not_whole_lease_over"),
            (packet.ip.part != Part::Whole, "not_whole_fragment"),
            (has_no_hop_left(sent, packet), "not_whole_no_hop_left"),
            (!is_plain(sent, packet), "not_whole_odd_header"),
            (packet.proto == SCTP, "not_whole_sctp"),
            (flow.changes_address(), "not_whole_masqueraded"),
            (self.port_taken, "not_whole_port_taken"),
            (
                !exit.leads_to_pods() && !self.fast.has(Fast::OPENS_FAR),
                "not_whole_far",
            ),
            (
                !self.fast.is_bare(device) || !self.fast.is_bare(exit),
                "not_whole_not_bare",
            ),
            (
                exit.leads_to_pods() && !self.fast.has_peer(exit)
                    || !is_neighbour(flow.backend.ip()),
                "not_whole_no_peer",
            ),
            (self.is_outside(flow), "not_whole_outside_networks"),
        ];
        obstacles
            .into_iter()
            .find(|(stands, _)| *stands)
            .map(|(_, what)| what)
    }

    /// Tells if a packet of a flow to the `next` end goes past the stack because the whole flow
    /// does. The stack sees handshakes and datagrams of flows that could not be opened so now.
    pub(super) fn goes_past_stack(
        &self,
        sent: &Sent,
        packet: &Packet,
        flow: &Flow,
        next: SocketAddr,
    ) -> bool {
        let At::Ingress(device) = sent.at else {
            return false;
        };
        let shakes_hands = packet.says(|transport| transport.opens || transport.answer.is_some());
        let goes_on = packet.proto == TCP && !shakes_hands;
        let (src, dst) = packet.peers();
        flow.is_whole
            && self.fast.is_on()
            && self.fast.is_bare(device)
            && (goes_on || self.could_open(flow, next))
            && is_plain(sent, packet)
            && !is_forged(sent.at, packet.proto, src, dst)
    }

    fn could_open(&self, flow: &Flow, next: SocketAddr) -> bool {
        let Some(exit) = place::route(next.ip()) else {
            return false;
        };
        let is_way = match exit.leads_to_pods() {
            true => self.fast.has_peer(exit) && is_neighbour(next.ip()),
            false => self.fast.has(Fast::OPENS_FAR),
        };
        self.fast.opens() && self.fast.is_bare(exit) && is_way && !self.is_outside(flow)
    }

    /// Tells if only connections between some networks go past the stack, and this is none.
    pub(super) fn is_outside(&self, flow: &Flow) -> bool {
        self.is_outside_between(flow.client.ip(), flow.backend.ip())
    }

    pub(super) fn is_outside_between(&self, src: IpAddr, dst: IpAddr) -> bool {
        let is_in = |addr| {
            UNCHANGED
                .iter()
                .any(|net| net.cidr(Family::of(addr)).contains(&addr))
        };
        self.fast.has(Fast::OPENS_PODS) && !(is_in(src) && is_in(dst))
    }

    /// Counts a packet of a whole flow that has gone past the stack.
    pub(super) fn note_way(&mut self, packet: &Packet, is_to_client: bool) {
        let mut count = |what| *self.ways.entry(what).or_default() += 1;
        count(if is_to_client {
            "whole_back"
        } else {
            "whole_there"
        });
        if packet.says(|transport| transport.ends || transport.resets) {
            count("whole_end");
        }
        if !self.fast.opens() {
            count("whole_kept");
        }
    }
}
