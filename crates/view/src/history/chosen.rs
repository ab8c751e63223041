//! The Services with series of their own in `/metrics`, and the sum of the others. Pure.
//!
//! A place is for all ports of a Service, and the limit is one of ports: each port has series. A
//! Service that has a place keeps it until it is gone, or until it grows by more ports than are
//! left, so no series comes and goes with the load. The counters of the others are the sum of what
//! passed while a Service had no place, so that they never decrease. They begin at 0 with the
//! agent, as a counter of a new process does.

use std::collections::BTreeMap;

use crate::PortSums;
use proxy_core::input::ObjectName;
use proxy_metrics::ServiceReading;

use super::kept::{Sums, Traffic};

/// The name of the sum of all Services without a place. No Service has the namespace beside it.
const OTHER: &str = "other";

#[derive(Debug, Default)]
pub struct Chosen {
    /// The number of ports; 0 if the operator asked for no series.
    limit: usize,
    /// The Services with a place, and the numbers of their ports. The sum is never above the limit.
    services: BTreeMap<ObjectName, usize>,
    ports: Vec<PortSums>,
    others: Option<Sums>,
}

impl Chosen {
    pub fn of(limit: usize) -> Self {
        Self {
            limit,
            ..Self::default()
        }
    }

    /// Takes a sample, `before` being the last one.
    pub fn take(&mut self, ports: Vec<PortSums>, before: Option<&Traffic>, now: &Traffic) {
        if self.limit == 0 {
            return;
        }
        let number = self.choose(&ports, now);
        if number > self.services.len() {
            let others = self.others.get_or_insert_default();
            // The first counts have what passed before this agent, though not that of Services that
            // are gone.
            if let Some(before) = before {
                for (name, sums) in now
                    .iter()
                    .filter(|(name, _)| !self.services.contains_key(name))
                {
                    others.add(&sums.since(&before.get(name).unwrap_or_default()));
                }
            }
        }
        self.ports = ports
            .into_iter()
            .filter(|port| self.services.contains_key(&port.service))
            .collect();
    }

    /// Chooses the Services with a place. Returns the number of all.
    fn choose(&mut self, ports: &[PortSums], now: &Traffic) -> usize {
        let mut numbers = BTreeMap::<&ObjectName, usize>::new();
        for port in ports {
            *numbers.entry(&port.service).or_default() += 1;
        }
        self.services.retain(|name, held| {
            let number = numbers.get(name).copied();
            *held = number.map_or(0, |number| number.min(*held));
            number.is_some()
        });
        let mut left = self.limit.saturating_sub(self.services.values().sum());
        // A Service that has grown loses its place rather than take that of another.
        self.services.retain(|name, held| {
            left += *held;
            *held = numbers.get(name).copied().unwrap_or_default();
            let fits = *held <= left;
            left -= if fits { *held } else { 0 };
            fits
        });
        // Series that begin at 0 lose no first rate. Where not all find a place, traffic decides.
        let idle = numbers
            .keys()
            .copied()
            .filter(|_| ports.len() <= self.limit);
        for name in now.names().chain(idle) {
            let number = numbers.get(name).copied().unwrap_or_default();
            if number <= left && !self.services.contains_key(name) {
                self.services.insert(name.clone(), number);
                left -= number;
            }
        }
        numbers.len()
    }

    /// Returns the readings as of the last sample.
    pub fn readings(&self) -> Vec<ServiceReading> {
        let of_ports = self.ports.iter().map(|port| {
            let sums = Sums::of(port);
            reading(
                port.service.namespace.to_string(),
                port.service.name.to_string(),
                format!("{}/{}", port.port, port.proto.to_string().to_uppercase()),
                &sums,
            )
        });
        let others = self
            .others
            .iter()
            .map(|sums| reading(String::new(), OTHER.to_owned(), String::new(), sums));
        of_ports.chain(others).collect()
    }
}

fn reading(
    namespace: String,
    service: String,
    port: String,
    Sums { counts, connects }: &Sums,
) -> ServiceReading {
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
