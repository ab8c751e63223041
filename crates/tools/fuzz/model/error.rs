//! ICMP errors about packets of flows (RFC 792, RFC 4443 §3): each end gets the error about the
//! packet as it sent it.

use std::net::{IpAddr, SocketAddr};

use proxy_common::counter::{Event, Reason};
use testbed::reference::place::{self, Family, is_own};
use testbed::test_run::Verdict;

use super::flow::{Flow, Leg, Table};
use super::past::{Skipped, is_usual};
use super::rewrite::{self, addr_changes, update};
use super::wire::{self, Ip, Part, SCTP, TCP, UDP, byte, half};
use super::{
    At, FORWARD, Got, Model, Sent, TRANSLATED, goes_to_backend, inject, is_spoofed, leave, noted,
    pass, unnoted,
};

struct Quoting {
    ip: Ip,
    quote: Ip,
    src: SocketAddr,
    dst: SocketAddr,
    /// The error is of type "destination unreachable".
    is_unreachable: bool,
}

impl Model {
    pub(super) fn error(&mut self, sent: &Sent, got: &Got, family: Family) -> Result<Got, Reason> {
        let error = read(&sent.frame, family)?;
        if matches!(sent.at, At::Ingress(_))
            && sent.note(true).is_some_and(|note| note & TRANSLATED != 0)
        {
            return Err(Reason::SeenBefore);
        }
        if let Some(skipped) = self.error_past_stack(sent, got, &error) {
            return Ok(skipped);
        }
        let tables: &[Table] = match sent.at {
            At::Ingress(_) => &[Table::Arriving],
            At::Egress(_) => &[Table::Leaving],
            At::Anchor => &[Table::Starting],
            At::Lo => &[Table::Leaving, Table::Starting],
        };
        // The quoted packet travelled in the opposite direction.
        let found = tables.iter().find_map(|table| {
            let (id, leg) = *self
                .index
                .get(&(*table, error.quote.proto, error.dst, error.src))?;
            let flow = self.flows[&id].clone();
            (*table != Table::Leaving || belongs(sent, &flow, leg)).then_some((*table, leg, flow))
        });
        let (table, leg, flow) = found.ok_or(Reason::Protocol)?;
        let frame = |src, dst, quoted_src, quoted_dst| {
            let mut frame = sent.frame.clone();
            error.rewrite(&mut frame, src, dst, quoted_src, quoted_dst);
            frame
        };
        let src = error.ip.src;
        let dst = error.ip.dst;
        Ok(match (table, leg) {
            (Table::Arriving, Leg::ToBackend) => {
                let frame = frame(src, flow.backend.ip(), flow.backend, flow.between());
                self.forward(pass(noted(sent.mark, TRANSLATED | FORWARD), frame))
            }
            (Table::Arriving, Leg::FromNode) => pass(
                noted(sent.mark, TRANSLATED),
                frame(src, flow.client.ip(), flow.between(), error.dst),
            ),
            (Table::Arriving, _) => {
                self.note_unreachable(sent, &error, &flow);
                let frame = frame(src, flow.client.ip(), flow.client, flow.frontend);
                self.give(pass(noted(sent.mark, TRANSLATED), frame))
            }
            (Table::Leaving, Leg::AsNode) => {
                // This includes a router's error: the backend does not see hosts beyond the node.
                pass(
                    unnoted(sent),
                    frame(flow.source.ip(), dst, error.src, flow.source),
                )
            }
            (Table::Leaving, _) => {
                self.note_unreachable(sent, &error, &flow);
                let frame = frame(error.src_to_client(&flow), dst, flow.client, flow.frontend);
                self.give(if flow.by_host {
                    inject(sent, frame, &flow)
                } else {
                    pass(unnoted(sent), frame)
                })
            }
            (Table::Starting, _) => {
                let src = if error.ip.src == flow.client.ip() {
                    flow.source.ip()
                } else {
                    error.ip.src
                };
                let frame = frame(src, flow.backend.ip(), flow.backend, flow.source);
                self.forward(leave(sent, frame, flow.backend.ip(), TRANSLATED | FORWARD))
            }
        })
    }
}

impl Model {
    /// Returns the outcome of an error that has skipped the stack, which is allowed if its flow
    /// bypasses the stack.
    fn error_past_stack(&mut self, sent: &Sent, got: &Got, error: &Quoting) -> Option<Got> {
        if !matches!(sent.at, At::Ingress(_)) || got.verdict != Verdict::Redirect {
            return None;
        }
        let find = |table| {
            self.index
                .get(&(table, error.quote.proto, error.dst, error.src))
                .copied()
        };
        let (is_there, (id, leg)) = match find(Table::Arriving) {
            Some(found) => (true, found),
            None => (false, find(Table::Leaving)?),
        };
        let flow = self.flows[&id].clone();
        let is_of_bypass = flow.is_bypass
            && leg
                == if is_there {
                    Leg::ToBackend
                } else {
                    Leg::ToClient
                };
        let next = if is_there { flow.backend } else { flow.client };
        let exit = place::route(next.ip())?;
        let src = SocketAddr::new(error.ip.src, 0);
        let dst = SocketAddr::new(error.ip.dst, 0);
        let may_skip = is_of_bypass
            && self.may_open(sent, &flow, next.ip())
            && is_usual(sent, &error.ip)
            && !is_spoofed(sent.at, error.ip.proto, src, dst);
        if !may_skip {
            return None;
        }
        let mut frame = sent.frame.clone();
        if is_there {
            error.rewrite(
                &mut frame,
                error.ip.src,
                next.ip(),
                flow.backend,
                flow.between(),
            );
        } else {
            self.note_unreachable(sent, error, &flow);
            let src = error.src_to_client(&flow);
            error.rewrite(&mut frame, src, error.ip.dst, flow.client, flow.frontend);
        }
        let leg = if is_there {
            Leg::ToBackend
        } else {
            Leg::ToClient
        };
        Some(self.go(
            leg,
            Skipped::of(sent, frame, error.ip.family, exit.leads_to_pods()),
        ))
    }
}

