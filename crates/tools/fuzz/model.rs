//! The outcome of a packet at a hook of the node: its verdict, its bytes, its mark, and the
//! counters. Plain and
//! slow where the programs are clever, and written from the RFCs and the rules in
//! docs/design-notes/packet-path.md. The choice of a backend is the reference model's business.
//!
//! The programs choose backends and ports at random, so a choice is read off their packet and then
//! judged; all else is known beforehand.

mod error;
mod flow;
mod follow;
mod foreign_nat;
mod hooks;
mod liberal;
mod open;
mod past;
mod refusal;
pub(crate) mod rewrite;
mod shares;
mod silent;
pub(crate) mod wire;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;

use anyhow::{Result, ensure};
use proxy_common::counter::{Event, Reason};
use proxy_common::device::{INJECTED_MARK, INJECTED_MASK};
use proxy_common::foreign_nat::ForeignNat;
use proxy_common::service_counts::ServiceCounts;
use testbed::reference::cluster::Cluster;
use testbed::reference::facts;
use testbed::reference::model::{Answer, Entry};
use testbed::reference::place::Device;
use testbed::test_run::Verdict;

pub(crate) use self::flow::{Flow, Leg, Table, Tuple};
pub(crate) use self::open::is_spoofed;
use self::wire::{Ip, Transport};
use crate::fast::Fast;
use crate::liberal::Opener;

/// The hooks' bits of a mark: rewritten, on its way to a backend, and with the source with which it
/// has to leave.
pub(crate) const TRANSLATED: u32 = 1 << 15;
pub(crate) const FORWARD: u32 = 1 << 14;
pub(crate) const KEEPS_SOURCE: u32 = 1 << 13;
pub(crate) const DONE: u32 = TRANSLATED | FORWARD | KEEPS_SOURCE;
/// The source is right unless netfilter changes it, and the packet is one that shows its port.
pub(crate) const PORT_SHOWS: u32 = TRANSLATED | KEEPS_SOURCE;
/// The bits beside them, which only a class of another program sets.
pub(crate) const CLASS: u32 = KEEPS_SOURCE - 1;

/// Is a packet with this note on its way to a backend?
pub(crate) fn goes_to_backend(note: u32) -> bool {
    note & FORWARD != 0 || note == PORT_SHOWS
}

/// A bit of a mark that carries notes of hooks: the host has made the packet.
pub(crate) const MADE_HERE: u32 = 1;

pub(crate) fn made_here(came_in: bool) -> u32 {
    if came_in { 0 } else { MADE_HERE }
}

/// A packet that meets a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sent {
    pub(crate) at: At,
    /// Not the host's own.
    pub(crate) came_in: bool,
    /// The device by which a packet that leaves has come in, if the kernel still says so.
    pub(crate) by: Option<Device>,
    pub(crate) mark: u32,
    /// The number of its packets on the wire, if the kernel knows.
    pub(crate) segments: u32,
    pub(crate) frame: Vec<u8>,
}

impl Sent {
    /// Returns what hooks have noted before. None if a class of another program may have taken its
    /// place, where it looks as no hook leaves it. What the host has cut again from fragments has
    /// forgotten where it came in.
    fn note(&self, is_fragment: bool) -> Option<u32> {
        let may_be_class = match self.at {
            At::Ingress(device) => device.is_filtered(),
            At::Egress(_) if self.came_in => self.by.is_some_and(Device::is_filtered),
            At::Egress(_) => is_fragment,
            At::Anchor | At::Lo => false,
        };
        let note = self.mark & DONE;
        let is_ours = [TRANSLATED, TRANSLATED | FORWARD, DONE, PORT_SHOWS].contains(&note)
            && !self.has_class();
        (is_ours || !may_be_class).then_some(note)
    }

    fn has_class(&self) -> bool {
        self.mark & CLASS & !MADE_HERE != 0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum At {
    Ingress(Device),
    Egress(Device),
    Anchor,
    Lo,
}

/// The outcome of a program for a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Got {
    pub(crate) verdict: Verdict,
    pub(crate) mark: u32,
    pub(crate) frame: Vec<u8>,
}

/// The counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) events: BTreeMap<Event, u64>,
    pub(crate) reasons: BTreeMap<Reason, u64>,
    /// By ClusterIP, port and protocol.
    pub(crate) services: BTreeMap<(SocketAddr, u8), ServiceCounts>,
}

/// A packet as far as it can be read.
struct Packet {
    ip: Ip,
    ports: (u16, u16),
    proto: u8,
    /// The transport of all but later fragments.
    transport: Option<Transport>,
}

impl Packet {
    /// Asks its transport; a later fragment has none.
    fn says(&self, what: fn(&Transport) -> bool) -> bool {
        self.transport.as_ref().is_some_and(what)
    }

    fn peers(&self) -> (SocketAddr, SocketAddr) {
        (
            SocketAddr::new(self.ip.src, self.ports.0),
            SocketAddr::new(self.ip.dst, self.ports.1),
        )
    }
}

