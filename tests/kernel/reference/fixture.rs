//! The node under test, which receives the first packets of flows.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, ensure};
use aya::Pod;
use aya::maps::{HashMap, MapData};
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto as Number, SockAddr};
use proxy_common::balance::{Affinity, AffinityKey};
use proxy_common::counter::{Event, Reason};
use proxy_common::flow::{Flow, FlowKey, Hook as Table};
use proxy_common::frontend::FrontendKey;
use proxy_common::names::{ANCHOR, INGRESS, IPV4, IPV6, LO};
use proxy_datapath::Options;
use testbed::test_run::{Outcome, Verdict};

use testbed::reference::cluster::{Cluster, Hook, Packet, Proto};
use testbed::reference::frame;
use testbed::reference::node::Node;
use testbed::reference::place::{Device, Family};

pub(crate) struct Fixture {
    node: Node,
    flows4: HashMap<MapData, FlowKey<Addr4>, Flow<Addr4>>,
    flows6: HashMap<MapData, FlowKey<Addr6>, Flow<Addr6>>,
    counts: Counts,
}

/// The kernel's treatment of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Observed {
    Pass(Reason),
    Reject(Reason),
    Drop(Reason),
    Forward(Forwarded),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Forwarded {
    pub(crate) backend: SocketAddr,
    /// The source that the backend sees.
    pub(crate) source: SocketAddr,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Counts {
    events: Vec<(Event, u64)>,
    reasons: Vec<(Reason, u64)>,
}

impl Fixture {
    /// Makes a node on a thread that stays in its namespace. `node` is the agent's node name.
    pub(crate) fn new(node: &str) -> Result<Self> {
        let node = Node::new(node, Options::default())?;
        let flows4 = node.bench.map(IPV4.flows)?;
        let flows6 = node.bench.map(IPV6.flows)?;
        let mut fixture = Self {
            node,
            flows4,
            flows6,
            counts: Counts::default(),
        };
        fixture.counts = fixture.read_counts()?;
        Ok(fixture)
    }

    /// Makes the objects and the node equal `cluster`.
    pub(crate) fn enter(&mut self, cluster: &Cluster) -> Result<()> {
        self.node.enter(cluster)
    }

    /// Returns the objects that the agent leaves out, with reasons.
    pub(crate) fn skipped(&self) -> Vec<String> {
        self.node.skipped()
    }

    /// Sends the packet, and removes the flow that it opened.
    pub(crate) fn send(&mut self, packet: &Packet) -> Result<Observed> {
        let observed = self.send_and_keep(packet);
        if let Ok(Observed::Forward(_)) | Err(_) = observed {
            let forgotten = self.forget(packet);
            return observed.and_then(|observed| forgotten.map(|()| observed));
        }
        observed
    }

    /// Sends the packet.
    pub(crate) fn send_and_keep(&mut self, packet: &Packet) -> Result<Observed> {
        let (program, device) = match packet.hook {
            Hook::Ingress(device) => (INGRESS, device),
            Hook::Anchor => (ANCHOR, Device::Anchor),
            Hook::Lo => (LO, Device::Lo),
        };
        let sent = frame::of(packet)?;
        let bench = &self.node.bench;
        let ifindex = self.node.ifindexes[&device];
        let outcome = match packet.hook {
            Hook::Ingress(_) => bench.run_on(program, &sent, ifindex)?,
            Hook::Anchor | Hook::Lo => bench.run_own_on(program, &sent, ifindex)?,
        };
        let counts = self.read_counts()?;
        let before = std::mem::replace(&mut self.counts, counts);
        let (mut events, reasons) = self.counts.since(&before)?;
        // On a slow machine, a SYN comes again after the backend's answer timeout.
        events.retain(|event| {
            !matches!(
                event,
                Event::FlowOpened | Event::FlowMoved | Event::BackendFailed
            )
        });
        match (outcome.verdict, reasons.as_slice(), events.as_slice()) {
            (Verdict::Pass, [reason], []) => {
                ensure!(outcome.packet == sent, "passed for {reason:?}, but changed");
                Ok(Observed::Pass(*reason))
            }
            (Verdict::Drop, [reason], []) => Ok(Observed::Drop(*reason)),
            (Verdict::Redirect, [reason], [Event::Rejected]) => {
                ensure!(
                    frame::is_refusal_of(packet, &outcome.packet)?,
                    "rejected for {reason:?}, but how?"
                );
                Ok(Observed::Reject(*reason))
            }
            (_, [], [Event::Forwarded]) => self.forwarded(packet, &outcome),
            (verdict, reasons, events) => {
                anyhow::bail!("{verdict:?} with {reasons:?} and {events:?} counted")
            }
        }
    }

    /// Returns the observation of a packet on its way to a backend, with its flow.
    fn forwarded(&self, packet: &Packet, outcome: &Outcome) -> Result<Observed> {
        let forwarded = match packet.family() {
            Family::V4 => remembered(&self.flows4, packet)?,
            Family::V6 => remembered(&self.flows6, packet)?,
        };
        // The ingress hook leaves the source address to the egress hook of the output device.
        let (source, verdict) = match packet.hook {
            Hook::Ingress(_) => (
                SocketAddr::new(packet.src.ip(), forwarded.source.port()),
                Verdict::Pass,
            ),
            Hook::Anchor | Hook::Lo => (forwarded.source, Verdict::Redirect),
        };
        let peers = frame::peers(&outcome.packet)?;
        ensure!(
            peers == (source, forwarded.backend),
            "the packet became {peers:?}, the flow is {forwarded:?}"
        );
        ensure!(outcome.verdict == verdict, "{:?}", outcome.verdict);
        Ok(Observed::Forward(forwarded))
    }

    /// Closes the flow of `packet`; all of its entries must exist.
    pub(crate) fn forget(&mut self, packet: &Packet) -> Result<()> {
        match packet.family() {
            Family::V4 => forget(&mut self.flows4, packet),
            Family::V6 => forget(&mut self.flows6, packet),
        }
    }

    /// Ages a client's affinity to the service port of this ClusterIP.
    pub(crate) fn age_affinity(
        &self,
        packet: &Packet,
        service: SocketAddr,
        secs: u32,
    ) -> Result<()> {
        match packet.family() {
            Family::V4 => {
                self.age_in::<Addr4>([IPV4.affinity, IPV4.new_affinity], packet, service, secs)
            }
            Family::V6 => {
                self.age_in::<Addr6>([IPV6.affinity, IPV6.new_affinity], packet, service, secs)
            }
        }
    }

    /// Ages the client's row in whichever table has it: unproven clients have their own table.
    fn age_in<A: Addr>(
        &self,
        names: [&str; 2],
        packet: &Packet,
        service: SocketAddr,
        secs: u32,
    ) -> Result<()>
    where
        AffinityKey<A>: Pod,
        Affinity<A>: Pod,
    {
        let tables = names.map(|name| age::<A>(self.node.bench.map(name)?, packet, service, secs));
        ensure!(
            tables.iter().any(Result::is_ok),
            "the client has no affinity: {tables:?}"
        );
        Ok(())
    }

    fn read_counts(&self) -> Result<Counts> {
        let counters = &self.node.bench.datapath.counters;
        Ok(Counts {
            events: counters.events()?,
            reasons: counters.reasons()?,
        })
    }
}

impl Counts {
    /// Returns the events and reasons counted since `before`, each once.
    fn since(&self, before: &Self) -> Result<(Vec<Event>, Vec<Reason>)> {
        Ok((
            grown(&before.events, &self.events)?,
            grown(&before.reasons, &self.reasons)?,
        ))
    }
}

fn grown<T: Copy + std::fmt::Debug>(before: &[(T, u64)], now: &[(T, u64)]) -> Result<Vec<T>> {
    let mut grown = Vec::new();
    for ((what, now), (_, before)) in now.iter().zip(before) {
        ensure!(
            now - before <= 1,
            "{what:?} was counted {} times",
            now - before
        );
        grown.extend((now > before).then_some(*what));
    }
    Ok(grown)
}

fn addr<A: Addr>(ip: IpAddr) -> Result<A> {
    A::from_ip(ip).context("an address of the family")
}

fn opener_key<A: Addr>(packet: &Packet) -> Result<FlowKey<A>> {
    let peer = |peer: SocketAddr| -> Result<SockAddr<A>> {
        Ok(SockAddr::new(addr(peer.ip())?, Port::new(peer.port())))
    };
    let table = match packet.hook {
        Hook::Ingress(_) => Table::INGRESS,
        Hook::Anchor | Hook::Lo => Table::ANCHOR,
    };
    Ok(FlowKey::new(
        table,
        number(packet.proto),
        peer(packet.src)?,
        peer(packet.dst)?,
    ))
}

fn number(proto: Proto) -> Number {
    match proto {
        Proto::Tcp => Number::TCP,
        Proto::Udp => Number::UDP,
        Proto::Sctp => Number::SCTP,
    }
}

fn remembered<A: Addr>(
    flows: &HashMap<MapData, FlowKey<A>, Flow<A>>,
    packet: &Packet,
) -> Result<Forwarded>
where
    FlowKey<A>: Pod,
    Flow<A>: Pod,
{
    let flow = flows
        .get(&opener_key(packet)?, 0)
        .context("the flow that was opened")?;
    let plain = |at: SockAddr<A>| SocketAddr::new(at.addr.ip(), at.port.get());
    ensure!(
        (plain(flow.client), plain(flow.frontend)) == (packet.src, packet.dst),
        "{flow:?}"
    );
    Ok(Forwarded {
        backend: plain(flow.backend),
        source: plain(flow.source),
    })
}

fn forget<A: Addr>(flows: &mut HashMap<MapData, FlowKey<A>, Flow<A>>, packet: &Packet) -> Result<()>
where
    FlowKey<A>: Pod,
    Flow<A>: Pod,
{
    let flow = flows
        .get(&opener_key(packet)?, 0)
        .context("the flow to forget")?;
    for kind in flow.kinds() {
        flows
            .remove(&flow.key_as(*kind, number(packet.proto)))
            .with_context(|| format!("{kind:?} of {flow:?}"))?;
    }
    Ok(())
}

fn age<A: Addr>(
    mut affinities: HashMap<MapData, AffinityKey<A>, Affinity<A>>,
    packet: &Packet,
    service: SocketAddr,
    secs: u32,
) -> Result<()>
where
    AffinityKey<A>: Pod,
    Affinity<A>: Pod,
{
    let service = FrontendKey::new(
        addr(service.ip())?,
        Port::new(service.port()),
        number(packet.proto),
    );
    let key = AffinityKey::new(service, addr(packet.src.ip())?);
    let affinity = affinities.get(&key, 0).context("the client's affinity")?;
    let last_secs = affinity
        .last_secs
        .checked_sub(secs)
        .context("this machine has only just been started")?;
    Ok(affinities.insert(
        key,
        Affinity {
            last_secs,
            ..affinity
        },
        0,
    )?)
}
