//! What a scrape asks of the loop.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::frontend::{Service, Set};
use proxy_common::names::{self, FamilyMaps};

use super::Agent;
use crate::ip_family::IpFamily;
use crate::metrics::{MapReading, ProgramReading, Readings};
use crate::tables::FamilyTables;

impl Agent {
    pub(super) fn readings(&self, source_problems: usize) -> Result<Readings> {
        let mut devices = BTreeMap::new();
        for ifindex in self.node.attachments().devices().keys() {
            *devices.entry(self.role_name(*ifindex)).or_default() += 1;
        }
        let swept = self.sweeper.last().iter();
        let flows = swept.filter_map(|(family, swept)| Some((IpFamily::from_name(family)?, swept.flows as u64)));
        let tables = self.desired.tables();
        Ok(Readings {
            events: self.counters.events()?,
            reasons: self.counters.reasons()?,
            programs: self.program_readings()?,
            maps: self.map_readings(),
            flows: flows.collect(),
            devices,
            problems: (self.health.problems().len() + source_problems) as u64,
            no_local_endpoints: BTreeMap::from([
                (IpFamily::V4, no_local_endpoints(&tables.v4)),
                (IpFamily::V6, no_local_endpoints(&tables.v6)),
            ]),
        })
    }

    fn program_readings(&self) -> Result<BTreeMap<String, ProgramReading>> {
        let reading = |name: &String| {
            let info = self.node.attachments().program(name)?.info();
            let info = info.with_context(|| format!("ask the kernel about program {name}"))?;
            Ok((name.clone(), ProgramReading { run_time: info.run_time(), runs: info.run_count() }))
        };
        self.loaded.programs.keys().map(reading).collect()
    }

    fn map_readings(&self) -> BTreeMap<String, MapReading> {
        let maps = self.loaded.max_entries.iter();
        let maps = maps.map(|(name, max)| (name.clone(), MapReading { entries: None, max_entries: u64::from(*max) }));
        let mut maps: BTreeMap<_, _> = maps.collect();
        let tables = self.desired.tables();
        let counted = entries(&names::IPV4, &tables.v4).into_iter().chain(entries(&names::IPV6, &tables.v6));
        let swept = [(names::IPV4.flows, Addr4::FAMILY), (names::IPV6.flows, Addr6::FAMILY)];
        let flows = swept.into_iter().filter_map(|(map, family)| Some((map, self.sweeper.last().get(family)?.entries)));
        for (name, entries) in counted.chain(flows) {
            maps.entry(name.to_owned()).or_default().entries = Some(entries as u64);
        }
        maps
    }
}

/// What the maps should hold, and hold unless there is a problem.
fn entries<A: Addr>(maps: &FamilyMaps, tables: &FamilyTables<A>) -> [(&'static str, usize); 6] {
    [
        (maps.frontends, tables.frontends.len()),
        (maps.services, tables.services.len()),
        (maps.slots, tables.slots.len()),
        (maps.endpoints, tables.endpoints.len()),
        (maps.maglev, tables.maglev.len()),
        (maps.source_ranges, tables.source_ranges.len()),
    ]
}

/// Of the internal policy and of the external one.
fn no_local_endpoints<A: Addr>(tables: &FamilyTables<A>) -> [u64; 2] {
    [Service::INTERNAL_LOCAL, Service::EXTERNAL_LOCAL].map(|policy| {
        let without = |service: &&Service| {
            service.has(policy) && service.has(Service::HAS_ENDPOINTS) && service.count(Set::LOCAL) == 0
        };
        tables.services.values().filter(without).count() as u64
    })
}
