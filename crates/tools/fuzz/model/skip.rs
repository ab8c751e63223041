//! Packets that skip the stack. Those of whole flows must, if nothing stands against it: see
//! `whole.rs`. Which others may is judged here; which must, and when one takes the stack all the
//! same, is left to the tables of packets (`tests/kernel`).

use std::net::IpAddr;

use proxy_common::counter::Event;
use testbed::reference::place::{self, Family};
use testbed::test_run::Verdict;

use super::flow::{Flow, Leg, Said, Table};
use super::wire::{Ip, Part, UDP};
use super::{DONE, FORWARD, Got, Model, Packet, Sent, TRANSLATED, noted, rewrite};
use crate::fast::Fast;

const ETH_LEN: usize = 14;

impl Model {
    /// Returns the outcome of a packet that came in and skipped the stack: all changes of the hooks
    /// on its way,
    /// and one hop less. None if it has not. `found` is the flow that the ingress hook knows it as
    /// one of.
    pub(super) fn skipped(
        &mut self,
        sent: &Sent,
        got: &Got,
        packet: &Packet,
        found: Option<(u64, Leg)>,
        now_secs: u32,
    ) -> Option<Got> {
        let (src, dst) = packet.peers();
        let (id, leg) = found.or_else(|| {
            self.index
                .get(&(Table::Leaving, packet.proto, src, dst))
                .copied()
        })?;
        let flow = &self.flows[&id];
        let next = if leg == Leg::ToBackend {
            flow.backend
        } else {
            flow.client
        };
        if flow.by_host || flow.is_guest || place::is_own(next.ip()) {
            return None;
        }
        let transport = packet.transport.as_ref();
        let is_of_another =
            || flow.is_answered_by_another(transport) || flow.is_outlived_by(transport, now_secs);
        if leg != Leg::ToBackend && is_of_another() {
            return None;
        }
        let must = self.goes_past_stack(sent, packet, flow, next);
        let is_free = self.fast.has(Fast::OTHERS) || self.is_tolerated(sent, flow, next);
        let may = is_free && may_skip(sent, packet) && is_open(flow, leg);
        let goes = must || may && got.verdict == Verdict::Redirect;
        if !goes {
            return None;
        }
        let is_to_client = matches!(leg, Leg::ToClient | Leg::FromNode);
        let skipped = self
            .way(sent, packet, flow, leg)
            .filter(|way| must || way.got.frame == got.frame)?;
        if is_to_client && skipped.to_peer {
            self.hear(sent, packet, id, Leg::ToClient, now_secs);
        }
        if must {
            self.note_way(packet, is_to_client);
        }
        Some(self.go(leg, skipped))
    }

    /// Returns the outcome of the packet that has just opened a flow past the stack.
    pub(super) fn opened_past_stack(
        &mut self,
        sent: &Sent,
        packet: &Packet,
        id: u64,
    ) -> Option<Got> {
        let skipped = self.way(sent, packet, &self.flows[&id], Leg::ToBackend)?;
        Some(self.go(Leg::ToBackend, skipped))
    }

    pub(super) fn go(&mut self, leg: Leg, Skipped { got, to_peer }: Skipped) -> Got {
        *self
            .counts
            .events
            .entry(if to_peer {
                Event::FastLocal
            } else {
                Event::FastRemote
            })
            .or_default() += 1;
        match leg {
            Leg::ToBackend => self.forward(got),
            _ if to_peer => self.give(got),
            _ => got,
        }
    }

    fn way(&self, sent: &Sent, packet: &Packet, flow: &Flow, leg: Leg) -> Option<Skipped> {
        let (src, dst) = packet.peers();
        let next = if leg == Leg::ToBackend {
            flow.backend
        } else {
            flow.client
        };
        let exit = place::route(next.ip())?;
        // The kernel asks for a link address that it does not know, before it sends the packet
        // through the device.
        let to_peer = self.fast.has_peer(exit) && is_neighbour(next.ip());
        let (src, dst, notes) = match leg {
            Leg::ToBackend if to_peer => (flow.source, flow.backend, 0),
            Leg::ToBackend if flow.changes_address() => {
                (flow.between(), flow.backend, TRANSLATED | FORWARD)
            }
            Leg::ToBackend => (flow.between(), flow.backend, DONE),
            Leg::FromNode | Leg::ToClient if to_peer => (flow.frontend, flow.client, 0),
            Leg::FromNode => (src, flow.between(), TRANSLATED),
            // Its egress hook does the rest.
            Leg::ToClient => (src, dst, 0),
            Leg::AsNode => return None,
        };
        let mut frame = sent.frame.clone();
        rewrite::peers(&mut frame, &packet.ip, packet.ports, src, dst).ok()?;
        let mark = if notes == 0 {
            sent.mark
        } else {
            noted(sent.mark, notes)
        };
        Some(Skipped::marked(mark, frame, packet.ip.family, to_peer))
    }
}

