//! A host outside of the cluster that reaches three Services by kpx, each in another way, and a pod
//! by kubectl.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::mem;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use testbed::agent::{Agent, Cluster, DEADLINE, Object, Service, Source, binary, wait_until};
use testbed::lab::{Family, Host, Lab};
use testbed::netns::NetNs;

use super::Way;
use super::kubectl::Forward;
use super::server::{ECHO, SWALLOW, Server};
use crate::bench::{Mode, Slice, Work, exchange, pinned, write_block};

/// The port of the pods' servers.
pub(super) const PORT: u16 = 8080;
const NODE_PORT: u16 = 30_080;
/// The pods of n1, by how the host reaches them.
const ROUTED: &str = "p1a";
const WITH_NODE_PORT: &str = "p1b";
pub(super) const TUNNELLED: &str = "p1c";
/// How long connection tracking remembers a connection that was closed, in seconds.
const TIME_WAIT: &str = "10";

pub(super) struct Fixture<'a> {
    lab: &'a Lab,
    // Agents end before the API server.
    outside: Agent<'a>,
    _node: Agent<'a>,
    cluster: Cluster,
    servers: [(&'static str, Server); 3],
}

impl<'a> Fixture<'a> {
    pub(super) fn start(lab: &'a Lab) -> Result<Self> {
        let cluster = Cluster::with_api_server(lab)?;
        for (way, pod) in [
            (Way::Route, ROUTED),
            (Way::NodePort, WITH_NODE_PORT),
            (Way::Tunnel, TUNNELLED),
        ] {
            service(way, pod)
                .objects(lab)
                .iter()
                .try_for_each(|object| cluster.put(object))?;
        }
        cluster.put(&pod(lab.host(TUNNELLED)))?;
        cluster.reach(lab, &[TUNNELLED])?;
        let host = &lab.xl;
        let n1 = &lab.n1.host;
        let route = |family| {
            format!(
                "route add {} via {}",
                lab.host(ROUTED).addrs.ip(family),
                n1.addrs.ip(family)
            )
        };
        host.ns.ip(&Family::ALL.map(route).join("\n"))?;
        // A client that closes thousands of connections a second uses their ports again after one.
        host.ns.sysctl("ipv4/tcp_tw_reuse", "1")?;
        n1.ns
            .sysctl("netfilter/nf_conntrack_tcp_timeout_time_wait", TIME_WAIT)?;
        let server = |pod| anyhow::Ok((pod, Server::start(lab.host(pod))?));
        let servers = [server(ROUTED)?, server(WITH_NODE_PORT)?, server(TUNNELLED)?];
        let node = Agent::start(lab, &lab.n1, cluster.source())?;
        let outside = Agent::start_outside(lab, host, cluster.source(), &["--tunnel", "tcp"])?;
        let fixture = Self {
            lab,
            outside,
            _node: node,
            cluster,
            servers,
        };
        fixture.prove()?;
        Ok(fixture)
    }

    /// The host outside of the cluster.
    pub(super) fn host(&self) -> &'a Host {
        &self.lab.xl
    }

    pub(super) fn lab(&self) -> &'a Lab {
        self.lab
    }

    pub(super) fn kubeconfig(&self) -> &Path {
        match self.cluster.source() {
            Source::Kubeconfig(path) | Source::Manifests(path) => path,
        }
    }

    /// Waits until kpx says of each Service that it is reached by its way, and by no other.
    fn prove(&self) -> Result<()> {
        for (way, expected) in [
            (Way::Route, "direct"),
            (Way::NodePort, "node port"),
            (Way::Tunnel, "tunnel"),
        ] {
            let mut ways = BTreeSet::new();
            wait_until(DEADLINE, "a Service is reached by its way", || {
                ways = self.ways(name(way))?;
                Ok(ways.len() == 1 && ways.contains(expected))
            })
            .with_context(|| format!("{way}: {ways:?}"))?;
        }
        Ok(())
    }

    /// Returns the ways to the backends of a Service's TCP port, as `kpx backends` has them.
    fn ways(&self, service: &str) -> Result<BTreeSet<String>> {
        let mut command = Command::new(binary()?);
        command
            .args(["backends", "--output", "json", "--run-dir"])
            .arg(self.outside.run_dir());
        let text = self.host().ns.exec(&mut command)?;
        let rows: Vec<Value> =
            serde_json::from_str(&text).with_context(|| format!("read {text}"))?;
        let of_port = rows
            .iter()
            .filter(|row| row["service"] == service && row["protocol"] == "TCP");
        Ok(of_port
            .map(|row| row["way"].as_str().unwrap_or_default().to_owned())
            .collect())
    }

    /// Returns a client for each way, with connections that stay open.
    pub(super) fn clients(&self, kubectl: Option<&Forward>) -> Result<Vec<Client<'a>>> {
        let ways = Way::ALL
            .into_iter()
            .filter(|way| *way != Way::Kubectl || kubectl.is_some());
        ways.map(|way| self.client(way, kubectl).with_context(|| way.to_string()))
            .collect()
    }

    fn client(&self, way: Way, kubectl: Option<&Forward>) -> Result<Client<'a>> {
        let (pod, to) = match (way, kubectl) {
            (Way::Kubectl, Some(forward)) => (TUNNELLED, forward.at),
            (Way::Kubectl, None) => bail!("no kubectl listens"),
            (Way::Route, _) => (ROUTED, service(way, ROUTED).frontend(Family::V4)),
            (Way::NodePort, _) => (
                WITH_NODE_PORT,
                service(way, WITH_NODE_PORT).frontend(Family::V4),
            ),
            (Way::Tunnel, _) => (TUNNELLED, service(way, TUNNELLED).frontend(Family::V4)),
        };
        let (_, server) = self
            .servers
            .iter()
            .find(|(name, _)| *name == pod)
            .context("the pod has no server")?;
        Client::open(way, [&self.host().ns, &self.lab.host(pod).ns], to, server)
    }

    /// Checks that the connections of the ways through the API server were led by the programs that
    /// the figures are of.
    pub(super) fn check(&self, clients: &[Client<'_>], kubectl: Option<&Forward>) -> Result<()> {
        for Client {
            way, connections, ..
        } in clients
        {
            let led = match (way, kubectl) {
                (Way::Tunnel, _) => self.outside.status()?["tunnel"]["opened"]
                    .as_u64()
                    .context("a tunnel")?,
                (Way::Kubectl, Some(forward)) => forward.connections()?,
                _ => continue,
            };
            ensure!(
                led >= *connections,
                "{way}: {led} connections of {connections}"
            );
        }
        Ok(())
    }
}

