//! Counts the traffic of each service port and the flows of each backend. A count is the sum over
//! open and removed flows.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{HashMap, MapData};
use proxy_common::addr::{Addr, Addr4, Addr6, Proto, SockAddr};
use proxy_common::connect::Connects;
use proxy_common::flow::{EntryKind, Flow, Seen};
use proxy_common::frontend::{FrontendKey, Service};
use proxy_common::service_counts::{Passed, ServiceCounts};
use proxy_core::udp::UdpOutcomes;

use super::connects::ConnectLedger;
use super::datagrams::{ByBackend, DatagramLedger, is_answered};
use super::flows::{read, remove};
use super::maps::{FamilyNames, lend, take};

#[derive(Clone, Debug, Default)]
pub struct Counts {
    pub v4: FamilyCounts<Addr4>,
    pub v6: FamilyCounts<Addr6>,
}

#[derive(Clone, Debug)]
pub struct FamilyCounts<A: Addr> {
    /// The totals since the programs were loaded. Their numbers never decrease.
    pub ports: BTreeMap<FrontendKey<A>, Totals>,
    /// The number of flows in the table, by service port and backend.
    pub flows: BTreeMap<FrontendKey<A>, BTreeMap<SockAddr<A>, FlowCount>>,
    /// The outcomes of recent connections, by service port and backend. The unspecified address
    /// holds the sum of idle backends.
    pub connects: BTreeMap<FrontendKey<A>, BTreeMap<SockAddr<A>, Connects>>,
    /// The outcomes of UDP flows, by service port and backend, since the agent started.
    pub datagrams: ByBackend<A>,
}

impl<A: Addr> Default for FamilyCounts<A> {
    fn default() -> Self {
        Self {
            ports: BTreeMap::new(),
            flows: BTreeMap::new(),
            connects: BTreeMap::new(),
            datagrams: BTreeMap::new(),
        }
    }
}

impl<A: Addr> FamilyCounts<A> {
    /// Returns the outcomes of a service port's connections, summed over its backends.
    pub fn connects_of(&self, service: &FrontendKey<A>) -> Connects {
        let backends = self
            .connects
            .get(service)
            .into_iter()
            .flat_map(BTreeMap::values);
        backends.fold(Connects::NOTHING, |mut sum, connects| {
            sum += *connects;
            sum
        })
    }

    /// Returns the outcomes of a service port's UDP flows, summed over its backends.
    pub fn datagrams_of(&self, service: &FrontendKey<A>) -> UdpOutcomes {
        let backends = self.datagrams.get(service).into_iter();
        let backends = backends.flat_map(BTreeMap::values).copied();
        backends.fold(UdpOutcomes::default(), UdpOutcomes::plus)
    }

    pub(super) fn add(&mut self, flow: &Flow<A>) {
        if flow.service.addr.is_unspecified() {
            return;
        }
        match flow.kind.known() {
            Some(EntryKind::Dnat) => {
                self.ports.entry(flow.service).or_default().sent += flow.passed;
            }
            Some(EntryKind::Undnat) => {
                self.ports.entry(flow.service).or_default().returned += flow.passed
            }
            // The kinds above already count both directions.
            Some(EntryKind::Snat | EntryKind::Unsnat) | None => {}
        }
    }

    /// Counts a flow by its original entry.
    pub(super) fn add_flow(&mut self, opener: &Flow<A>) {
        if opener.service.addr.is_unspecified() {
            return;
        }
        let backends = self.flows.entry(opener.service).or_default();
        let count = backends.entry(opener.backend).or_default();
        count.all += 1;
        count.open += u64::from(!opener.state().is_terminal());
        if is_answered(opener) {
            let backends = self.datagrams.entry(opener.service).or_default();
            backends.entry(opener.backend).or_default().answered += 1;
        }
    }
}

/// The number of flows in the table. Each is a row of `kpx flows`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowCount {
    pub all: u64,
    /// The flows that have been neither closed by both sides nor reset.
    pub open: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub opened: u64,
    /// The number of dropped packets that would have opened a flow.
    pub dropped: u64,
    pub rejected: u64,
    /// The traffic to backends (`sent`) and to clients (`returned`).
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
        let ServiceCounts {
            opened,
            dropped,
            rejected,
            sent,
            returned,
        } = counts;
        Self {
            opened,
            dropped,
            rejected,
            sent,
            returned,
        }
    }
}

