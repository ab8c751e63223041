//! The four programs: the translation of packets at each hook.

use std::net::SocketAddr;

use anyhow::Result;
use proxy_common::counter::Reason;
use testbed::reference::model::Answer;
use testbed::reference::place::{self, Family};
use testbed::test_run::Verdict;

use super::flow::{Flow, Leg, Table};
use super::wire::{self, Ip, Part};
use super::{
    At, DONE, FORWARD, Got, Model, PORT_SHOWS, Packet, Sent, TRANSLATED, inject, leave, noted,
    open, pass, rewrite, unnoted,
};

impl Model {
    /// Reads a packet. A later fragment gets the header of the first fragment at the same place; a
    /// new first fragment replaces the stored header.
    pub(super) fn read(
        &mut self,
        sent: &Sent,
        family: Family,
        table: Table,
    ) -> Result<Packet, Reason> {
        let is_within_host = sent.at == At::Lo;
        let outer = if is_within_host {
            wire::outer_within_host
        } else {
            wire::outer
        };
        let ip = outer(&sent.frame, family)?;
        if let Part::Later { id, split } = ip.part {
            let known = self.fragments.get(&(table, id, split, ip.src, ip.dst));
            let (sport, dport, proto) = *known.ok_or(Reason::Fragment)?;
            return Ok(Packet {
                ip,
                ports: (sport, dport),
                proto,
                transport: None,
            });
        }
        if let Part::First { id, split } = ip.part {
            self.fragments.remove(&(table, id, split, ip.src, ip.dst));
        }
        let transport = match wire::transport(&sent.frame, &ip) {
            Err(Reason::Malformed)
                if ip.part != Part::Whole
                    && table == Table::Arriving
                    && (self.is_for_service(sent, &ip) || self.is_blind_stub(sent, &ip)) =>
            {
                return Err(Reason::CutHeader);
            }
            read => read?,
        };
        Ok(Packet {
            ip,
            ports: (transport.sport, transport.dport),
            proto: ip.proto,
            transport: Some(transport),
        })
    }

    /// Returns true if a packet with a partial transport header is for a Service.
    fn is_for_service(&mut self, sent: &Sent, ip: &Ip) -> bool {
        let has_ports = ip.end >= ip.l4 + 4;
        let port = |at| {
            wire::half(&sent.frame, at)
                .filter(|_| has_ports)
                .unwrap_or(0)
        };
        let src = SocketAddr::new(ip.src, port(ip.l4));
        let dst = SocketAddr::new(ip.dst, port(ip.l4 + 2));
        !matches!(
            self.answer(sent.at, ip.proto, src, dst).0,
            Answer::Pass(Reason::NotOurs)
        )
    }

