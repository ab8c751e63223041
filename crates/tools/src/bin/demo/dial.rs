//! The dials of the demo: client, destination, answering backend, and the client address that the
//! backend sees. Each is checked.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::process::Command;

use anyhow::{Context, Result};
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use testbed::agent::{SERVICE_PORT, Service};
use testbed::echo::{Answer, Dial, Fault, Protocol, pattern};
use testbed::lab::{EXTERNAL, Family, Host, Lab};

use crate::{LOAD_BALANCER, NODE_PORT};

/// The bytes of each conversation, which the backend echoes.
const BYTES: usize = 10_000;

/// The dialled address of a Service.
#[derive(Clone, Copy)]
enum At {
    ClusterIp,
    /// At the address of the node with this name.
    NodePort(&'static str),
    LoadBalancer,
}

use At::{ClusterIp, LoadBalancer, NodePort};

/// The client's address as a backend sees it.
#[derive(Clone, Copy)]
enum Sees {
    /// The client's own address.
    Client,
    Node,
    /// The client's own address if the backend is on n1, where the packets come in; otherwise an
    /// address of n1.
    ClientIfNear,
    /// There is no backend, and the client is refused at once.
    Nothing,
}

/// The address that backends see behind kube-proxy, if it differs. `tests/reachability` runs the
/// same with `--masquerade compat`.
const SAME: &str = "the same";
const HIDES: &str = "always sees n1";

/// A line of the table: the client in plain words, its namespace, the Service, the dialled address,
/// the expectation.
struct Case(
    &'static str,
    &'static str,
    &'static str,
    At,
    Sees,
    &'static str,
);

const CASES: [Case; 14] = [
    Case("a pod", "p1a", "web", ClusterIp, Sees::Client, SAME),
    Case(
        "a process of the node",
        "n1",
        "web",
        ClusterIp,
        Sees::Node,
        SAME,
    ),
    Case(
        "a pod of the other node",
        "p2b",
        "web",
        ClusterIp,
        Sees::Client,
        SAME,
    ),
    Case(
        "a pod, served by itself",
        "p1a",
        "itself",
        ClusterIp,
        Sees::Node,
        SAME,
    ),
    Case(
        "a process, pod elsewhere",
        "n1",
        "far",
        ClusterIp,
        Sees::Node,
        SAME,
    ),
    Case(
        "a pod, its own node",
        "p1a",
        "node",
        ClusterIp,
        Sees::Client,
        SAME,
    ),
    Case(
        "a process, its own node",
        "n1",
        "node",
        ClusterIp,
        Sees::Node,
        SAME,
    ),
    Case(
        "a pod, outside",
        "p1a",
        "outside",
        ClusterIp,
        Sees::Node,
        SAME,
    ),
    Case(
        "a pod, no endpoints",
        "p1a",
        "empty",
        ClusterIp,
        Sees::Nothing,
        SAME,
    ),
    Case(
        "a machine outside",
        "x",
        "web",
        NodePort("n1"),
        Sees::ClientIfNear,
        HIDES,
    ),
    Case(
        "a machine outside",
        "x",
        "web",
        LoadBalancer,
        Sees::ClientIfNear,
        HIDES,
    ),
    Case("a pod", "p1a", "web", LoadBalancer, Sees::Client, HIDES),
    Case(
        "a process of the node",
        "n1",
        "web",
        NodePort("n1"),
        Sees::Node,
        SAME,
    ),
    Case(
        "a process of the node",
        "n1",
        "web",
        LoadBalancer,
        Sees::Node,
        SAME,
    ),
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
            NodePort(_) => "node port",
            LoadBalancer => "LB address",
        }
    }
}

impl Sees {
    fn text(self, client: &Host) -> String {
        match self {
            Self::Client => client.name.to_owned(),
            Self::Node => "n1".to_owned(),
            Self::ClientIfNear => format!("{}; n1 if on n2", client.name),
            Self::Nothing => "–".to_owned(),
        }
    }
}