/// The counters of a family's service ports outside the flow table.
pub(super) struct Ledger<A: FamilyNames> {
    counts: HashMap<MapData, FrontendKey<A>, ServiceCounts>,
    /// A second handle on the services map, which shows whether a service port exists.
    services: HashMap<MapData, FrontendKey<A>, Service>,
    /// The traffic of swept flows: to backends, to clients.
    swept: BTreeMap<FrontendKey<A>, (Passed, Passed)>,
    connects: ConnectLedger<A>,
    datagrams: DatagramLedger<A>,
    /// The result of the last scan. A scan can miss a flow that a program closes during the scan.
    last: BTreeMap<FrontendKey<A>, Totals>,
}

impl<A: FamilyNames> Ledger<A> {
    /// Opens the maps. Call this before `SERVICES` is taken out of `ebpf`.
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self> {
        let services = lend(ebpf, A::MAPS.services)?;
        let counts = take(ebpf, A::MAPS.service_counts)?;
        let mut connects = ConnectLedger::new(ebpf)?;
        let datagrams = DatagramLedger::new(&connects.read()?);
        Ok(Self {
            counts,
            services,
            swept: BTreeMap::new(),
            connects,
            datagrams,
            last: BTreeMap::new(),
        })
    }

    /// Keeps the outcome of a removed flow: a TCP flow counts if its backend sent no packet.
    pub(super) fn close_outcome(&mut self, flow: &Flow<A>, proto: Proto) {
        if proto == Proto::TCP && !flow.rx.has(Seen::PACKET) {
            self.connects.close_unanswered(flow);
        }
        self.datagrams.close(flow);
    }

    /// Keeps the counters of a flow after its original entry was removed.
    pub(super) fn close(&mut self, service: FrontendKey<A>, sent: Passed, returned: Passed) {
        if !service.addr.is_unspecified() {
            let (to_sent, to_returned) = self.swept.entry(service).or_default();
            *to_sent += sent;
            *to_returned += returned;
        }
    }

    /// Returns the counters outside the flow table. Call this before adding flows: otherwise a flow
    /// that a program closes in between is counted twice.
    pub(super) fn begin(&mut self) -> Result<FamilyCounts<A>> {
        let mut found = FamilyCounts {
            connects: self.connects.read()?,
            ..FamilyCounts::default()
        };
        for row in &self.counts {
            let (service, counts) =
                row.with_context(|| format!("read {}", A::MAPS.service_counts))?;
            found.ports.insert(service, counts.into());
        }
        for (service, (sent, returned)) in &self.swept {
            let totals = found.ports.entry(*service).or_default();
            totals.sent += *sent;
            totals.returned += *returned;
        }
        Ok(found)
    }

    /// Adds the outcomes of removed UDP flows, and raises each number of traffic to at least its
    /// last value, because the count of a table in use is inexact.
    pub(super) fn end(&mut self, found: &mut FamilyCounts<A>) {
        self.datagrams.note_table(&found.datagrams);
        found.datagrams = self.datagrams.outcomes();
        for (service, totals) in &mut found.ports {
            if let Some(last) = self.last.get(service) {
                totals.at_least(last);
            }
        }
        self.last.clone_from(&found.ports);
    }

    /// Adds the counters of swept flows to the programs' counters, which outlive the agent. Counts
    /// that a program adds at the same time are lost. If the map is full, the counters stay in this
    /// process.
    pub(super) fn settle(
        &mut self,
        found: &FamilyCounts<A>,
        now_secs: u32,
        udp_timeout: u32,
    ) -> Result<()> {
        self.datagrams
            .settle(&found.connects, &found.flows, now_secs, udp_timeout);
        self.connects.settle(&found.connects, now_secs)?;
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

    /// Removes service ports that have neither a Service nor flows.
    pub(super) fn prune(&mut self, found: &mut FamilyCounts<A>) -> Result<()> {
        for service in found.ports.keys().copied().collect::<Vec<_>>() {
            if !found.flows.contains_key(&service) && read(&self.services, &service)?.is_none() {
                remove(&mut self.counts, &service)?;
                self.swept.remove(&service);
                self.datagrams.remove(&service);
                self.last.remove(&service);
                found.ports.remove(&service);
            }
        }
        let Self {
            connects, services, ..
        } = self;
        connects.prune(found, |service| Ok(read(services, service)?.is_some()))
    }
}
