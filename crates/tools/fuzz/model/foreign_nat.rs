//! Foreign NAT connections: other programs' connections that leave with a node address and a port
//! of kpx's range.

use anyhow::{Result, ensure};
use proxy_common::addr::Proto;
use proxy_common::counter::Event;
use proxy_common::foreign_nat::{self, ForeignNat};
use testbed::reference::{model as reference, place};

use super::flow::{Leg, Table};
use super::open::{CLIENT_PORTS, Chosen, SOURCE_PORT_FIRST};
use super::wire::{TCP, UDP};
use super::{At, Got, Model, Packet, Sent, TRANSLATED, open};

impl Model {
    /// Handles a leaving packet without a flow whose tuple belongs to another flow.
    pub(super) fn meet_foreign_nat(
        &mut self,
        sent: &Sent,
        got: &Got,
        packet: &Packet,
        now_secs: u32,
        chosen: Chosen<'_>,
    ) -> Result<Option<u64>> {
        let (src, dst) = packet.peers();
        if sent.mark & TRANSLATED != 0 || self.note_foreign_nat(packet, now_secs, false).is_none() {
            return Ok(None);
        }
        let mut flow = self.blank(sent, packet, now_secs);
        flow.is_foreign_nat = true;
        let (backend, source) = self.observe(sent, got, packet, chosen)?;
        ensure!(
            backend == dst,
            "another program's connection went to {backend}"
        );
        self.take_port(&mut flow, src.ip(), source.port(), false)?;
        self.foreign_nat.remove(&(packet.proto, dst, src));
        *self.counts.events.entry(Event::PortMoved).or_default() += 1;
        Ok(Some(self.insert(flow)))
    }

    /// Handles a packet to a backend that netfilter has masqueraded: a silent flow with its tuple
    /// yields.
    pub(super) fn learn_foreign_nat(
        &mut self,
        packet: &Packet,
        now_secs: u32,
        chosen: Chosen<'_>,
    ) -> Result<()> {
        let Some(id) = self.note_foreign_nat(packet, now_secs, true) else {
            return Ok(());
        };
        let flow = &self.flows[&id];
        let (opener, _) = flow.legs()[0];
        let (table, proto, src, dst) = opener;
        if chosen(table, proto, src, dst).is_err() {
            ensure!(
                flow.proto == UDP || !flow.assured,
                "a flow that lasts was forgotten for another program's"
            );
            ensure!(
                now_secs > flow.last_secs,
                "a flow that was just heard was forgotten for another program's"
            );
            self.close(id);
            *self.counts.events.entry(Event::FlowForgotten).or_default() += 1;
        }
        Ok(())
    }

    /// Records another program's connection. Returns the flow with its tuple, if the packet opens
    /// the connection.
    fn note_foreign_nat(
        &mut self,
        packet: &Packet,
        now_secs: u32,
        is_masqueraded: bool,
    ) -> Option<u64> {
        let (src, dst) = packet.peers();
        if !place::is_own(src.ip())
            || !packet.may_be_foreign_nat() && !self.leaves_from_frontend(packet)
        {
            return None;
        }
        let opens = packet.says(|transport| transport.opens);
        let is_seen_alone =
            packet.proto == TCP && (is_masqueraded || CLIENT_PORTS.contains(&src.port()));
        let signals = foreign_nat::Packet {
            opens: opens && packet.proto != UDP,
            ends: packet.says(|transport| transport.ends),
            resets: packet.says(|transport| transport.resets),
            is_seen_alone,
        };
        let known = self
            .foreign_nat
            .entry((packet.proto, dst, src))
            .or_insert(ForeignNat::NONE);
        let before = *known;
        let after = ForeignNat::after(before, signals, Proto(packet.proto), now_secs);
        let is_anothers = before != ForeignNat::NONE || opens || !is_seen_alone;
        if is_anothers && after.differs_from(&before) {
            *known = after;
        }
        if !opens || (packet.proto == UDP && before.is_there(now_secs)) {
            return None;
        }
        let taken = self
            .index
            .get(&(Table::Arriving, packet.proto, dst, src))
            .copied();
        let (id, Leg::FromNode | Leg::ToClient) = taken? else {
            return None;
        };
        if self.flows[&id].is_over(now_secs) {
            self.close(id);
            return None;
        }
        Some(id)
    }
}

impl Model {
    /// Returns true if a datagram's source is a frontend.
    fn leaves_from_frontend(&self, packet: &Packet) -> bool {
        let (src, dst) = packet.peers();
        let question = open::question(At::Anchor, packet.proto, dst, src);
        packet.proto == UDP && reference::service_port(&self.cluster, &question).is_some()
    }

    /// Returns true if a datagram answers another program's datagram that left the node.
    pub(super) fn answers_foreign_nat(&self, packet: &Packet, now_secs: u32) -> bool {
        let (src, dst) = packet.peers();
        packet.proto == UDP
            && self
                .foreign_nat
                .get(&(UDP, src, dst))
                .is_some_and(|foreign_nat| foreign_nat.is_there(now_secs))
    }
}

impl Packet {
    /// Returns true if the packet may have a foreign NAT port.
    fn may_be_foreign_nat(&self) -> bool {
        let port = self.peers().0.port();
        port >= SOURCE_PORT_FIRST || CLIENT_PORTS.contains(&port) && self.shows_port()
    }

    /// Returns false in the middle of a TCP connection: recording a server's packets would cost
    /// without benefit.
    pub(super) fn shows_port(&self) -> bool {
        self.proto != TCP
            || self.says(|transport| {
                transport.opens || transport.ends || transport.resets || transport.answer.is_some()
            })
    }
}
