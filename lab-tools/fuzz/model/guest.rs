//! Connections of other programs that leave with an address of the node's and one of kpx's ports.

use anyhow::{Result, ensure};
use proxy_common::addr::Proto;
use proxy_common::counter::Event;
use proxy_common::guest::{self, Guest};
use testbed::reference::place;

use super::flow::{Leg, Table};
use super::open::{CLIENT_PORTS, Chosen, SOURCE_PORT_FIRST};
use super::wire::{TCP, UDP};
use super::{Got, Model, Packet, Sent, TRANSLATED};

impl Model {
    /// The flow with which a packet leaves that belongs to none: another flow has its tuple.
    pub(super) fn meet_guest(
        &mut self,
        sent: &Sent,
        got: &Got,
        packet: &Packet,
        now_secs: u32,
        chosen: Chosen<'_>,
    ) -> Result<Option<u64>> {
        let (src, dst) = packet.peers();
        let opens = packet.says(|transport| transport.opens);
        let is_low = CLIENT_PORTS.contains(&src.port());
        let is_seen_alone = is_low && packet.proto == TCP;
        // The middle of a TCP connection: a server's packets would pay for nothing.
        let is_end = packet.says(|transport| transport.ends || transport.resets);
        let is_middle = is_seen_alone && !opens && !is_end && !packet.says(|transport| transport.answer.is_some());
        let counts = src.port() >= SOURCE_PORT_FIRST || is_low && !is_middle;
        if sent.mark & TRANSLATED != 0 || !counts || !place::is_own(src.ip()) {
            return Ok(None);
        }
        let told = guest::Packet {
            opens: opens && packet.proto != UDP,
            ends: packet.says(|transport| transport.ends),
            resets: packet.says(|transport| transport.resets),
            is_seen_alone,
        };
        let known = self.guests.entry((packet.proto, dst, src)).or_insert(Guest::NONE);
        let before = *known;
        let after = Guest::after(before, told, Proto(packet.proto), now_secs);
        let is_anothers = before != Guest::NONE || opens || !is_seen_alone;
        if is_anothers && after.differs_from(&before) {
            *known = after;
        }
        if !opens || (packet.proto == UDP && before.is_there(now_secs)) {
            return Ok(None);
        }
        let taken = self.index.get(&(Table::Arriving, packet.proto, dst, src)).copied();
        let Some((id, Leg::FromNode | Leg::ToClient)) = taken else { return Ok(None) };
        if self.flows[&id].is_over(now_secs) {
            self.close(id);
            return Ok(None);
        }
        let mut flow = self.blank(sent, packet, now_secs);
        flow.is_guest = true;
        let (backend, source) = self.observe(sent, got, packet, chosen)?;
        ensure!(backend == dst, "another program's connection was led to {backend}");
        self.take_port(&mut flow, src.ip(), source.port(), false)?;
        self.guests.remove(&(packet.proto, dst, src));
        *self.counts.events.entry(Event::PortMoved).or_default() += 1;
        Ok(Some(self.insert(flow)))
    }
}