    pub(super) fn arriving(
        &mut self,
        sent: &Sent,
        got: &Got,
        family: Family,
        now_secs: u32,
        chosen: open::Chosen<'_>,
    ) -> Result<Result<Got, Reason>> {
        let packet = match self.read(sent, family, Table::Arriving) {
            Ok(_) if sent.note(true).is_some_and(|note| note & TRANSLATED != 0) => {
                return Ok(Err(Reason::SeenBefore));
            }
            Ok(packet) => packet,
            Err(reason)
                if reason != Reason::CutHeader
                    && got.verdict == Verdict::Drop
                    && self.may_hide_end(sent, family) =>
            {
                return Ok(Err(Reason::Spoofed));
            }
            Err(reason) => return Ok(Err(reason)),
        };
        let found = match self.follow(sent, &packet, Table::Arriving, now_secs) {
            Ok(found) => found,
            Err(reason) => return Ok(Err(reason)),
        };
        let (src, dst) = packet.peers();
        let answers = |leg: &(u64, Leg)| leg.1 == Leg::ToClient;
        let is_answer = self
            .index
            .get(&(Table::Leaving, packet.proto, src, dst))
            .is_some_and(answers);
        if found.is_none() && is_answer && place::is_own(src.ip()) {
            return Ok(Err(Reason::Spoofed));
        }
        if found.is_none() && got.verdict == Verdict::Drop && self.may_be_blind(sent, &packet) {
            return Ok(Err(Reason::Spoofed));
        }
        if let Some(skipped) = self.skipped(sent, got, &packet, found, now_secs) {
            return Ok(Ok(skipped));
        }
        let (id, leg) = match found {
            Some(found) => found,
            None => match self.open(sent, got, &packet, now_secs, chosen)? {
                Ok(id) if self.flows[&id].is_bypass => {
                    return Ok(self
                        .opened_past_stack(sent, &packet, id)
                        .ok_or(Reason::Rewrite));
                }
                Ok(id) => (id, Leg::ToBackend),
                Err(reason) => return Ok(Err(reason)),
            },
        };
        let flow = self.flows[&id].clone();
        Ok(match leg {
            Leg::ToBackend => {
                let translated =
                    self.translate(sent, &packet, Table::Arriving, flow.between(), flow.backend);
                let note = match flow.changes_address() {
                    true => TRANSLATED | FORWARD,
                    false if packet.ip.part == Part::Whole && packet.shows_port() => PORT_SHOWS,
                    false => DONE,
                };
                translated.map(|frame| self.forward(pass(noted(sent.mark, note), frame)))
            }
            Leg::FromNode => {
                let src = packet.peers().0;
                let translated =
                    self.translate(sent, &packet, Table::Arriving, src, flow.between());
                translated.map(|frame| pass(noted(sent.mark, TRANSLATED), frame))
            }
            Leg::ToClient if flow.is_foreign_nat => {
                let translated =
                    self.translate(sent, &packet, Table::Arriving, flow.frontend, flow.client);
                translated.map(|frame| pass(sent.mark, frame))
            }
            Leg::ToClient | Leg::AsNode => self.give_back(sent, &packet, Table::Arriving, &flow),
        })
    }

    pub(super) fn leaving(
        &mut self,
        sent: &Sent,
        got: &Got,
        family: Family,
        now_secs: u32,
        chosen: open::Chosen<'_>,
    ) -> Result<Result<Got, Reason>> {
        if sent.mark & DONE == DONE && !sent.has_class() {
            return Ok(Err(Reason::NotOurs));
        }
        let read = match self.read(sent, family, Table::Leaving) {
            Ok(packet) if sent.note(packet.ip.part != Part::Whole) == Some(DONE) => {
                return Ok(Err(Reason::NotOurs));
            }
            Ok(packet) if sent.note(packet.ip.part != Part::Whole) == Some(PORT_SHOWS) => {
                self.learn_foreign_nat(&packet, now_secs, chosen)?;
                return Ok(Err(Reason::NotOurs));
            }
            read => read,
        };
        let found = read.and_then(|packet| {
            Ok((
                self.follow(sent, &packet, Table::Leaving, now_secs)?,
                packet,
            ))
        });
        let (found, packet) = match found {
            Ok(found) => found,
            Err(reason) => return Ok(Err(reason)),
        };
        let found = match found {
            Some(found) => Some(found),
            None => self
                .meet_foreign_nat(sent, got, &packet, now_secs, chosen)?
                .map(|id| (id, Leg::ToBackend)),
        };
        let Some((id, leg)) = found else {
            return Ok(Err(Reason::NotOurs));
        };
        let flow = self.flows[&id].clone();
        if matches!(leg, Leg::AsNode | Leg::ToBackend) {
            let dst = packet.peers().1;
            let translated = self.translate(sent, &packet, Table::Leaving, flow.source, dst);
            return Ok(translated.map(|frame| pass(unnoted(sent), frame)));
        }
        let translated = self.translate(sent, &packet, Table::Leaving, flow.frontend, flow.client);
        Ok(translated.map(|frame| self.give(pass(unnoted(sent), frame))))
    }

