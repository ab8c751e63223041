//! The first packet of a flow: its backend, and the choices that the programs may make.

use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use proxy_common::counter::{Event, Reason};
use proxy_common::service_counts::Passed;
use testbed::reference::cluster::{Hook, Packet as Question0, Proto};
use testbed::reference::model::{self as reference, Answer, Forward};
use testbed::reference::place;

use super::flow::{Flow, Leg, Said, Table};
use super::wire::{SCTP, TCP, half, ip};
use super::{At, Got, Model, Packet, Sent};

pub(crate) type Question = (At, u8, IpAddr, SocketAddr);

/// Looks up the choice for a client of a frontend: the backend, and the source that it sees.
pub(crate) type Chosen<'a> =
    &'a dyn Fn(Table, u8, SocketAddr, SocketAddr) -> Result<(SocketAddr, SocketAddr)>;

/// kpx's source ports, for flows that cannot keep the client's port.
pub(super) const SOURCE_PORT_FIRST: u16 = 61_000;
/// Ports of clients with the node's address.
pub(super) const CLIENT_PORTS: std::ops::RangeInclusive<u16> = 1_024..=29_999;

pub(super) fn question(at: At, proto: u8, src: SocketAddr, dst: SocketAddr) -> Question0 {
    let hook = match at {
        At::Ingress(device) | At::Egress(device) => Hook::Ingress(device),
        At::Anchor => Hook::Anchor,
        At::Lo => Hook::Lo,
    };
    let proto = match proto {
        TCP => Proto::Tcp,
        SCTP => Proto::Sctp,
        _ => Proto::Udp,
    };
    Question0 {
        hook,
        proto,
        src,
        dst,
    }
}

/// Returns true if the source cannot be behind the device by which the packet comes in.
pub(crate) fn is_spoofed(at: At, proto: u8, src: SocketAddr, dst: SocketAddr) -> bool {
    reference::is_spoofed(&question(at, proto, src, dst))
}

impl Model {
    /// Opens the flow of the packet, if allowed. The outer error is a wrong choice.
    pub(super) fn open(
        &mut self,
        sent: &Sent,
        got: &Got,
        packet: &Packet,
        now_secs: u32,
        chosen: Chosen<'_>,
    ) -> Result<Result<u64, Reason>> {
        if !packet.transport.is_some_and(|transport| transport.opens) {
            return Ok(Err(Reason::NoFlow));
        }
        let (src, dst) = packet.peers();
        let answer = self.answer(sent.at, packet.proto, src, dst);
        let service = answer.1;
        let answer = &answer.0;
        let is_ingress = matches!(sent.at, At::Ingress(_));
        let is_ours = !matches!(
            answer,
            Answer::Pass(Reason::NotOurs) | Answer::Reject(Reason::NotOurs)
        );
        if is_ingress && is_ours && self.answers_foreign_nat(packet, now_secs) {
            return self.open_direct(sent, got, packet, now_secs, chosen);
        }
        // A packet that came in should have passed the ingress hook.
        if !is_ingress && sent.came_in && is_ours {
            return Ok(Err(self.refused(packet, service, false, Reason::Unhooked)));
        }
        let reason = match answer {
            Answer::Forward(forward) => {
                let mut flow = self.blank(sent, packet, now_secs);
                flow.service = service;
                if self.is_share_used_up(&flow) {
                    return Ok(Err(self.refused(
                        packet,
                        service,
                        false,
                        Reason::ClientShare,
                    )));
                }
                self.choose(sent, got, packet, &mut flow, forward, chosen)?;
                flow.is_bypass = self.opens_past_stack(sent, got, packet, &flow);
                return Ok(Ok(self.insert(flow)));
            }
            Answer::Pass(Reason::NotOurs) if is_ingress && service.is_none() => {
                return self.open_direct(sent, got, packet, now_secs, chosen);
            }
            Answer::Pass(reason) => *reason,
            Answer::Reject(reason) => self.refused(packet, service, true, *reason),
            Answer::Drop(reason) => self.refused(packet, service, false, *reason),
        };
        Ok(Err(reason))
    }