/// Which fragments belong together, at which table.
type FragmentKey = (Table, u32, u8, IpAddr, IpAddr);

pub(crate) struct Model {
    cluster: Cluster,
    pub(crate) fast: Fast,
    /// The flows that the agent has said yes to; some are gone.
    pub(crate) answered: BTreeSet<Opener>,
    pub(crate) flows: BTreeMap<u64, Flow>,
    /// The entries of each family's flow table.
    room: usize,
    /// How often each of these has happened to an opener near a used-up share.
    pub(crate) shares: BTreeMap<&'static str, u64>,
    next: u64,
    /// The second of the last packet.
    now_secs: u32,
    index: HashMap<Tuple, (u64, Leg)>,
    fragments: HashMap<FragmentKey, (u16, u16, u8)>,
    /// Which backend a client had of a service port; none if that is unknown.
    affinities: BTreeMap<(Entry, IpAddr), Option<SocketAddr>>,
    /// By protocol, and the tuple of the replies.
    foreign_nat: BTreeMap<(u8, SocketAddr, SocketAddr), ForeignNat>,
    /// The silent backend that the flow of the packet at hand has left.
    left: Option<SocketAddr>,
    /// The packet's flow has ended because another connection has its port.
    port_taken: bool,
    answers: HashMap<open::Question, Rc<(Answer, Option<SocketAddr>)>>,
    pub(crate) counts: Counts,
}

impl Model {
    pub(crate) fn new(cluster: Cluster, fast: Fast, room: u32) -> Self {
        Self {
            cluster,
            fast,
            answered: BTreeSet::new(),
            flows: BTreeMap::new(),
            room: room as usize,
            shares: BTreeMap::new(),
            next: 0,
            now_secs: 0,
            index: HashMap::new(),
            fragments: HashMap::new(),
            affinities: BTreeMap::new(),
            foreign_nat: BTreeMap::new(),
            left: None,
            port_taken: false,
            answers: HashMap::new(),
            counts: Counts::default(),
        }
    }

    pub(crate) fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Has it ended, or will it in a moment by its silence?
    pub(crate) fn is_over(&self, flow: &Flow) -> bool {
        const MOMENT: u32 = 2;
        flow.is_over(self.now_secs + MOMENT)
    }

    /// Returns the number of flows that were ever opened.
    pub(crate) fn opened(&self) -> u64 {
        self.next
    }

    /// Endpoints have come or gone.
    pub(crate) fn set_world(&mut self, cluster: Cluster) {
        self.cluster = cluster;
        self.answers.clear();
    }

    /// Ages all flows as if no packet had come for so long.
    pub(crate) fn age(&mut self, secs: u32) {
        for flow in self.flows.values_mut() {
            flow.last_secs = flow.last_secs.saturating_sub(secs);
            flow.backend_secs = flow.backend_secs.saturating_sub(secs);
            flow.aged += secs;
        }
        self.foreign_nat.values_mut().for_each(|foreign_nat| {
            foreign_nat.until_secs = foreign_nat.until_secs.saturating_sub(secs)
        });
    }

    /// Says how what a program made of a packet differs from what it must make of it. `chosen`
    /// looks a choice up that the packet does not show.
    pub(crate) fn judge(
        &mut self,
        sent: &Sent,
        got: &Got,
        now_secs: u32,
        chosen: open::Chosen<'_>,
    ) -> Result<()> {
        (self.now_secs, self.left, self.port_taken) = (now_secs, None, false);
        let mut want = self.want(sent, got, now_secs, chosen)?;
        // The host's further packets of a second go by the link that their flow has kept, the
        // others by the kernel's neighbour.
        if sent.at == At::Anchor && want.verdict == Verdict::Redirect {
            past::take_link_to_pod(&got.frame, &mut want.frame);
        }
        ensure!(
            got.verdict == want.verdict,
            "the verdict is {:?} and should be {:?}",
            got.verdict,
            want.verdict
        );
        if want.verdict == Verdict::Drop {
            return Ok(());
        }
        ensure!(
            got.mark == want.mark,
            "the mark is {:#x} and should be {:#x}",
            got.mark,
            want.mark
        );
        ensure!(
            got.frame == want.frame,
            "it became\n{}\nand should be\n{}",
            hex(&got.frame),
            hex(&want.frame)
        );
        Ok(())
    }

    fn want(
        &mut self,
        sent: &Sent,
        got: &Got,
        now_secs: u32,
        chosen: open::Chosen<'_>,
    ) -> Result<Got> {
        // Where no hook of the node's came before, a note is a stranger's, and so is a pod's class.
        let strange = match sent.at {
            At::Ingress(Device::Pod) => DONE | CLASS,
            At::Ingress(device) if device.is_edge() => DONE,
            _ => 0,
        };
        let sent = &Sent {
            mark: sent.mark & !strange,
            ..sent.clone()
        };
        let Some(family) = wire::family(&sent.frame) else {
            return Ok(self.not_ip(sent));
        };
        let translated = match sent.at {
            At::Ingress(_) => self.arriving(sent, got, family, now_secs, chosen)?,
            At::Egress(_) => self.leaving(sent, got, family, now_secs, chosen)?,
            At::Anchor => self.starting(sent, got, family, now_secs, chosen)?,
            At::Lo => self.inside(sent, got, family, now_secs, chosen)?,
        };
        let translated = match translated {
            // A packet of another transport may still be an error about one of our transports'
            // packets.
            Err(Reason::Protocol) => self.error(sent, got, family),
            translated => translated,
        };
        Ok(translated.unwrap_or_else(|reason| self.refuse(sent, reason)))
    }

