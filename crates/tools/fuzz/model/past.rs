//! Packets that skip the node's stack. If the agent has allowed it, the programs choose, and the
//! model reads the choice from their packet: bytes and counts must be right either way. The packet
//! rows (`tests/kernel`) check which packets must skip the stack.

use std::net::{IpAddr, SocketAddr};

use proxy_common::counter::Event;
use testbed::reference::place::{self, Device, Family};
use testbed::test_run::Verdict;

use super::flow::{Flow, Leg, Said, Table};
use super::wire::{Ip, Part, TCP, UDP};
use super::{At, DONE, FORWARD, Got, Model, Packet, Sent, TRANSLATED, is_spoofed, noted, rewrite};
use crate::fast::{Fast, UNCHANGED};

const ETH_LEN: usize = 14;

impl Model {
    /// Returns the outcome of an incoming packet that skipped the stack: the changes of all hooks,
    /// and one hop less. `None` if it did not, or was not allowed to. `found` is its flow at the
    /// ingress hook.
    pub(super) fn skipped(
        &mut self,
        sent: &Sent,
        got: &Got,
        packet: &Packet,
        found: Option<(u64, Leg)>,
        now_secs: u32,
    ) -> Option<Got> {
        if got.verdict != Verdict::Redirect {
            return None;
        }
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
        if flow.by_host || flow.is_foreign_nat || place::is_own(next.ip()) {
            return None;
        }
        let transport = packet.transport.as_ref();
        let is_of_another =
            || flow.is_answered_by_another(transport) || flow.is_outlived_by(transport, now_secs);
        if leg != Leg::ToBackend && is_of_another() {
            return None;
        }
        if !self.may_skip(sent, packet, flow, leg, next) {
            return None;
        }
        let skipped = self
            .way(sent, packet, flow, leg)
            .filter(|way| way.got.frame == got.frame)?;
        if matches!(leg, Leg::ToClient | Leg::FromNode) && skipped.to_peer {
            self.hear(sent, packet, id, Leg::ToClient, now_secs);
        }
        Some(self.go(leg, skipped))
    }

    /// Returns true if the programs opened a bypass flow, and were allowed to.
    pub(super) fn opens_past_stack(
        &self,
        sent: &Sent,
        got: &Got,
        packet: &Packet,
        flow: &Flow,
    ) -> bool {
        got.verdict == Verdict::Redirect
            && is_usual(sent, &packet.ip)
            && self.may_open(sent, flow, flow.backend.ip())
    }

    /// Returns the outcome of the packet that has just opened a bypass flow.
    pub(super) fn opened_past_stack(
        &mut self,
        sent: &Sent,
        packet: &Packet,
        id: u64,
    ) -> Option<Got> {
        let skipped = self.way(sent, packet, &self.flows[&id], Leg::ToBackend)?;
        Some(self.go(Leg::ToBackend, skipped))
    }

    /// Returns true if flows between these ends may bypass the stack now.
    pub(super) fn may_open(&self, sent: &Sent, flow: &Flow, next: IpAddr) -> bool {
        let (At::Ingress(device), Some(exit)) = (sent.at, place::route(next)) else {
            return false;
        };
        self.fast.opens()
            && self.is_bare_between(device, exit)
            && (exit.leads_to_pods() || self.fast.has(Fast::OPENS_FAR))
            && !self.is_outside(flow)
    }

