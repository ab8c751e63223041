//! What passed for each service port, and how many flows each backend has: the flows' own counters, and what those that
//! are over had counted.

use std::collections::BTreeMap;
use std::os::fd::AsFd;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{HashMap, Map, MapData};
use proxy_common::addr::{Addr, Addr4, Addr6, SockAddr};
use proxy_common::flow::{Flow, Kind};
use proxy_common::frontend::{FrontendKey, Service};
use proxy_common::service_counts::{Passed, ServiceCounts};

use super::flows::{read, remove};
use super::{Names, take};

/// Of both families.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    pub v4: FamilyCounts<Addr4>,
    pub v6: FamilyCounts<Addr6>,
}

#[derive(Clone, Debug)]
pub struct FamilyCounts<A: Addr> {
    /// Since the programs were loaded. None of a number here ever goes back.
    pub ports: BTreeMap<FrontendKey<A>, Totals>,
    /// Flows that have not ended, of a service port to each backend.
    pub flows: BTreeMap<FrontendKey<A>, BTreeMap<SockAddr<A>, u64>>,
}

impl<A: Addr> Default for FamilyCounts<A> {
    fn default() -> Self {
        Self { ports: BTreeMap::new(), flows: BTreeMap::new() }
    }
}

impl<A: Addr> FamilyCounts<A> {
    /// Adds what an entry has counted.
    pub(super) fn add(&mut self, flow: &Flow<A>) {
        if flow.service.addr.is_unspecified() {
            return;
        }
        match flow.kind {
            Kind::DNAT => {
                self.ports.entry(flow.service).or_default().sent += flow.passed;
                if !flow.state().is_terminal() {
                    *self.flows.entry(flow.service).or_default().entry(flow.backend).or_default() += 1;
                }
            }
            Kind::UNDNAT => self.ports.entry(flow.service).or_default().returned += flow.passed,
            _ => {}
        }
    }
}

/// What passed for a service port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Flows.
    pub opened: u64,
    /// Packets that would have opened a flow.
    pub dropped: u64,
    pub rejected: u64,
    /// Towards backends, and back to clients.
    pub sent: Passed,
    pub returned: Passed,
}

impl Totals {
    fn at_least(&mut self, other: &Self) {
        let passed = |to: &mut Passed, other: Passed| {
            to.packets = to.packets.max(other.packets);
            to.bytes = to.bytes.max(other.bytes);
        };
        self.opened = self.opened.max(other.opened);
        self.dropped = self.dropped.max(other.dropped);
        self.rejected = self.rejected.max(other.rejected);
        passed(&mut self.sent, other.sent);
        passed(&mut self.returned, other.returned);
    }
}

impl From<ServiceCounts> for Totals {
    fn from(counts: ServiceCounts) -> Self {
        let ServiceCounts { opened, dropped, rejected, sent, returned } = counts;
        Self { opened, dropped, rejected, sent, returned }
    }
}

/// What a family's service ports have counted beside their flows.
pub(super) struct Ledger<A: Names> {
    /// What the programs count.
    counts: HashMap<MapData, FrontendKey<A>, ServiceCounts>,
    /// Another handle, to know which service ports there are.
    services: HashMap<MapData, FrontendKey<A>, Service>,
    /// Of flows that were swept: sent, and returned.
    swept: BTreeMap<FrontendKey<A>, (Passed, Passed)>,
    /// What was read last. A flow that a program closes meanwhile is not met at all.
    last: BTreeMap<FrontendKey<A>, Totals>,
}

impl<A: Names> Ledger<A> {
    /// Before anybody has taken `SERVICES` out of `ebpf`.
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self> {
        let services =
            ebpf.map(A::MAPS.services).with_context(|| format!("no map {} in the BPF object", A::MAPS.services))?;
        let Map::HashMap(data) = services else { anyhow::bail!("{} is no hash map", A::MAPS.services) };
        let fd = data.fd().as_fd().try_clone_to_owned().with_context(|| format!("map {}", A::MAPS.services))?;
        let services = HashMap::try_from(Map::HashMap(MapData::from_fd(fd)?))?;
        let counts = take(ebpf, A::MAPS.service_counts)?;
        Ok(Self { counts, services, swept: BTreeMap::new(), last: BTreeMap::new() })
    }

    /// Keeps what a flow had counted whose opener's entry was removed.
    pub(super) fn close(&mut self, service: FrontendKey<A>, sent: Passed, returned: Passed) {
        if !service.addr.is_unspecified() {
            let (to_sent, to_returned) = self.swept.entry(service).or_default();
            *to_sent += sent;
            *to_returned += returned;
        }
    }

    /// What is counted beside the flows that are there: before they are added, so that one that a program closes meanwhile
    /// is not counted twice.
    pub(super) fn begin(&self) -> Result<FamilyCounts<A>> {
        let mut found = FamilyCounts::default();
        for row in &self.counts {
            let (service, counts) = row.with_context(|| format!("read {}", A::MAPS.service_counts))?;
            found.ports.insert(service, counts.into());
        }
        for (service, (sent, returned)) in &self.swept {
            let totals = found.ports.entry(*service).or_default();
            totals.sent += *sent;
            totals.returned += *returned;
        }
        Ok(found)
    }

    /// No number goes back: what is exact is a table at rest.
    pub(super) fn end(&mut self, found: &mut FamilyCounts<A>) {
        for (service, totals) in &mut found.ports {
            if let Some(last) = self.last.get(service) {
                totals.at_least(last);
            }
        }
        self.last.clone_from(&found.ports);
    }

    /// Adds what swept flows had counted to what the programs count, which outlives the agent. What a program adds in the
    /// same instant is missing, as where two of them meet. Where there is no room it stays here.
    pub(super) fn settle(&mut self) -> Result<()> {
        for (service, (sent, returned)) in std::mem::take(&mut self.swept) {
            let mut counts = read(&self.counts, &service)?.unwrap_or(ServiceCounts::NOTHING);
            counts.sent += sent;
            counts.returned += returned;
            if self.counts.insert(service, counts, 0).is_err() {
                self.swept.insert(service, (sent, returned));
            }
        }
        Ok(())
    }

    /// Forgets the service ports that are gone with all their flows.
    pub(super) fn prune(&mut self, found: &mut FamilyCounts<A>) -> Result<()> {
        for service in found.ports.keys().copied().collect::<Vec<_>>() {
            if !found.flows.contains_key(&service) && read(&self.services, &service)?.is_none() {
                remove(&mut self.counts, &service)?;
                self.swept.remove(&service);
                self.last.remove(&service);
                found.ports.remove(&service);
            }
        }
        Ok(())
    }
}
