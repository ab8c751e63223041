//! The rows of `kpx services`.

use std::collections::BTreeSet;

use comfy_table::Cell;

use super::Listed;
use crate::object_name::full_name;
use crate::output::{NONE, Narrow, cell, list, red, yellow};
use crate::{ConnectView, PortView, ServiceView, UdpOutcomes, age, latency};

/// Returns the outcomes of all UDP ports.
fn udp(service: &ServiceView) -> UdpOutcomes {
    let ports = service.ports.iter().filter_map(|port| port.udp);
    ports.fold(UdpOutcomes::default(), UdpOutcomes::plus)
}

impl Listed for ServiceView {
    const NARROW: Narrow<'static> = Narrow {
        optional: &["AGE", "TYPE", "FLOWS", "EXTERNAL-IP"],
        sentence: None,
    };

    fn header(wide: bool) -> Vec<&'static str> {
        let mut header = vec![
            "NAMESPACE",
            "NAME",
            "TYPE",
            "CLUSTER-IP",
            "EXTERNAL-IP",
            "PORT(S)",
            "BACKENDS",
            "FLOWS",
            "AGE",
        ];
        if wide {
            header.extend([
                "OPEN",
                "CONNECT-P50",
                "CONNECT-P99",
                "FAILED",
                "UDP-ANSWERED",
                "POLICY",
                "AFFINITY",
                "ALGORITHM",
                "HEALTH-CHECK",
            ]);
            header.push("CONFLICTS");
        }
        header
    }

    fn cells(&self, wide: bool) -> Vec<Cell> {
        let external = self
            .load_balancer_ips
            .iter()
            .chain(&self.external_ips)
            .map(ToString::to_string);
        let external = external.chain(self.not_taken.keys().map(|ip| format!("{ip}!")));
        let mut row = vec![
            cell(&self.namespace),
            cell(&self.name),
            cell(&self.r#type),
            cell(list(&self.cluster_ips)),
            cell(list(external)),
            cell(list(self.ports.iter().map(port))),
            backends(self),
            cell(self.ports.iter().map(|port| port.counts.flows).sum::<u64>()),
            cell(self.created.map_or_else(|| NONE.to_owned(), age::since)),
        ];
        if wide {
            let conflicts: Vec<_> = conflicts(self)
                .chain(self.not_taken.values().cloned())
                .collect();
            let slowest = |time: fn(&ConnectView) -> Option<f64>| {
                self.ports
                    .iter()
                    .filter_map(|port| time(&port.connect))
                    .reduce(f64::max)
            };
            row.extend([
                cell(
                    self.ports
                        .iter()
                        .map(|port| port.counts.open_flows)
                        .sum::<u64>(),
                ),
                cell(latency(slowest(|connect| connect.connect_p50))),
                cell(latency(slowest(|connect| connect.connect_p99))),
                cell(
                    self.ports
                        .iter()
                        .map(|port| port.connect.failed)
                        .sum::<u64>(),
                ),
                cell(udp(self).text()),
                cell(policies(self)),
                cell(
                    self.affinity_secs
                        .map_or(String::new(), |secs| age::span(secs.into())),
                ),
                cell(&self.algorithm),
                cell(
                    self.health_check_node_port
                        .map_or(String::new(), |port| port.to_string()),
                ),
                if conflicts.is_empty() {
                    cell("")
                } else {
                    red(conflicts.join("; "))
                },
            ]);
        }
        row
    }

    fn way(&self) -> Option<Cell> {
        let ways = ways(self);
        let is_cut_off = ways == BTreeSet::from(["unreachable"]);
        (!ways.is_empty()).then(|| {
            if is_cut_off {
                yellow(list(&ways))
            } else {
                cell(list(&ways))
            }
        })
    }

    fn key(&self) -> String {
        full_name(self)
    }

    fn name(&self) -> String {
        format!("service/{}", full_name(self))
    }
}

/// Returns the internal and external traffic policies, and whether a local redirect replaces them.
fn policies(service: &ServiceView) -> String {
    let redirected = if service.ports.iter().any(|port| port.redirected) {
        ", redirected"
    } else {
        ""
    };
    format!(
        "{}/{}{redirected}",
        service.internal_traffic_policy, service.external_traffic_policy
    )
}

/// Returns the paths to a Service's backends, without duplicates.
fn ways(service: &ServiceView) -> BTreeSet<&str> {
    let backends = service.ports.iter().flat_map(|port| &port.backends);
    backends
        .filter_map(|backend| backend.way.as_deref())
        .collect()
}

/// Formats a port as kubectl does, with an exclamation mark if a frontend of the port is not
/// programmed.
pub fn port(port: &PortView) -> String {
    let node_port = port
        .node_port
        .map(|port| format!(":{port}"))
        .unwrap_or_default();
    let mark = if port
        .frontends
        .iter()
        .any(|frontend| frontend.conflict.is_some())
    {
        "!"
    } else {
        ""
    };
    format!("{}{node_port}/{}{mark}", port.port, port.protocol)
}

/// Counts the backends that take traffic, and all listed backends.
fn backends(service: &ServiceView) -> Cell {
    let (in_use, all) = service.backends_in_use();
    let text = format!("{in_use}/{all}");
    if in_use == 0 {
        yellow(text)
    } else {
        cell(text)
    }
}

fn conflicts(service: &ServiceView) -> impl Iterator<Item = String> {
    let frontends = service.ports.iter().flat_map(|port| &port.frontends);
    frontends.filter_map(|frontend| frontend.conflict.clone())
}
