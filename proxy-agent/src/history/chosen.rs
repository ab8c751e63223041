//! The Services with series of their own in `/metrics`, and the sum of the others. Pure.
//!
//! A Service that has a place keeps it until it is gone, so no series comes and goes with the load. The counters of the others are the sum of
//! what passed while a Service had no place, so that they never decrease. They begin at 0 with the agent, as a counter of a new process does.

use std::collections::BTreeSet;

use proxy_core::input::ObjectName;
use proxy_metrics::ServiceReading;
use proxy_view::PortSums;

use super::kept::{Sums, Traffic};

/// The name of the sum of all Services without a place. No Service has the namespace beside it.
const OTHER: &str = "other";

#[derive(Debug, Default)]
pub(super) struct Chosen {
    /// The number of places; none if no client asked for series.
    limit: usize,
    services: BTreeSet<ObjectName>,
    ports: Vec<PortSums>,
    others: Option<Sums>,
}

impl Chosen {
    pub(super) fn of(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    /// Takes a sample, `before` being the last one.
    pub(super) fn take(&mut self, ports: Vec<PortSums>, before: Option<&Traffic>, now: &Traffic) {
        if self.limit == 0 {
            return;
        }
        let names: BTreeSet<_> = ports.iter().map(|port| &port.service).collect();
        self.services.retain(|name| names.contains(name));
        // Series that begin at 0 lose no first rate. Where not all find a place, traffic decides.
        let idle = names.iter().copied().filter(|_| names.len() <= self.limit);
        for name in now.names().chain(idle) {
            if self.services.len() < self.limit {
                self.services.insert(name.clone());
            }
        }
        if names.len() > self.services.len() {
            let others = self.others.get_or_insert_default();
            // The first counts have what passed before this agent, though not that of Services that are gone.
            if let Some(before) = before {
                for (name, sums) in now.iter().filter(|(name, _)| !self.services.contains(name)) {
                    others.add(&sums.since(&before.get(name).unwrap_or_default()));
                }
            }
        }
        self.ports = ports.into_iter().filter(|port| self.services.contains(&port.service)).collect();
    }

    /// Returns the readings as of the last sample.
    pub(super) fn readings(&self) -> Vec<ServiceReading> {
        let of_ports = self.ports.iter().map(|port| {
            let sums = Sums::of(port);
            let name = (port.service.namespace.to_string(), port.service.name.to_string());
            reading(name, format!("{}/{}", port.port, port.proto.to_string().to_uppercase()), &sums)
        });
        let others = self.others.iter().map(|sums| reading((String::new(), OTHER.to_owned()), String::new(), sums));
        of_ports.chain(others).collect()
    }
}

fn reading((namespace, service): (String, String), port: String, Sums { counts, connects }: &Sums) -> ServiceReading {
    ServiceReading {
        namespace,
        service,
        port,
        connections: counts.flows_opened,
        packets: counts.packets + counts.packets_returned,
        bytes: counts.bytes + counts.bytes_returned,
        refused: counts.unserved(),
        connects: *connects,
    }
}

#[cfg(test)]
mod tests;
