//! The network namespaces of pods, nodes and the machine outside, for clients in this process.

use std::fs::{self, File};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, anyhow, bail};
use nix::sched::{CloneFlags, setns};
use serde_json::Value;

use crate::command::output;
use crate::network;
use crate::state::State;

/// A client: its network namespace, and the addresses that it dials.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) name: String,
    /// The node of the client, or `x`.
    host: String,
    namespace: PathBuf,
    pub(crate) targets: Vec<SocketAddr>,
}

impl Client {
    /// Moves this thread into the namespace.
    pub(crate) fn enter(&self) -> Result<()> {
        let namespace = File::open(&self.namespace)
            .with_context(|| format!("open {}", self.namespace.display()))?;
        setns(namespace, CloneFlags::CLONE_NEWNET)
            .with_context(|| format!("enter the namespace of {}", self.name))
    }

    /// Returns the client without its targets on a node; `None` for a client of that node.
    pub(crate) fn beside(mut self, node: &network::Node) -> Option<Self> {
        self.targets
            .retain(|target| ![IpAddr::from(node.ipv4), node.ipv6.into()].contains(&target.ip()));
        (self.host != node.name).then_some(self)
    }
}

/// Does the work of all clients at the same time, each in its namespace. Returns the results in the
/// order of the clients, or the first client's error.
pub(crate) fn in_each<T: Send>(
    clients: &[Client],
    work: impl Fn(&Client) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let work = &|client: &Client| {
        client.enter()?;
        work(client)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = clients
            .iter()
            .map(|client| scope.spawn(move || work(client)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a client panicked"))?)
            .collect()
    })
}

/// The name of the client outside the cluster.
pub(crate) const OUTSIDE: &str = "x";

/// Returns the client outside the cluster.
pub(crate) fn outside(state: &State, targets: &[SocketAddr]) -> Result<Client> {
    Ok(Client {
        name: OUTSIDE.to_owned(),
        host: OUTSIDE.to_owned(),
        namespace: format!("/proc/{}/root/run/netns/x", state.first()?).into(),
        targets: targets.to_vec(),
    })
}

/// Returns a port at both addresses of each node.
pub(crate) fn at_nodes(state: &State, port: u16) -> Result<Vec<SocketAddr>> {
    let nodes = network::nodes(u8::try_from(state.nodes.len())?);
    let both = |node: &network::Node| [(node.ipv4, port).into(), (node.ipv6, port).into()];
    Ok(nodes.iter().flat_map(both).collect())
}

/// Returns each node as a client.
pub(crate) fn nodes(state: &State, targets: &[SocketAddr]) -> Result<Vec<Client>> {
    let client = |name: &String| node(state, name, targets);
    state.nodes.iter().map(client).collect()
}

pub(crate) fn node(state: &State, name: &str, targets: &[SocketAddr]) -> Result<Client> {
    Ok(Client {
        name: name.to_owned(),
        host: name.to_owned(),
        namespace: format!("/proc/{}/ns/net", state.node_pid(name)?).into(),
        targets: targets.to_vec(),
    })
}

/// Returns the pods with a label as clients.
pub(crate) fn pods(
    state: &State,
    namespace: &str,
    label: &str,
    targets: &[SocketAddr],
) -> Result<Vec<Client>> {
    let text = output(state.kubectl().args([
        "--namespace",
        namespace,
        "get",
        "pods",
        "--selector",
        label,
        "--output=json",
    ]))?;
    let pods: Value = serde_json::from_str(&text).context("read kubectl's list of pods")?;
    let mut clients = Vec::new();
    for pod in pods["items"].as_array().into_iter().flatten() {
        let name = pod["metadata"]["name"].as_str().context("a pod's name")?;
        let field = |value: &Value, what: &str| {
            let value = value.as_str().map(str::to_owned);
            value.with_context(|| format!("pod {namespace}/{name} has no {what}"))
        };
        let node = field(&pod["spec"]["nodeName"], "node")?;
        let ip = field(&pod["status"]["podIP"], "address")?;
        clients.push(Client {
            name: format!("pod {name} of {node}"),
            namespace: namespace_of(state, &node, &ip)?,
            host: node,
            targets: targets.to_vec(),
        });
    }
    if clients.is_empty() {
        bail!("no pod in namespace {namespace} has the label {label}");
    }
    Ok(clients)
}

/// Finds a pod's network namespace by its address.
fn namespace_of(state: &State, node: &str, ip: &str) -> Result<PathBuf> {
    let folder = format!("/proc/{}/root/run/netns", state.node_pid(node)?);
    let entries = fs::read_dir(&folder).with_context(|| format!("read {folder}"))?;
    for entry in entries {
        let path = entry.with_context(|| format!("read {folder}"))?.path();
        if addresses(&path).is_some_and(|text| text.contains(&format!(" {ip}/"))) {
            return Ok(path);
        }
    }
    bail!("no namespace of {node} has {ip}")
}

fn addresses(namespace: &Path) -> Option<String> {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", namespace.display()));
    output(command.args(["ip", "-oneline", "addr"])).ok()
}