/// The outcome of a packet past the stack, and whether it goes to the other end of a pod's pair.
pub(super) struct Skipped {
    got: Got,
    to_peer: bool,
}

impl Skipped {
    /// Sends a translated frame on its way.
    pub(super) fn of(sent: &Sent, frame: Vec<u8>, family: Family, to_peer: bool) -> Self {
        Self::marked(
            if to_peer {
                sent.mark
            } else {
                noted(sent.mark, DONE)
            },
            frame,
            family,
            to_peer,
        )
    }

    fn marked(mark: u32, mut frame: Vec<u8>, family: Family, to_peer: bool) -> Self {
        spend_hop(&mut frame, family);
        if to_peer {
            frame[..12].copy_from_slice(&TO_POD);
        }
        Self {
            got: Got {
                verdict: Verdict::Redirect,
                mark,
                frame,
            },
            to_peer,
        }
    }
}

/// Destination and source of the last frame to a pod.
const TO_POD: [u8; 12] = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];

/// Gives a frame the link addresses of the way to a pod, if the program has done so.
pub(super) fn take_link_to_pod(got: &[u8], want: &mut [u8]) {
    if got.starts_with(&TO_POD) && want.len() >= TO_POD.len() {
        want[..TO_POD.len()].copy_from_slice(&TO_POD);
    }
}

/// The stack has to see the others: it answers them, puts them together, or follows connections by
/// them.
fn may_skip(sent: &Sent, packet: &Packet) -> bool {
    let Some(transport) = packet.transport.as_ref() else {
        return false;
    };
    let shakes_hands = packet.proto != UDP && (transport.opens || transport.answer.is_some());
    is_plain(sent, packet) && !shakes_hands && !transport.ends && !transport.resets
}

/// Returns true for a packet that a router passes on as it is: whole, with the usual IP header, to
/// the router, and with hops left.
pub(super) fn is_plain(sent: &Sent, packet: &Packet) -> bool {
    is_usual(sent, &packet.ip)
}

pub(super) fn is_usual(sent: &Sent, ip: &Ip) -> bool {
    let header_len = if ip.family == Family::V4 { 20 } else { 40 };
    let has_usual_header = ip.l4 == ETH_LEN + header_len && sent.frame[..6] == [2, 0, 0, 0, 0, 2];
    ip.part == Part::Whole && has_usual_header && sent.frame[hops_at(ip.family)] > 1
}

pub(super) fn has_no_hop_left(sent: &Sent, packet: &Packet) -> bool {
    sent.frame[hops_at(packet.ip.family)] <= 1
}

/// Returns true if neither side has said goodbye. Of a whole flow the stack need not hear of the
/// client's.
fn is_open(flow: &Flow, leg: Leg) -> bool {
    let goes_on = |said: &Said| said.anything && !said.goodbye && !said.reset;
    goes_on(&flow.backend_said)
        && (goes_on(&flow.client_said) || flow.is_whole && leg == Leg::ToClient)
}

/// Returns true if the node knows the address's link address.
pub(super) fn is_neighbour(addr: IpAddr) -> bool {
    place::neighbours(Family::of(addr)).any(|(neighbour, _)| neighbour == addr)
}

fn spend_hop(frame: &mut [u8], family: Family) {
    let at = hops_at(family);
    frame[at] -= 1;
    if family == Family::V4 {
        let word = u16::from_be_bytes([frame[at], frame[at + 1]]);
        rewrite::update(frame, ETH_LEN + 10, &[(word + 0x0100, word)], false);
    }
}

/// Returns the offset of the frame's byte that says how many hops are left.
fn hops_at(family: Family) -> usize {
    ETH_LEN + if family == Family::V4 { 8 } else { 7 }
}