    /// Handles a packet of the host to a Service.
    pub(super) fn starting(
        &mut self,
        sent: &Sent,
        got: &Got,
        family: Family,
        now_secs: u32,
        chosen: open::Chosen<'_>,
    ) -> Result<Result<Got, Reason>> {
        // On lo, a packet is looked up once, as leaving.
        let table = if sent.at == At::Lo {
            Table::Leaving
        } else {
            Table::Starting
        };
        let packet = match self.read(sent, family, table) {
            Ok(packet) => packet,
            Err(reason) => return Ok(Err(reason)),
        };
        let id = match self.follow(sent, &packet, Table::Starting, now_secs) {
            Err(reason) => return Ok(Err(reason)),
            Ok(Some((id, _))) => id,
            Ok(None) => match self.open(sent, got, &packet, now_secs, chosen)? {
                Ok(id) => id,
                // The packet bypassed the hook that follows its flow.
                Err(Reason::NoFlow)
                    if sent.at == At::Anchor && sent.came_in && self.is_met_arriving(&packet) =>
                {
                    return Ok(Err(Reason::Unhooked));
                }
                Err(reason) => return Ok(Err(reason)),
            },
        };
        let flow = self.flows[&id].clone();
        let translated = self.translate(sent, &packet, table, flow.source, flow.backend);
        Ok(translated.map(|frame| self.forward(leave(sent, frame, flow.backend.ip(), DONE))))
    }

    fn is_met_arriving(&self, packet: &Packet) -> bool {
        let (src, dst) = packet.peers();
        self.index
            .contains_key(&(Table::Arriving, packet.proto, src, dst))
    }

    /// Handles a packet of the host to itself: a local backend's reply, or a packet to a Service.
    pub(super) fn inside(
        &mut self,
        sent: &Sent,
        got: &Got,
        family: Family,
        now_secs: u32,
        chosen: open::Chosen<'_>,
    ) -> Result<Result<Got, Reason>> {
        let packet = match self.read(sent, family, Table::Leaving) {
            Ok(packet) => packet,
            Err(reason) => return Ok(Err(reason)),
        };
        // The model's clusters serve no node ports at loopback addresses.
        if packet.ip.dst.is_loopback() {
            return Ok(Err(Reason::NotUnicast));
        }
        let found = match self.follow(sent, &packet, Table::Leaving, now_secs) {
            Ok(found) => found,
            Err(reason) => return Ok(Err(reason)),
        };
        if let Some((id, _)) = found {
            let flow = self.flows[&id].clone();
            if flow.is_foreign_nat {
                return Ok(Err(Reason::NotOurs));
            }
            return Ok(self.give_back(sent, &packet, Table::Leaving, &flow));
        }
        self.starting(sent, got, family, now_secs, chosen)
    }

    /// Delivers a reply to a socket of the host by the device of the socket's packets.
    pub(super) fn give_back(
        &mut self,
        sent: &Sent,
        packet: &Packet,
        table: Table,
        flow: &Flow,
    ) -> Result<Got, Reason> {
        let frame = self.translate(sent, packet, table, flow.frontend, flow.client)?;
        Ok(self.give(inject(sent, frame, flow)))
    }

    /// Rewrites a packet's peers. The headers of a first fragment are stored before.
    pub(super) fn translate(
        &mut self,
        sent: &Sent,
        packet: &Packet,
        table: Table,
        src: SocketAddr,
        dst: SocketAddr,
    ) -> Result<Vec<u8>, Reason> {
        let mut frame = sent.frame.clone();
        rewrite::peers(&mut frame, &packet.ip, packet.ports, src, dst)?;
        if let Part::First { id, split } = packet.ip.part {
            let (sport, dport) = packet.ports;
            let key = (table, id, split, packet.ip.src, packet.ip.dst);
            self.fragments.insert(key, (sport, dport, packet.proto));
        }
        Ok(frame)
    }
}