fn name(way: Way) -> &'static str {
    match way {
        Way::Route => "routed",
        Way::NodePort => "with-node-port",
        Way::Tunnel | Way::Kubectl => "tunnelled",
    }
}

/// Returns the Service by which the host reaches a pod in that way.
fn service(way: Way, pod: &'static str) -> Service {
    let service = |nth| Service::new(name(way), nth, &[pod], PORT);
    match way {
        Way::Route => service(10),
        Way::NodePort => service(11).node_port(NODE_PORT),
        Way::Tunnel | Way::Kubectl => service(12),
    }
}

/// Returns the object of a pod that runs, for which kubectl looks.
fn pod(host: &Host) -> Object {
    Object(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": host.name, "namespace": "default" },
        "spec": { "nodeName": "n1", "containers": [{ "name": "server", "image": "server" }] },
        "status": { "phase": "Running", "podIP": host.addrs.v4, "podIPs": [{ "ip": host.addrs.v4 }] },
    }))
}

/// A client that goes one way.
pub(super) struct Client<'a> {
    pub(super) way: Way,
    /// The connections of slices so far.
    connections: u64,
    slice: Slice<'a>,
    /// A connection whose bytes are answered.
    echoed: TcpStream,
    /// A connection whose bytes are counted.
    swallowed: TcpStream,
    /// The bytes that the pod has read from all such connections.
    received: Arc<AtomicU64>,
}

impl<'a> Client<'a> {
    fn open(
        way: Way,
        [client, server_in]: [&'a NetNs; 2],
        to: SocketAddr,
        server: &Server,
    ) -> Result<Self> {
        let slice = Slice {
            client,
            to,
            server: server_in,
            at: server.at,
            length: Duration::ZERO,
        };
        // A path through the API server may come a moment after its agent knows of the Service.
        wait_until(DEADLINE, "the pod answers", || Ok(slice.is_served()))?;
        let mut echoed = client.run(|| slice.connect())?;
        echoed.write_all(&[ECHO])?;
        echoed.read_exact(&mut [0]).context("wait for an answer")?;
        // Only now: the server waits for the first byte of one connection before it takes another.
        let mut swallowed = client.run(|| slice.connect())?;
        swallowed.write_all(&[SWALLOW])?;
        let received = server.swallowed.clone();
        Ok(Self {
            way,
            connections: 0,
            slice,
            echoed,
            swallowed,
            received,
        })
    }

    /// Measures a slice.
    pub(super) fn run(&mut self, mode: Mode, length: Duration) -> Result<Work> {
        let slice = Slice {
            length,
            ..self.slice
        };
        match mode {
            Mode::TcpCrr => {
                let work = pinned(|| slice.client.run(|| slice.connect_request_response()))?;
                self.connections += work.amount;
                Ok(work)
            }
            Mode::TcpRr => pinned(|| slice.timed(|| exchange(&mut self.echoed).map(|()| 1))),
            Mode::TcpStream => self.stream(&slice),
            _ => bail!("{mode} is not measured here"),
        }
    }

    /// Counts the bytes that the pod reads. What waits on the way is read before the next slice
    /// begins.
    fn stream(&mut self, slice: &Slice<'_>) -> Result<Work> {
        let read = || self.received.load(Ordering::Relaxed);
        let before = read();
        let mut sent = 0;
        let mut last = before;
        let work = pinned(|| {
            slice.timed(|| {
                sent += write_block(&mut self.swallowed)?;
                let now = read();
                Ok(now - mem::replace(&mut last, now))
            })
        })?;
        wait_until(DEADLINE, "the pod has read all", || {
            Ok(read() - before == sent)
        })?;
        Ok(work)
    }
}