    /// Returns true if a packet to the `next` end may skip the stack: its flow bypasses it, open
    /// flows may skip it, or the agent has allowed the flow.
    fn may_skip(
        &self,
        sent: &Sent,
        packet: &Packet,
        flow: &Flow,
        leg: Leg,
        next: SocketAddr,
    ) -> bool {
        let (At::Ingress(device), Some(exit)) = (sent.at, place::route(next.ip())) else {
            return false;
        };
        let (src, dst) = packet.peers();
        if !is_usual(sent, &packet.ip) || is_spoofed(sent.at, packet.proto, src, dst) {
            return false;
        }
        let shakes_hands = packet.says(|transport| transport.opens || transport.answer.is_some());
        let ends = packet.says(|transport| transport.ends || transport.resets);
        // The stack gets handshakes and datagrams of flows that could not open a bypass now.
        let is_bypass = flow.is_bypass
            && self.fast.is_on()
            && self.fast.is_bare(device)
            && (packet.proto == TCP && !shakes_hands || self.may_open(sent, flow, next.ip()));
        let is_open = (packet.proto == UDP || !shakes_hands) && !ends && is_open(flow, leg);
        let is_between_pods =
            device.leads_to_pods() && exit.leads_to_pods() && !self.is_outside(flow);
        let is_made_liberal = self.fast.has(Fast::OPENED)
            && self.fast.has(Fast::LEASE)
            && self.is_bare_between(device, exit)
            && (is_between_pods || self.fast.has(Fast::OPENED_OUTSIDE) && flow.proto == UDP)
            && self.is_answered(flow);
        is_bypass || is_open && (self.fast.has(Fast::OTHERS) || is_made_liberal)
    }

    fn is_bare_between(&self, device: Device, exit: Device) -> bool {
        self.fast.is_bare(device) && self.fast.is_bare(exit)
    }

    /// Returns true if only flows between some networks skip the stack, and this flow is not
    /// between them.
    fn is_outside(&self, flow: &Flow) -> bool {
        let is_in = |addr| {
            UNCHANGED
                .iter()
                .any(|net| net.cidr(Family::of(addr)).contains(&addr))
        };
        self.fast.has(Fast::OPENS_PODS) && !(is_in(flow.client.ip()) && is_in(flow.backend.ip()))
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
        // The kernel resolves an unknown link address before it sends the packet through the
        // device.
        let to_peer = self.fast.has_peer(exit) && is_neighbour(next.ip());
        let (src, dst, notes) = match leg {
            Leg::ToBackend if to_peer => (flow.source, flow.backend, 0),
            Leg::ToBackend if flow.changes_address() => {
                (flow.between(), flow.backend, TRANSLATED | FORWARD)
            }
            Leg::ToBackend => (flow.between(), flow.backend, DONE),
            Leg::FromNode | Leg::ToClient if to_peer => (flow.frontend, flow.client, 0),
            Leg::FromNode => (src, flow.between(), TRANSLATED),
            // The egress hook does the rest.
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

/// The outcome of a packet that skips the stack, and whether it goes to the peer of a pod's veth
/// pair.
pub(super) struct Skipped {
    got: Got,
    to_peer: bool,
}

impl Skipped {
    /// Sends a translated frame.
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

/// Sets the link addresses of the path to a pod, if the program has done so.
pub(super) fn take_link_to_pod(got: &[u8], want: &mut [u8]) {
    if got.starts_with(&TO_POD) && want.len() >= TO_POD.len() {
        want[..TO_POD.len()].copy_from_slice(&TO_POD);
    }
}

/// Returns true for a packet that a router forwards unchanged: complete, with a plain IP header,
/// sent to the router, with hops left.
pub(super) fn is_usual(sent: &Sent, ip: &Ip) -> bool {
    let header_len = if ip.family == Family::V4 { 20 } else { 40 };
    let has_usual_header = ip.l4 == ETH_LEN + header_len && sent.frame[..6] == [2, 0, 0, 0, 0, 2];
    ip.part == Part::Whole && has_usual_header && sent.frame[hops_at(ip.family)] > 1
}

/// Returns true if neither side has sent a FIN. The stack does not need the client's FIN of a
/// bypass flow.
fn is_open(flow: &Flow, leg: Leg) -> bool {
    let goes_on = |said: &Said| said.anything && !said.goodbye && !said.reset;
    goes_on(&flow.backend_said)
        && (goes_on(&flow.client_said) || flow.is_bypass && leg == Leg::ToClient)
}

/// Returns true if the node has a neighbour entry for the address.
fn is_neighbour(addr: IpAddr) -> bool {
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

/// Returns the offset of the hop limit in the frame.
fn hops_at(family: Family) -> usize {
    ETH_LEN + if family == Family::V4 { 8 } else { 7 }
}
