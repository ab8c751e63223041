//! Two nodes, Services of every kind, and an agent on the first node with socket load balancing.

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::agent::{Agent, Service, binary};
use testbed::apiserver::ApiServer;
use testbed::cgroup::Cgroup;
use testbed::echo::{Connection, Dial, Protocol};
use testbed::lab::{Family, Host, Layout};
use testbed::served_lab::ServedLab;

/// The timeout of an answer that must not come.
pub(crate) const SILENCE: Duration = Duration::from_millis(400);
pub(crate) const NODE: &str = "n1";
pub(crate) const PORT: u16 = 8080;
pub(crate) const NODE_PORT: u16 = 30_080;

pub(crate) struct Fixture {
    base: ServedLab,
    // Drops after the agents, which are in the cgroup too.
    pub(crate) cgroup: Cgroup,
}

is_its_lab!(Fixture);

/// The outcome of a connection.
pub(crate) struct Reached {
    pub(crate) backend: String,
    /// The socket programs translated the connection: the backend sees the address and port of the
    /// client's socket. (The packet path always draws another port for the host's flows.)
    pub(crate) is_translated: bool,
    pub(crate) connection: Connection,
}

impl Fixture {
    pub(crate) fn start() -> Result<Self> {
        Self::of(Layout::Routed)
    }

    pub(crate) fn of(layout: Layout) -> Result<Self> {
        let cgroup = Cgroup::enter()?;
        Self::on(cgroup, ServedLab::with_manifests(layout)?)
    }

    /// Makes the same fixture with an API server, which has Pods.
    pub(crate) fn with_api_server(layout: Layout) -> Result<Self> {
        let cgroup = Cgroup::enter()?;
        Self::on(cgroup, ServedLab::with_api_server(layout)?)
    }

    fn on(cgroup: Cgroup, lab: ServedLab) -> Result<Self> {
        let base = lab.serve(&["p1a", "p1b", "p2a", "p2b", NODE], PORT)?;
        base.put(&web())?;
        Ok(Self { base, cgroup })
    }

    /// Serves another port of a host.
    pub(crate) fn serve(&self, host: &Host, port: u16) -> Result<()> {
        self.base.servers.serve(host, port)
    }

    /// Returns the API server, to inject faults.
    pub(crate) fn api(&mut self) -> Result<&mut ApiServer> {
        self.base.cluster.server()
    }

    /// Starts the agent with socket load balancing in this test's cgroup.
    pub(crate) fn agent(&self, scope: &str, args: &[&str]) -> Result<Agent<'_>> {
        let cgroup = self.cgroup.path().display().to_string();
        self.kpx(&[&["--socket-lb", scope, "--cgroup-root", &cgroup], args].concat())
    }

    /// Dials from a host, exchanges a message, and checks that the socket's peer is the dialled
    /// address.
    pub(crate) fn reach(
        &self,
        client: &str,
        protocol: Protocol,
        to: SocketAddr,
    ) -> Result<Reached> {
        let connection = Dial::new(protocol, to).connect(&self.lab.host(client).ns);
        let mut connection =
            connection.with_context(|| format!("{client} connects to {to} by {protocol}"))?;
        let answer = connection
            .exchange(b"hello")
            .with_context(|| format!("{client} to {to} by {protocol}"))?;
        let [local, peer] = connection.ends()?;
        ensure!(
            peer == to,
            "{client} has dialled {to} by {protocol}, and its peer is {peer}"
        );
        let local = SocketAddr::new(local.ip().to_canonical(), local.port());
        Ok(Reached {
            backend: answer.backend,
            is_translated: answer.source == local,
            connection,
        })
    }

    /// Like [`Self::reach`], and checks that the socket was translated if and only if `want`.
    pub(crate) fn reaches(
        &self,
        client: &str,
        protocol: Protocol,
        to: SocketAddr,
        want: bool,
    ) -> Result<Reached> {
        let reached = self.reach(client, protocol, to)?;
        ensure!(
            reached.is_translated == want,
            "{client} to {to} by {protocol}: translated: {}, not {want}",
            reached.is_translated
        );
        Ok(reached)
    }

    /// Returns the notes of `kpx trace` on a packet from a client to the frontend of [`web`].
    pub(crate) fn notes(&self, agent: &Agent, from: &[&str], proto: &str) -> Result<Vec<String>> {
        let mut command = Command::new(binary()?);
        command
            .args(["trace", "--output", "json", "--run-dir"])
            .arg(agent.run_dir())
            .args(from);
        command
            .arg("--to")
            .arg(format!("{}/{proto}", web().frontend(Family::V4)));
        let trace: Value = serde_json::from_str(&self.lab.host(NODE).ns.exec(&mut command)?)?;
        Ok(serde_json::from_value(trace["notes"].clone())?)
    }

    /// Returns one of the node's own addresses.
    pub(crate) fn node_at(&self, family: Family, port: u16) -> SocketAddr {
        (self.lab.host(NODE).addrs.ip(family), port).into()
    }
}

/// Returns a Service with backends on both nodes, and a node port.
pub(crate) fn web() -> Service {
    Service::new("web", 10, &["p1b", "p2a"], PORT).node_port(NODE_PORT)
}

/// Returns a counter of the agent's status. `what` is `events` or `reasons`.
pub(crate) fn count(agent: &Agent, what: &str, name: &str) -> Result<u64> {
    Ok(agent.status()?[what][name].as_u64().unwrap_or_default())
}