    /// Counts a refused packet for its Service.
    fn refused(
        &mut self,
        packet: &Packet,
        service: Option<SocketAddr>,
        is_answered: bool,
        reason: Reason,
    ) -> Reason {
        if let Some(service) = service {
            let counts = self
                .counts
                .services
                .entry((service, packet.proto))
                .or_default();
            *if is_answered {
                &mut counts.rejected
            } else {
                &mut counts.dropped
            } += 1;
        }
        reason
    }

    /// Runs the reference model, once per client address.
    pub(super) fn answer(
        &mut self,
        at: At,
        proto: u8,
        src: SocketAddr,
        dst: SocketAddr,
    ) -> Rc<(Answer, Option<SocketAddr>)> {
        let cluster = &self.cluster;
        let answer = self
            .answers
            .entry((at, proto, src.ip(), dst))
            .or_insert_with(|| {
                let question = question(at, proto, src, dst);
                let service = reference::service_port(cluster, &question);
                Rc::new((reference::answer(cluster, &question), service))
            });
        Rc::clone(answer)
    }

    /// Handles a client that dials a backend directly with a tuple that a flow has between the
    /// hooks: it gets another port, unless it is a backend that replies.
    fn open_direct(
        &mut self,
        sent: &Sent,
        got: &Got,
        packet: &Packet,
        now_secs: u32,
        chosen: Chosen<'_>,
    ) -> Result<Result<u64, Reason>> {
        let (src, dst) = packet.peers();
        let is_reply = |src, dst| {
            let found = self.index.get(&(Table::Leaving, packet.proto, src, dst));
            found.is_some_and(|(_, leg)| *leg == Leg::ToClient)
        };
        let from_pod = matches!(sent.at, At::Ingress(device) if device.leads_to_pods());
        // A packet that another hook may have translated does not belong to a direct connection.
        let is_unsure = !from_pod && !matches!(sent.at, At::Ingress(device) if device.is_edge());
        let is_masqueraded = || {
            let found = self.index.get(&(Table::Leaving, packet.proto, dst, src));
            found.is_some_and(|(id, _)| self.flows[id].changes_address())
        };
        if is_unsure || !from_pod && is_masqueraded() || !is_reply(dst, src) || is_reply(src, dst) {
            return Ok(Err(Reason::NotOurs));
        }
        if reference::is_spoofed(&question(sent.at, packet.proto, src, dst)) {
            return Ok(Err(if from_pod {
                Reason::Spoofed
            } else {
                Reason::NotOurs
            }));
        }
        let mut flow = self.blank(sent, packet, now_secs);
        flow.backend = dst;
        let (backend, source) = self.observe(sent, got, packet, chosen)?;
        ensure!(backend == dst, "a direct connection went to {backend}");
        self.take_port(&mut flow, src.ip(), source.port(), false)?;
        Ok(Ok(self.insert(flow)))
    }

    pub(super) fn blank(&self, sent: &Sent, packet: &Packet, now_secs: u32) -> Flow {
        let (client, frontend) = packet.peers();
        let said = Said {
            anything: true,
            ..Said::default()
        };
        Flow {
            proto: packet.proto,
            client,
            frontend,
            backend: frontend,
            source: client,
            by_host: matches!(sent.at, At::Anchor | At::Lo),
            on_lo: sent.at == At::Lo,
            to_host: false,
            is_foreign_nat: false,
            is_bypass: false,
            service: None,
            client_said: said,
            backend_said: Said::default(),
            assured: false,
            answer: None,
            client_acked: 0,
            backend_acked: 0,
            backend_advanced: false,
            backend_secs: now_secs,
            dialled: false,
            redialled: false,
            clashes: false,
            is_leaving: false,
            last_secs: now_secs,
            opened: Instant::now(),
            aged: 0,
            sent: Passed {
                packets: sent.segments.max(1).into(),
                bytes: sent.frame.len() as u64,
            },
            returned: Passed::NOTHING,
        }
    }