/// Dials everything, prints a table and returns the number of failures.
pub(crate) fn everyone(lab: &Lab, services: &[Service]) -> Result<usize> {
    let of_node = addresses(&lab.n1.host)?;
    let mut table = Table::new();
    let header = [
        "client",
        "dials",
        "TCP/v4",
        "UDP/v4",
        "TCP/v6",
        "UDP/v6",
        "backend sees",
        "verified",
        "kube-proxy",
    ];
    table.load_style(UTF8_FULL_CONDENSED).set_header(header);
    let mut wrong = Vec::new();
    for case in &CASES {
        let Case(who, host, name, at, sees, kube_proxy) = case;
        let service = services.iter().find(|service| service.name == *name);
        let service = service.with_context(|| format!("no service {name}"))?;
        let client = lab.host(host);
        let mut row = vec![format!("{host}, {who}"), format!("{name}, {}", at.name())];
        let mut good = 0;
        for (family, protocol) in Family::ALL
            .into_iter()
            .flat_map(|family| Protocol::COMMON.map(|one| (family, one)))
        {
            let dial = Dial::new(protocol, at.addr(lab, service, family));
            let result = dial.exchange(&client.ns, &pattern(BYTES));
            let judged = match &result {
                Ok(answer) => judge(lab, service, client, *sees, family, answer, &of_node),
                Err(Fault::Refused) if matches!(sees, Sees::Nothing) => Ok(()),
                Err(fault) => Err(fault.to_string()),
            };
            row.push(result.map_or_else(|fault| fault.to_string(), |answer| answer.backend));
            match judged {
                Ok(()) => good += 1,
                Err(why) => wrong.push(format!(
                    "{host} dials {name} by {protocol} and {family}: {why}"
                )),
            }
        }
        row.extend([
            sees.text(client),
            format!("{good} of 4"),
            (*kube_proxy).to_owned(),
        ]);
        table.add_row(row);
    }
    println!("\n{table}");
    println!(
        "Verified of each conversation: one of the Service's backends answers, all {BYTES} bytes come back, and the"
    );
    println!(
        "backend sees the address of that column; or the client is refused at once. Behind kube-proxy, where"
    );
    println!(
        "the last column differs, the backend loses the client's address; tests/reachability shows that mode."
    );
    wrong.iter().for_each(|what| println!("  WRONG: {what}"));
    println!("{} conversations, {} wrong\n", CASES.len() * 4, wrong.len());
    Ok(wrong.len())
}

/// Returns the fault of an answer: a wrong backend, or a wrong client address.
fn judge(
    lab: &Lab,
    service: &Service,
    client: &Host,
    sees: Sees,
    family: Family,
    answer: &Answer,
    of_node: &BTreeSet<IpAddr>,
) -> Result<(), String> {
    let backend = answer.backend.as_str();
    let seen = answer.source.ip();
    if !service.backends.contains(&backend) {
        return Err(format!("{backend} answers, and is no backend"));
    }
    let is_near = lab
        .node_of(lab.host(backend))
        .is_some_and(|node| node.host.name == lab.n1.host.name);
    let is_client = seen == client.addrs.ip(family);
    let is_right = match sees {
        Sees::Client => is_client,
        Sees::Node => of_node.contains(&seen),
        Sees::ClientIfNear if is_near => is_client,
        Sees::ClientIfNear => of_node.contains(&seen),
        Sees::Nothing => false,
    };
    if is_right {
        Ok(())
    } else {
        Err(format!("{backend} sees {seen}"))
    }
}

fn addresses(host: &Host) -> Result<BTreeSet<IpAddr>> {
    let text = host
        .ns
        .exec(Command::new("ip").args(["-oneline", "address", "show"]))?;
    let words = text
        .lines()
        .filter_map(|line| line.split_whitespace().nth(3));
    Ok(words
        .filter_map(|word| word.split('/').next()?.parse().ok())
        .collect())
}