impl Model {
    /// Counts an error as the backend's first answer. It counts only from the direction of the
    /// route to the backend, or from the host.
    fn note_unreachable(&mut self, sent: &Sent, error: &Quoting, flow: &Flow) {
        let came_in_by = match sent.at {
            At::Ingress(device) => Some(device),
            At::Egress(_) | At::Anchor | At::Lo => sent.by,
        };
        let backend = flow.backend.ip();
        let is_placed = came_in_by
            .is_none_or(|device| !is_own(backend) && place::route(backend) == Some(device));
        let waits = flow.proto == TCP && !flow.backend_said.anything;
        if error.is_unreachable && waits && is_placed && flow.service.is_some() {
            *self.counts.events.entry(Event::BackendFailed).or_default() += 1;
        }
    }
}

/// Returns true if an error belongs to a flow. The rule is that of packets: errors of a masqueraded
/// flow are marked by a hook, or come from the host.
fn belongs(sent: &Sent, flow: &Flow, leg: Leg) -> bool {
    let note = sent.note(false);
    let is_marked = note.is_none_or(|note| note & TRANSLATED != 0) || !sent.came_in;
    match leg {
        Leg::AsNode => is_marked,
        Leg::ToBackend => false,
        _ if note.is_some_and(goes_to_backend) => false,
        _ => flow.by_host || !flow.changes_address() || is_marked,
    }
}

/// Reads an error whose quote includes the ports of a packet that the error's receiver sent.
fn read(frame: &[u8], family: Family) -> Result<Quoting, Reason> {
    let ip = wire::outer(frame, family)?;
    let (icmp, errors): (u8, &[u8]) = match family {
        // Destination unreachable, time exceeded, parameter problem.
        Family::V4 => (1, &[3, 11, 12]),
        // The same, and packet too big.
        Family::V6 => (58, &[1, 2, 3, 4]),
    };
    if ip.proto != icmp || ip.part != Part::Whole {
        return Err(Reason::Protocol);
    }
    let kind = byte(frame, ip.l4).ok_or(Reason::Malformed)?;
    if !errors.contains(&kind) {
        return Err(Reason::Protocol);
    }
    let quote = wire::ip(frame, ip.l4 + 8, family).map_err(|_| Reason::Protocol)?;
    let is_complete = quote.l4 + 8 <= ip.end && !matches!(quote.part, Part::Later { .. });
    if !is_complete || ![TCP, UDP, SCTP].contains(&quote.proto) || quote.src != ip.dst {
        return Err(Reason::Protocol);
    }
    let port = |at| half(frame, quote.l4 + at).ok_or(Reason::Protocol);
    let src = SocketAddr::new(quote.src, port(0)?);
    let dst = SocketAddr::new(quote.dst, port(2)?);
    let is_unreachable = match family {
        Family::V4 => kind == 3 && byte(frame, ip.l4 + 1) != Some(4),
        Family::V6 => kind == 1,
    };
    Ok(Quoting {
        ip,
        quote,
        src,
        dst,
        is_unreachable,
    })
}

impl Quoting {
    /// Returns the source of the error on its way to the client: the frontend in place of the
    /// backend, and of all routers if this node masquerades the client.
    fn src_to_client(&self, flow: &Flow) -> IpAddr {
        if flow.changes_address() && !flow.by_host || self.ip.src == flow.backend.ip() {
            flow.frontend.ip()
        } else {
            self.ip.src
        }
    }

    /// Sets the error's addresses and the quoted packet's peers. The quoted transport checksum
    /// stays unchanged.
    fn rewrite(
        &self,
        frame: &mut [u8],
        src: IpAddr,
        dst: IpAddr,
        quoted_src: SocketAddr,
        quoted_dst: SocketAddr,
    ) {
        let ports = [
            (self.src.port(), quoted_src.port()),
            (self.dst.port(), quoted_dst.port()),
        ];
        let mut changes: Vec<_> = ports.into_iter().filter(|(from, to)| from != to).collect();
        if self.ip.family == Family::V6 {
            // An IPv4 header's checksum balances its addresses, and ICMPv4 has no pseudo header.
            let addrs = [
                (self.src.ip(), quoted_src.ip()),
                (self.dst.ip(), quoted_dst.ip()),
            ];
            let outer = [(self.ip.src, src), (self.ip.dst, dst)];
            changes.extend(
                addrs
                    .into_iter()
                    .chain(outer)
                    .flat_map(|(from, to)| addr_changes(from, to)),
            );
        }
        update(frame, self.ip.l4 + 2, &changes, false);
        frame[self.quote.l4..self.quote.l4 + 2].copy_from_slice(&quoted_src.port().to_be_bytes());
        frame[self.quote.l4 + 2..self.quote.l4 + 4]
            .copy_from_slice(&quoted_dst.port().to_be_bytes());
        rewrite::set_addrs(frame, &self.quote, quoted_src.ip(), quoted_dst.ip());
        rewrite::set_addrs(frame, &self.ip, src, dst);
    }
}