    /// Checks the choice, and records it.
    fn choose(
        &mut self,
        sent: &Sent,
        got: &Got,
        packet: &Packet,
        flow: &mut Flow,
        forward: &Forward,
        chosen: Chosen<'_>,
    ) -> Result<()> {
        let (backend, source) = self.observe(sent, got, packet, chosen)?;
        let seen = forward.backends.get(&backend);
        let seen = *seen.with_context(|| format!("{backend} is none of {:?}", forward.backends))?;
        let left = self.left.take();
        ensure!(
            left != Some(backend) || forward.backends.len() == 1,
            "the flow has left {backend} for itself"
        );
        flow.backend = backend;
        flow.to_host = flow.by_host && place::is_own(backend.ip());
        if flow.by_host {
            ensure!(
                source.ip() == seen,
                "the backend sees {source} and should see {seen}"
            );
        }
        if forward.has_affinity {
            let key = (forward.entry.clone(), flow.client.ip());
            let had = self.affinities.insert(key, Some(backend)).flatten();
            if let Some(had) =
                had.filter(|had| left.is_none() && forward.backends.contains_key(had))
            {
                ensure!(had == backend, "the client had {had} and got {backend}");
            }
        }
        let keeps_own = !flow.by_host && seen == flow.client.ip() && !self.port_taken;
        self.take_port(flow, seen, source.port(), keeps_own)
    }

    /// Returns the backend and the new source, from the packet if it shows them.
    pub(super) fn observe(
        &self,
        sent: &Sent,
        got: &Got,
        packet: &Packet,
        chosen: Chosen<'_>,
    ) -> Result<(SocketAddr, SocketAddr)> {
        let ports = || {
            Some((
                half(&got.frame, packet.ip.l4)?,
                half(&got.frame, packet.ip.l4 + 2)?,
            ))
        };
        let header = ip(&got.frame, packet.ip.at, packet.ip.family).ok();
        let expected = if matches!(sent.at, At::Ingress(_) | At::Egress(_)) {
            testbed::test_run::Verdict::Pass
        } else {
            testbed::test_run::Verdict::Redirect
        };
        match (header, ports()) {
            (Some(ip), Some((sport, dport)))
                if got.verdict == expected && got.frame != sent.frame =>
            {
                Ok((
                    SocketAddr::new(ip.dst, dport),
                    SocketAddr::new(ip.src, sport),
                ))
            }
            _ => {
                let table = match sent.at {
                    At::Ingress(_) => Table::Arriving,
                    At::Egress(_) => Table::Leaving,
                    At::Anchor | At::Lo => Table::Starting,
                };
                let (src, dst) = packet.peers();
                let chosen = chosen(table, packet.proto, src, dst);
                chosen.with_context(|| format!("it should open a flow, but: {:?}", got.verdict))
            }
        }
    }

    /// Checks and sets the port of a flow. The client keeps its port if permitted and if no other
    /// flow has the tuple; otherwise the port is a free port of kpx's range.
    pub(super) fn take_port(
        &self,
        flow: &mut Flow,
        seen: IpAddr,
        port: u16,
        may_keep: bool,
    ) -> Result<()> {
        let with = |port| Flow {
            source: SocketAddr::new(seen, port),
            ..flow.clone()
        };
        let is_free = |flow: &Flow| {
            flow.legs()
                .iter()
                .all(|(tuple, _)| !self.index.contains_key(tuple))
        };
        let own = flow.client.port();
        if may_keep && is_free(&with(own)) {
            ensure!(
                port == own,
                "the source port is {port} and could be the client's own, {own}"
            );
        } else if flow.by_host || flow.client.ip() == seen && !flow.is_foreign_nat {
            ensure!(
                port >= SOURCE_PORT_FIRST,
                "the source port is {port}, which is not ours to give"
            );
        } else {
            ensure!(
                CLIENT_PORTS.contains(&port),
                "a masqueraded client got port {port}"
            );
        }
        *flow = with(port);
        ensure!(is_free(flow), "another flow has a tuple of {flow:?}");
        Ok(())
    }

    pub(super) fn insert(&mut self, flow: Flow) -> u64 {
        let id = self.next;
        self.next += 1;
        *self.counts.events.entry(Event::FlowOpened).or_default() += 1;
        if let Some(service) = flow.service {
            self.counts
                .services
                .entry((service, flow.proto))
                .or_default()
                .opened += 1;
        }
        self.index.extend(
            flow.legs()
                .into_iter()
                .map(|(tuple, leg)| (tuple, (id, leg))),
        );
        self.flows.insert(id, flow);
        id
    }
}
