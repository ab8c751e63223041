//! Chooses the Services with series of their own in `/metrics`, and sums the remaining Services.
//! Pure.
//!
//! A Service has series for all its ports or for none, and the limit counts ports. A chosen Service
//! keeps its series until it is deleted or outgrows the free ports, so series do not come and go
//! with the load. The sum `other` counts the traffic of each Service for the time without series,
//! so it never decreases. It starts at 0 with the agent.

use std::collections::BTreeMap;

use crate::{PortCounts, PortSums};
use proxy_common::addr::Proto;
use proxy_common::connect::Connects;
use proxy_core::input::ObjectName;
use proxy_metrics::ServiceReading;

use super::kept::{Change, Sums, Traffic};

/// The name of the sum of all Services without series. Its namespace is empty, so it cannot collide
/// with a Service.
const OTHER: &str = "other";

#[derive(Debug, Default)]
pub struct Chosen {
    /// The maximum number of ports; 0 for no series.
    limit: usize,
    /// The chosen Services and their numbers of ports. The sum is at most `limit`.
    services: BTreeMap<ObjectName, usize>,
    ports: Vec<PortSums>,
    others: Option<Change>,
}

impl Chosen {
    pub fn of(limit: usize) -> Self {
        Self {
            limit,
            ..Self::default()
        }
    }

    /// Adds the sample `now`. `before` is the previous sample.
    pub fn take(&mut self, ports: Vec<PortSums>, before: Option<&Traffic>, now: &Traffic) {
        if self.limit == 0 {
            return;
        }
        let number = self.choose(&ports, now);
        if number > self.services.len() {
            let others = self.others.get_or_insert_default();
            // The first sample includes traffic from before this agent, and has no Services that
            // were deleted before.
            if let Some(before) = before {
                let none = Sums::default();
                for (name, sums) in now
                    .iter()
                    .filter(|(name, _)| !self.services.contains_key(name))
                {
                    others.add(&sums.since(before.get(name).unwrap_or(&none)));
                }
            }
        }
        self.ports = ports
            .into_iter()
            .filter(|port| self.services.contains_key(&port.service))
            .collect();
    }

    /// Chooses the Services with series. Returns the number of all Services.
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
        // A Service that has grown beyond the free ports loses its series.
        self.services.retain(|name, held| {
            left += *held;
            *held = numbers.get(name).copied().unwrap_or_default();
            let fits = *held <= left;
            left -= if fits { *held } else { 0 };
            fits
        });
        // The series of an idle Service begin at 0 and show its first traffic. If not all Services
        // fit, only Services with traffic are chosen.
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

    /// Returns the readings of the last sample.
    pub fn readings(&self) -> Vec<ServiceReading> {
        let of_ports = self.ports.iter().map(|port| ServiceReading {
            namespace: port.service.namespace.to_string(),
            service: port.service.name.to_string(),
            port: format!("{}/{}", port.port, port.proto.to_string().to_uppercase()),
            udp: (port.proto == Proto::UDP).then_some(port.udp),
            ..reading(&port.counts, &port.connects)
        });
        let others = self.others.iter().map(|sum| ServiceReading {
            service: OTHER.to_owned(),
            udp: Some(sum.udp),
            ..reading(&sum.counts, &sum.connects)
        });
        of_ports.chain(others).collect()
    }
}

fn reading(counts: &PortCounts, connects: &Connects) -> ServiceReading {
    ServiceReading {
        connections: counts.flows_opened,
        packets: counts.packets + counts.packets_returned,
        bytes: counts.bytes + counts.bytes_returned,
        refused: counts.unserved(),
        connects: *connects,
        ..ServiceReading::default()
    }
}

#[cfg(test)]
mod tests;
