//! The dials of the demo: a client, a destination, the backend that answers and the client that it sees.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use testbed::agent::{SERVICE_PORT, Service};
use testbed::echo::{Dial, Fault, Protocol, pattern};
use testbed::lab::{EXTERNAL, Family, Lab};

use crate::{LOAD_BALANCER, NODE_PORT};

/// Where a service is dialled.
#[derive(Clone, Copy)]
enum At {
    ClusterIp,
    /// At the address of the node with this name.
    NodePort(&'static str),
    LoadBalancer,
}

use At::{ClusterIp, LoadBalancer, NodePort};

/// Who, as people would say it; in which namespace; which service, at which of its addresses.
const CLIENTS: [(&str, &str, &str, At); 14] = [
    ("a pod", "p1a", "web", ClusterIp),
    ("a process of the node", "n1", "web", ClusterIp),
    ("a pod of the other node", "p2b", "web", ClusterIp),
    ("a pod, served by itself", "p1a", "itself", ClusterIp),
    ("a process, pod elsewhere", "n1", "far", ClusterIp),
    ("a pod, its own node", "p1a", "node", ClusterIp),
    ("a process, its own node", "n1", "node", ClusterIp),
    ("a pod, outside", "p1a", "outside", ClusterIp),
    ("a pod, no endpoints", "p1a", "empty", ClusterIp),
    ("a machine outside", "x", "web", NodePort("n1")),
    ("a machine outside", "x", "web", LoadBalancer),
    ("a pod", "p1a", "web", LoadBalancer),
    ("a process of the node", "n1", "web", NodePort("n1")),
    ("a process of the node", "n1", "web", LoadBalancer),
];

impl At {
    fn addr(self, lab: &Lab, service: &Service, family: Family) -> SocketAddr {
        match self {
            ClusterIp => service.frontend(family),
            NodePort(node) => (lab.host(node).addrs.ip(family), NODE_PORT).into(),
            LoadBalancer => (EXTERNAL.host(LOAD_BALANCER).ip(family), SERVICE_PORT).into(),
        }
    }

    fn name(self) -> &'static str {
        match self {
            ClusterIp => "ClusterIP",
            NodePort(_) => "NodePort",
            LoadBalancer => "LoadBalancer",
        }
    }
}

/// Prints a table of conversations and returns how many went wrong.
pub(crate) fn everyone(lab: &Lab, services: &[Service]) -> Result<usize> {
    let mut table = Table::new();
    let header = ["client", "in", "dials", "at its", "", "IPv4: answers, and sees", "IPv6: answers, and sees"];
    table.load_preset(UTF8_FULL_CONDENSED).set_header(header);
    let mut wrong = 0;
    for (who, host, name, at) in CLIENTS {
        let service = services.iter().find(|service| service.name == name);
        let service = service.with_context(|| format!("no service {name}"))?;
        for protocol in Protocol::COMMON {
            let mut row = [who, host, name, at.name()].map(str::to_owned).to_vec();
            row.push(protocol.to_string());
            for family in Family::ALL {
                let dial = Dial::new(protocol, at.addr(lab, service, family));
                let result = dial.exchange(&lab.host(host).ns, &pattern(10_000));
                row.push(match &result {
                    Ok(answer) => format!("{} sees {}", answer.backend, answer.source.ip()),
                    Err(fault) => fault.to_string(),
                });
                let expected = match &result {
                    Ok(answer) => service.backends.contains(&answer.backend.as_str()),
                    Err(fault) => service.backends.is_empty() && matches!(fault, Fault::Refused),
                };
                wrong += usize::from(!expected);
            }
            table.add_row(row);
        }
    }
    println!("\n{table}\n");
    Ok(wrong)
}