    fn not_ip(&mut self, sent: &Sent) -> Got {
        self.count(Reason::NotIp);
        let verdict = if sent.at == At::Anchor {
            Verdict::Drop
        } else {
            Verdict::Pass
        };
        Got {
            verdict,
            mark: sent.mark,
            frame: sent.frame.clone(),
        }
    }

    /// Passes a packet that is not translated, drops it, or tells its sender.
    fn refuse(&mut self, sent: &Sent, reason: Reason) -> Got {
        self.count(reason);
        let verdict = match reason {
            Reason::NoEndpoints | Reason::UnknownPort => Verdict::Redirect,
            // Nothing may pass the anchor, since only what is for services is routed there.
            Reason::NotOurs | Reason::NoFlow | Reason::NoRoute if sent.at == At::Anchor => {
                Verdict::Redirect
            }
            _ if sent.at == At::Anchor => Verdict::Drop,
            Reason::SeenBefore
            | Reason::Malformed
            | Reason::Fragment
            | Reason::Protocol
            | Reason::NotUnicast
            | Reason::NotOurs
            | Reason::NoFlow => Verdict::Pass,
            _ => Verdict::Drop,
        };
        let pass = Got {
            verdict,
            mark: unnoted(sent),
            frame: sent.frame.clone(),
        };
        if verdict != Verdict::Redirect {
            return pass;
        }
        // Frames for others are not answered.
        let is_for_us = !matches!(sent.at, At::Ingress(_)) || sent.frame[..6] == facts::NODE_MAC;
        if !is_for_us {
            *self.counts.events.entry(Event::Unanswered).or_default() += 1;
            return Got {
                verdict: Verdict::Drop,
                ..pass
            };
        }
        let Some(frame) = refusal::answer(&sent.frame) else {
            return Got {
                verdict: Verdict::Drop,
                ..pass
            };
        };
        *self.counts.events.entry(Event::Rejected).or_default() += 1;
        let mark = if matches!(sent.at, At::Ingress(_)) {
            sent.mark
        } else {
            injected(sent)
        };
        Got {
            verdict,
            mark,
            frame,
        }
    }

    fn count(&mut self, reason: Reason) {
        *self.counts.reasons.entry(reason).or_default() += 1;
    }

    fn forward(&mut self, got: Got) -> Got {
        *self.counts.events.entry(Event::Forwarded).or_default() += 1;
        got
    }

    fn give(&mut self, got: Got) -> Got {
        *self.counts.events.entry(Event::Returned).or_default() += 1;
        got
    }
}

fn pass(mark: u32, frame: Vec<u8>) -> Got {
    Got {
        verdict: Verdict::Pass,
        mark,
        frame,
    }
}

/// The mark of a packet that leaves: the next host must not find notes on it.
fn unnoted(sent: &Sent) -> u32 {
    match sent.at {
        At::Egress(_) | At::Lo => sent.mark & !DONE,
        At::Ingress(_) | At::Anchor => sent.mark,
    }
}

/// Returns a mark with this note in place of any other.
fn noted(mark: u32, note: u32) -> u32 {
    mark & !DONE | note
}

/// Sends a packet of the host on its way to a backend, with this note.
fn leave(sent: &Sent, mut frame: Vec<u8>, backend: IpAddr, note: u32) -> Got {
    if testbed::reference::place::is_own(backend) {
        frame[..6].fill(0);
    }
    Got {
        verdict: Verdict::Redirect,
        mark: noted(unnoted(sent), note),
        frame,
    }
}

/// The mark by which the host knows a packet that was put into it, beside the bits of others.
fn injected(sent: &Sent) -> u32 {
    unnoted(sent) & !INJECTED_MASK | INJECTED_MARK
}

/// Lets the host receive a packet.
fn inject(sent: &Sent, mut frame: Vec<u8>, flow: &Flow) -> Got {
    let mac = if flow.on_lo {
        [0; 6]
    } else {
        testbed::reference::facts::MAC
    };
    frame[..6].copy_from_slice(&mac);
    Got {
        verdict: Verdict::Redirect,
        mark: injected(sent),
        frame,
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn unhex(text: &str) -> Result<Vec<u8>> {
    ensure!(
        text.len().is_multiple_of(2) && text.is_ascii(),
        "{text}: not bytes in hexadecimal"
    );
    (0..text.len())
        .step_by(2)
        .map(|at| Ok(u8::from_str_radix(&text[at..at + 2], 16)?))
        .collect()
}
