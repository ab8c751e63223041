//! The answers of each kind of Service to each kind of client, compared with those of other proxies.

mod answers;
mod ask;
mod objects;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::thread::{self, sleep};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use serde_json::Value;

use crate::clients::{self, Client, OUTSIDE, in_each};
use crate::command::output;
use crate::load::reach;
use crate::network::Node;
use crate::parts::Parts;
use crate::state::State;
use crate::up::until;
use crate::{addons, network, outcomes};
use answers::{Answers, Question};
use ask::{Names, PROTOCOLS, ask};
use objects::{Kind, NAMESPACE, PORT};

#[derive(Args)]
pub(crate) struct Options {
    /// Print each answer, and not the differences alone
    #[arg(long)]
    all: bool,
}

/// The time in which the proxy and kube-router take the last object.
const SETTLE: Duration = Duration::from_secs(5);

/// The sysctls that let a node refuse each packet.
const REFUSALS: [&str; 3] = [
    "net.ipv4.icmp_ratelimit=0",
    "net.ipv4.icmp_msgs_per_sec=1000000",
    "net.ipv6.icmp.ratelimit=0",
];

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let state = State::running()?;
    let nodes = network::nodes(2);
    ensure!(
        state.nodes.len() >= nodes.len(),
        "the matrix takes two nodes at least"
    );
    let kinds = objects::kinds(state.cni == "kube-router");
    start(&state, &nodes, &kinds)?;
    let answers = answers(&state, &nodes, &kinds)?;
    outcomes::write(&state, "matrix", &answers)?;
    if options.all {
        print!("{}", answers.text());
    }
    let mut faults = answers.broken_policies();
    for (proxy, others) in outcomes::of_others::<Answers>(&state, "matrix")? {
        // kube-proxy differs with kube-proxy by its modes.
        if state.proxy == "kpx" {
            let differences = answers.against(&proxy, &others);
            for (reason, number) in differences.documented {
                println!("{number} different with {proxy}: {reason}");
            }
            faults.extend(differences.unexplained);
        }
    }
    for fault in &faults {
        println!("{fault}");
    }
    println!("{}; {} faults", answers.summary(), faults.len());
    Ok(if faults.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Makes the Services, and waits until the proxy serves the address that comes last.
fn start(state: &State, nodes: &[Node], kinds: &[Kind]) -> Result<()> {
    let manifest = objects::manifest(&Parts::of(state), nodes, kinds)?;
    addons::apply_text(state, "matrix", &manifest.to_string())?;
    kubectl(
        state,
        &[
            "wait",
            "--for=condition=Ready",
            "pods",
            "--all",
            "--timeout=60s",
        ],
    )?;
    if kinds.iter().any(Kind::is_guarded) {
        // kube-router leaves the addresses of pods out that come later.
        addons::apply_text(state, "policy", &objects::policy().to_string())?;
    }
    for node in &state.nodes {
        // The kernel limits the refusals of a second.
        let mut sysctl = state.enter(node, "sysctl")?;
        output(sysctl.args(["-q", "-w"]).args(REFUSALS))?;
    }
    for kind in kinds.iter().rev() {
        let status = kind.status(nodes).to_string();
        let patch = [
            "patch",
            "service",
            kind.name,
            "--subresource=status",
            "--type=merge",
        ];
        kubectl(state, &[&patch[..], &["--patch", &status]].concat())?;
    }
    // The first kind has an answer for everybody.
    let last = kinds[0].virtual_ips(&nodes[0]).load_balancer;
    let client = [clients::outside(state, &last.map(|ip| (ip, PORT).into()))?];
    until("the load balancer's addresses answer", || reach(&client))?;
    sleep(SETTLE);
    Ok(())
}

fn kubectl(state: &State, args: &[&str]) -> Result<String> {
    output(state.kubectl().args(["--namespace", NAMESPACE]).args(args))
}

fn answers(state: &State, nodes: &[Node], kinds: &[Kind]) -> Result<Answers> {
    let names = names(state, nodes)?;
    let mut clients = clients::pods(state, NAMESPACE, "client", &[])?;
    clients.extend(clients::nodes(state, &[])?.into_iter().take(2));
    clients.push(clients::outside(state, &[])?);
    let mut services = Vec::new();
    for kind in kinds {
        let text = kubectl(state, &["get", "service", kind.name, "--output=json"])?;
        let service = serde_json::from_str(&text).context("read kubectl's Service")?;
        services.push((kind, frontends(nodes, kind, &service)?));
    }
    let of_client = |client: &Client| {
        // Threads keep the namespace of the thread that starts them.
        thread::scope(|scope| {
            let threads: Vec<_> = services
                .iter()
                .map(|(kind, frontends)| {
                    scope.spawn(|| of_service(client, kind, frontends, &names))
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().map_err(|_| anyhow!("a client panicked")))
                .collect::<Result<Vec<_>>>()
        })
    };
    let all = in_each(&clients, of_client)?;
    Ok(all
        .into_iter()
        .flatten()
        .flatten()
        .collect::<Vec<_>>()
        .into())
}

fn of_service(
    client: &Client,
    kind: &Kind,
    frontends: &[(String, SocketAddr)],
    names: &Names,
) -> Vec<(Question, String)> {
    let mut all = Vec::new();
    for (frontend, address) in frontends {
        // The network outside has no route to ClusterIPs.
        if client.name == OUTSIDE && frontend == "ClusterIP" {
            continue;
        }
        for protocol in PROTOCOLS {
            let question = Question {
                service: kind.name.to_owned(),
                frontend: frontend.clone(),
                client: client.name.clone(),
                protocol: protocol.name(*address),
            };
            all.push((question, ask(protocol, *address, kind.affinity, names)));
        }
    }
    all
}

/// Returns the frontends of a Service by name.
fn frontends(nodes: &[Node], kind: &Kind, service: &Value) -> Result<Vec<(String, SocketAddr)>> {
    let mut all = Vec::new();
    let cluster_ips = service["spec"]["clusterIPs"].as_array();
    for ip in cluster_ips.context("a Service without ClusterIPs")? {
        let ip: IpAddr = ip.as_str().context("a ClusterIP")?.parse()?;
        all.push(("ClusterIP".to_owned(), (ip, PORT).into()));
    }
    // The first node has the backend, and the second has none.
    for node in nodes {
        let ips = kind.virtual_ips(node);
        for (what, ips, port) in [
            (
                "NodePort of",
                [node.ipv4.into(), node.ipv6.into()],
                kind.node_port(),
            ),
            ("LoadBalancer by", ips.load_balancer, PORT),
            ("ExternalIP by", ips.external, PORT),
        ] {
            let name = format!("{what} {}", node.name);
            all.extend(ips.map(|ip| (name.clone(), (ip, port).into())));
        }
    }
    Ok(all)
}

/// Returns the names of the addresses that a backend can see.
fn names(state: &State, nodes: &[Node]) -> Result<Names> {
    let mut names = BTreeMap::from(network::OUTSIDE.map(|ip| (ip, OUTSIDE.to_owned())));
    for node in nodes {
        for gateway in node.gateways() {
            names.insert(gateway, format!("the gateway of {}", node.name));
        }
        names.insert(node.ipv4.into(), node.name.clone());
        names.insert(node.ipv6.into(), node.name.clone());
    }
    let pods: Value = serde_json::from_str(&kubectl(state, &["get", "pods", "--output=json"])?)
        .context("read kubectl's list of pods")?;
    for pod in pods["items"].as_array().into_iter().flatten() {
        let name = pod["metadata"]["name"].as_str().context("a pod's name")?;
        for ip in pod["status"]["podIPs"].as_array().into_iter().flatten() {
            let ip = ip["ip"].as_str().context("a pod's address")?.parse()?;
            // A pod in its node's network has the node's name.
            names.entry(ip).or_insert_with(|| format!("pod {name}"));
        }
    }
    Ok(names)
}
