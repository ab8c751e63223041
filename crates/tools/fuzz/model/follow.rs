//! Which flow a packet belongs to, and what the flow learns from it.

use proxy_common::counter::{Event, Reason};
use testbed::reference::{model as reference, place};

use super::flow::{End, Leg, Table};
use super::wire::{self, Part};
use super::{At, FORWARD, Model, Packet, Sent, TRANSLATED, goes_to_backend, open};

impl Model {
    /// The flow that the packet belongs to, and what is to be done to it. The flow has heard the
    /// packet then. An error if the packet comes in another's name.
    pub(super) fn follow(
        &mut self,
        sent: &Sent,
        packet: &Packet,
        table: Table,
        now_secs: u32,
    ) -> Result<Option<(u64, Leg)>, Reason> {
        let (src, dst) = packet.peers();
        let Some((id, leg)) = self.index.get(&(table, packet.proto, src, dst)).copied() else {
            return Ok(None);
        };
        if self.is_in_anothers_name(sent, packet, table, id, leg, now_secs) {
            return Err(Reason::Spoofed);
        }
        self.heed(sent, packet, id, leg, now_secs)
    }

    /// Would a flow learn something from a packet whose sender cannot be where it came in?
    fn is_in_anothers_name(
        &self,
        sent: &Sent,
        packet: &Packet,
        table: Table,
        id: u64,
        leg: Leg,
        now_secs: u32,
    ) -> bool {
        let (src, dst) = packet.peers();
        match (sent.at, leg) {
            // Another program's connection is met where it leaves, and there nothing is judged.
            (At::Anchor | At::Lo, Leg::ToBackend) => {
                table == Table::Starting && sent.came_in && self.is_change(packet, id, now_secs)
            }
            (At::Ingress(_), Leg::ToClient) => open::is_spoofed(sent.at, packet.proto, src, dst),
            (At::Ingress(_), Leg::ToBackend) => {
                self.is_change(packet, id, now_secs)
                    && open::is_spoofed(sent.at, packet.proto, src, dst)
            }
            (At::Egress(_), Leg::ToClient) => {
                let goes_there = sent
                    .note(packet.ip.part != Part::Whole)
                    .is_some_and(goes_to_backend);
                let came_in_by = sent
                    .by
                    .filter(|_| !goes_there && self.is_change_of_backend(packet, id, now_secs));
                // Netfilter may have given the node's address back to a container's answer.
                came_in_by
                    .filter(|_| !place::is_own(src.ip()))
                    .is_some_and(|device| {
                        open::is_spoofed(At::Ingress(device), packet.proto, src, dst)
                    })
            }
            _ => false,
        }
    }

    /// Does a backend's packet change more of its flow than counts?
    fn is_change_of_backend(&self, packet: &Packet, id: u64, now_secs: u32) -> bool {
        let flow = &self.flows[&id];
        let said = flow.backend_said;
        let opens = packet.says(|transport| transport.opens) && packet.proto != wire::UDP;
        let answers = packet.says(|transport| transport.answer.is_some());
        let accepts = packet.says(|transport| transport.accepts) && !flow.assured;
        let ends = packet.says(|transport| transport.ends) && !said.goodbye;
        let resets = packet.says(|transport| transport.resets) || said.reset;
        let acked = packet
            .transport
            .as_ref()
            .and_then(|transport| transport.ack);
        let advances =
            !flow.backend_advanced && acked.is_some_and(|acked| acked != flow.backend_acked);
        !said.anything
            || opens
            || answers
            || accepts
            || ends
            || resets
            || advances
            || flow.backend_secs != now_secs
    }

