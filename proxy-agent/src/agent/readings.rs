//! Collects the agent's values for a scrape.

use std::collections::BTreeMap;

use anyhow::Result;
use proxy_common::addr::Addr;
use proxy_common::frontend::{Service, Set};
use proxy_common::hook::SlowProgram;

use super::Agent;
use super::status::role_name;
use crate::node::Node;
use proxy_core::ip_family::IpFamily;
use proxy_core::tables::FamilyTables;
use proxy_datapath::PersistenceKind;
use proxy_metrics::{ProgramReading, Readings};

impl Agent {
    pub(super) fn readings(&self, node: &Node, source_problems: usize) -> Result<Readings> {
        let mut devices = BTreeMap::new();
        for ifindex in node.attachments().devices().keys() {
            *devices.entry(role_name(node, *ifindex)).or_default() += 1;
        }
        let swept = self.sweeper.last().iter();
        let flows = swept
            .filter_map(|(family, swept)| Some((IpFamily::from_name(family)?, swept.flows as u64)));
        let tables = self.desired.tables();
        Ok(Readings {
            events: self.counters.events()?,
            reasons: self.counters.reasons()?,
            programs: self.program_readings(node)?,
            maps: self.map_fill(),
            flows: flows.collect(),
            devices,
            problems: (self.reports.health.problems().len() + source_problems) as u64,
            out_of_reach: {
                let none = self.desired.cut_off().len();
                [none, self.desired.unreachable().len().saturating_sub(none)]
                    .map(|services| services as u64)
            },
            restart_gap: self.persistence_kind() == PersistenceKind::Nothing,
            no_local_endpoints: BTreeMap::from([
                (IpFamily::V4, no_local_endpoints(&tables.v4)),
                (IpFamily::V6, no_local_endpoints(&tables.v6)),
            ]),
            silent_backends: [false, true].map(|ejected| {
                self.silent_status()
                    .iter()
                    .filter(|backend| backend.is_ejected == ejected)
                    .count() as u64
            }),
            // `AgentHandle::readings` adds these from the history.
            services: Vec::new(),
        })
    }

    fn program_readings(&self, node: &Node) -> Result<BTreeMap<String, ProgramReading>> {
        let reading = |name: &String| {
            let info = node.attachments().info(name)?;
            Ok((
                name.clone(),
                ProgramReading {
                    run_time: info.run_time(),
                    runs: info.run_count(),
                },
            ))
        };
        // The kernel counts what a hook's program calls as a run of that program.
        let is_called = |name: &str| SlowProgram::ALL.map(SlowProgram::program).contains(&name);
        let programs = self.loaded.programs.keys();
        programs
            .filter(|name| !is_called(name))
            .map(reading)
            .collect()
    }
}

/// Counts the services without local endpoints, for the internal and for the external policy.
fn no_local_endpoints<A: Addr>(tables: &FamilyTables<A>) -> [u64; 2] {
    [Service::INTERNAL_LOCAL, Service::EXTERNAL_LOCAL].map(|policy| {
        let without = |service: &&Service| {
            service.has(policy)
                && service.has(Service::HAS_ENDPOINTS)
                && service.count(Set::LOCAL) == 0
        };
        tables.services.values().filter(without).count() as u64
    })
}
