//! The evidence against a backend, and the flows that leave it. A client waits a second before it
//! retransmits a SYN (RFC 6298).

use std::net::SocketAddr;
use std::time::Duration;

use proxy_common::counter::Event;
use testbed::reference::model as reference;

use super::flow::{Flow, Leg, Table};
use super::wire::Transport;
use super::{At, Model, Packet, Sent, open, wire};

const PATIENCE: Duration = Duration::from_millis(900);
/// The answer timeout under session affinity.
const AFFINITY_PATIENCE: Duration = Duration::from_millis(2_700);

impl Model {
    /// Counts a retransmitted SYN after the backend's answer timeout. Returns true if the flow
    /// leaves the backend.
    pub(super) fn leaves_silent(&mut self, packet: &Packet, id: u64) -> bool {
        let flow = &self.flows[&id];
        let comes_again = packet
            .transport
            .as_ref()
            .is_some_and(|transport| waits_again(flow, transport));
        if !comes_again || flow.waited() < PATIENCE {
            return false;
        }
        let Some(service) = flow.service else {
            return false;
        };
        let question = open::question(At::Anchor, flow.proto, flow.client, service);
        let affinity = reference::fails_over(&self.cluster, &question);
        let waited = flow.waited();
        let backend = flow.backend;
        *self.counts.events.entry(Event::BackendFailed).or_default() += 1;
        let patience = |has_affinity| {
            if has_affinity {
                AFFINITY_PATIENCE
            } else {
                PATIENCE
            }
        };
        if affinity.is_none_or(|has_affinity| waited < patience(has_affinity)) {
            return false;
        }
        *self.counts.events.entry(Event::FlowMoved).or_default() += 1;
        self.close(id);
        self.left = Some(backend);
        true
    }

    /// Counts a backend's first answer if it refuses the connection.
    pub(super) fn note_refusal(&mut self, packet: &Packet, id: u64, leg: Leg) {
        let flow = &self.flows[&id];
        let is_first =
            leg == Leg::ToClient && flow.proto == wire::TCP && !flow.backend_said.anything;
        if is_first && flow.service.is_some() && packet.says(|transport| transport.resets) {
            *self.counts.events.entry(Event::BackendFailed).or_default() += 1;
        }
    }

    /// Returns true if a timeout that is about to expire decides the packet's effect.
    pub(crate) fn is_in_doubt(&self, sent: &Sent) -> bool {
        const MOMENT: Duration = Duration::from_millis(300);
        let Some(ip) =
            wire::family(&sent.frame).and_then(|family| wire::outer(&sent.frame, family).ok())
        else {
            return false;
        };
        let Ok(transport) = wire::transport(&sent.frame, &ip) else {
            return false;
        };
        let src = SocketAddr::new(ip.src, transport.sport);
        let dst = SocketAddr::new(ip.dst, transport.dport);
        let flows = [Table::Arriving, Table::Starting].into_iter();
        let mut flows = flows.filter_map(|table| {
            Some(&self.flows[&self.index.get(&(table, ip.proto, src, dst))?.0])
        });
        let is_near = |flow: &Flow, patience| flow.waited().abs_diff(patience) < MOMENT;
        flows.any(|flow| {
            waits_again(flow, &transport)
                && [PATIENCE, AFFINITY_PATIENCE]
                    .iter()
                    .any(|it| is_near(flow, *it))
        })
    }
}

fn waits_again(flow: &Flow, transport: &Transport) -> bool {
    flow.proto == wire::TCP && !flow.backend_said.anything && transport.opens
}