    /// Does a client's packet change more of its flow than counts?
    fn is_change(&self, packet: &Packet, id: u64, now_secs: u32) -> bool {
        let flow = &self.flows[&id];
        let client = flow.client_said;
        let backend = flow.backend_said;
        let opens = packet.says(|transport| transport.opens) && packet.proto != wire::UDP;
        let answers = packet.says(|transport| transport.answer.is_some());
        // A number that only the backend's answer held says where the client is.
        let assures = packet.proto != wire::TCP
            && !flow.assured
            && flow.is_proven_by(packet.transport.as_ref());
        let ends = packet.says(|transport| transport.ends) && !client.goodbye;
        let resets = packet.says(|transport| transport.resets) || client.reset || backend.reset;
        opens || answers || assures || ends || resets || flow.last_secs != now_secs
    }

    /// Follows a packet that may be the flow's, as [`Self::follow`] does.
    fn heed(
        &mut self,
        sent: &Sent,
        packet: &Packet,
        id: u64,
        leg: Leg,
        now_secs: u32,
    ) -> Result<Option<(u64, Leg)>, Reason> {
        let flow = &self.flows[&id];
        match leg {
            Leg::ToBackend => {
                let opens = packet.transport.is_some_and(|transport| transport.opens);
                if opens && flow.yields(now_secs) {
                    self.close(id);
                    return Ok(None);
                }
                if opens && flow.clashes && !flow.backend_said.anything {
                    self.close(id);
                    self.port_taken = true;
                    return Ok(None);
                }
                if packet.proto == wire::UDP && self.has_moved(id) {
                    *self.counts.events.entry(Event::FlowMoved).or_default() += 1;
                    self.close(id);
                    return Ok(None);
                }
                if self.leaves_silent(packet, id) {
                    return Ok(None);
                }
            }
            Leg::ToClient | Leg::AsNode
                if !self.belongs(sent, packet.ip.part != Part::Whole, id, leg) =>
            {
                return Ok(None);
            }
            Leg::ToClient if flow.is_answered_by_another(packet.transport.as_ref()) => {
                self.flows
                    .get_mut(&id)
                    .expect("who follows a flow has found it")
                    .clashes = true;
                return Ok(None);
            }
            Leg::ToClient if flow.is_outlived_by(packet.transport.as_ref(), now_secs) => {
                self.close(id);
                return Ok(None);
            }
            _ => {}
        }
        let end = self.hear(sent, packet, id, leg, now_secs);
        // A stranger's perhaps, for which conntrack would forget the connection.
        let is_blind = leg == Leg::ToBackend
            && end == End::Ignored
            && packet.says(|transport| transport.resets);
        if is_blind && self.flows[&id].is_from_outside() {
            Err(Reason::Spoofed)
        } else {
            Ok(Some((id, leg)))
        }
    }

