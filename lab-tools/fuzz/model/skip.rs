//! Packets of open connections that skip the stack. Which may is judged here; which must, and when one takes the stack all
//! the same, is left to the tables of packets (`tests/datapath`).

use proxy_common::counter::Event;
use testbed::reference::place::{self, Device, Family};
use testbed::test_run::Verdict;

use super::flow::{Flow, Leg, Table};
use super::wire::{Part, UDP};
use super::{DONE, FORWARD, Got, Model, Packet, Sent, TRANSLATED, noted, rewrite};

const ETH_LEN: usize = 14;

impl Model {
    /// Returns the outcome of a packet that came in and skipped the stack: all changes of the hooks on its way,
    /// and one hop less. None if it has not. `found` is the flow that the ingress hook knows it as one of.
    pub(super) fn skipped(
        &mut self,
        sent: &Sent,
        got: &Got,
        packet: &Packet,
        found: Option<(u64, Leg)>,
        now_secs: u32,
    ) -> Option<Got> {
        if !self.is_fast || got.verdict != Verdict::Redirect || !may_skip(sent, packet) {
            return None;
        }
        let (src, dst) = packet.peers();
        let (id, leg) = found.or_else(|| self.index.get(&(Table::Leaving, packet.proto, src, dst)).copied())?;
        let flow = self.flows[&id].clone();
        let next = if leg == Leg::ToBackend { flow.backend } else { flow.client };
        if flow.by_host || flow.is_guest || !is_open(&flow) || place::is_own(next.ip()) {
            return None;
        }
        let to_peer = place::route(next.ip())? == Device::Pod;
        let (src, dst, notes) = match leg {
            Leg::ToBackend if to_peer => (flow.source, flow.backend, 0),
            Leg::ToBackend if flow.changes_address() => (flow.between(), flow.backend, TRANSLATED | FORWARD),
            Leg::ToBackend => (flow.between(), flow.backend, DONE),
            Leg::FromNode | Leg::ToClient if to_peer => (flow.frontend, flow.client, 0),
            Leg::FromNode => (src, flow.between(), TRANSLATED),
            // Its egress hook does the rest.
            Leg::ToClient => (src, dst, 0),
            Leg::AsNode => return None,
        };
        let mut frame = sent.frame.clone();
        rewrite::peers(&mut frame, &packet.ip, packet.ports, src, dst).ok()?;
        spend_hop(&mut frame, packet.ip.family);
        if to_peer {
            frame[..6].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
            frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 2]);
        }
        if frame != got.frame {
            return None;
        }
        *self.counts.events.entry(if to_peer { Event::FastLocal } else { Event::FastRemote }).or_default() += 1;
        let mark = if notes == 0 { sent.mark } else { noted(sent.mark, notes) };
        let skipped = Got { verdict: Verdict::Redirect, mark, frame };
        Some(match leg {
            Leg::ToBackend => self.forward(skipped),
            _ if to_peer => {
                self.hear(sent, packet, id, Leg::ToClient, now_secs);
                self.give(skipped)
            }
            _ => skipped,
        })
    }
}

/// The stack has to see the others: it answers them, puts them together, or follows connections by them.
fn may_skip(sent: &Sent, packet: &Packet) -> bool {
    let ip = &packet.ip;
    let Some(transport) = packet.transport.as_ref().filter(|_| ip.part == Part::Whole) else { return false };
    let opens = transport.opens && packet.proto != UDP;
    let header_len = if ip.family == Family::V4 { 20 } else { 40 };
    let is_plain = ip.l4 == ETH_LEN + header_len && sent.frame[..6] == [2, 0, 0, 0, 0, 2];
    is_plain && !opens && !transport.ends && !transport.resets && sent.frame[hops_at(ip.family)] > 1
}

fn is_open(flow: &Flow) -> bool {
    [flow.client_said, flow.backend_said].iter().all(|said| said.anything && !said.goodbye && !said.reset)
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