    /// The flow has heard the packet. Returns the judgement of its end, if the packet would end it.
    pub(super) fn hear(
        &mut self,
        sent: &Sent,
        packet: &Packet,
        id: u64,
        leg: Leg,
        now_secs: u32,
    ) -> End {
        self.note_refusal(packet, id, leg);
        let flow = self
            .flows
            .get_mut(&id)
            .expect("who follows a flow has found it");
        let transport = packet.transport.as_ref();
        let is_recent = |last_secs: u32| now_secs.saturating_sub(last_secs) <= 2;
        let redialled = flow.redialled;
        let end = match leg {
            Leg::ToBackend => {
                let advances = flow.backend_advanced && is_recent(flow.backend_secs);
                flow.judge_end(
                    transport,
                    flow.client_said,
                    true,
                    flow.backend_acked,
                    advances,
                )
            }
            _ if flow.dialled || redialled => End::Likely,
            _ => flow.judge_end(
                transport,
                flow.backend_said,
                false,
                flow.client_acked,
                is_recent(flow.last_secs),
            ),
        };
        let is_denied = end != End::Likely;
        let mut is_alive = end == End::Likely;
        flow.is_leaving |= leg == Leg::ToBackend && end == End::Early;
        let passed = match leg {
            Leg::ToBackend if is_denied => &mut flow.sent,
            Leg::ToClient if is_denied => &mut flow.returned,
            Leg::ToBackend => {
                let opens = packet.says(|transport| transport.opens) && packet.proto != wire::UDP;
                let resets = packet.says(|transport| transport.resets);
                let was_assured = flow.assured;
                flow.assured |= flow.is_proven_by(transport) && !opens && !resets;
                if flow.assured {
                    flow.client_acked = transport
                        .and_then(|transport| transport.ack)
                        .unwrap_or(flow.client_acked);
                }
                let dials = packet.proto == wire::TCP && opens && was_assured;
                flow.dialled |= dials;
                flow.redialled |= dials
                    && (now_secs.saturating_sub(flow.last_secs) > 60 || flow.may_survive_reset());
                is_alive = !(redialled && opens);
                if resets || dials {
                    flow.backend_secs = 0;
                }
                flow.client_said.hear(packet.transport.as_ref());
                flow.backend_said.reset &= flow.client_said.reset;
                &mut flow.sent
            }
            Leg::ToClient => {
                let is_awaited = !flow.assured || flow.dialled || flow.redialled;
                let answer = transport
                    .and_then(|transport| transport.answer)
                    .filter(|_| is_awaited);
                let answers = answer.is_some();
                if answers {
                    flow.begin_anew();
                }
                flow.backend_said.hear(packet.transport.as_ref());
                flow.assured |= packet.says(|transport| transport.accepts);
                flow.answer = answer.or(flow.answer);
                if let Some(acked) = transport.and_then(|transport| transport.ack) {
                    let is_first = flow.backend_secs != now_secs;
                    let is_more = answers || acked != flow.backend_acked;
                    flow.backend_advanced = is_more || flow.backend_advanced && !is_first;
                    flow.backend_acked = acked;
                }
                flow.backend_secs = now_secs;
                (flow.dialled, flow.redialled) = (false, false);
                flow.client_said.reset &= flow.backend_said.reset;
                &mut flow.returned
            }
            Leg::AsNode | Leg::FromNode => return End::Likely,
        };
        passed.packets += u64::from(sent.segments.max(1));
        passed.bytes += sent.frame.len() as u64;
        if is_alive {
            flow.last_secs = now_secs;
        }
        if end == End::Ignored {
            *self.counts.events.entry(Event::EndIgnored).or_default() += 1;
        }
        end
    }

    /// Tells if a leaving packet that looks like one of the flow is one. What is on its way to a
    /// backend is no reply. Between the hooks, the client of a masqueraded flow has a port that its
    /// own machine may use otherwise. There only marked packets belong to the flow, and the host's
    /// own answers. Where the mark is lost, any that looks so does.
    pub(super) fn belongs(&self, sent: &Sent, is_fragment: bool, id: u64, leg: Leg) -> bool {
        let flow = &self.flows[&id];
        let Some(note) = sent.note(is_fragment) else {
            return true;
        };
        let translated = note & TRANSLATED != 0;
        match leg {
            Leg::AsNode => note == TRANSLATED | FORWARD,
            _ if goes_to_backend(note) => false,
            _ if flow.by_host || !flow.changes_address() => true,
            _ => translated || (!sent.came_in && !is_fragment),
        }
    }

    /// Has this flow's backend ceased to be an endpoint of what its client dialled?
    pub(super) fn has_moved(&self, id: u64) -> bool {
        let flow = &self.flows[&id];
        if flow.service.is_none() {
            return false;
        }
        let serving = reference::serving(
            &self.cluster,
            &open::question(At::Anchor, flow.proto, flow.client, flow.frontend),
        );
        !serving.is_some_and(|serving| serving.contains(&flow.backend))
    }

    pub(super) fn close(&mut self, id: u64) {
        let flow = self
            .flows
            .remove(&id)
            .expect("who closes a flow has found it");
        for (tuple, _) in flow.legs() {
            self.index.remove(&tuple);
        }
        if let Some(service) = flow.service {
            let counts = self
                .counts
                .services
                .entry((service, flow.proto))
                .or_default();
            counts.sent += flow.sent;
            counts.returned += flow.returned;
        }
    }
}
