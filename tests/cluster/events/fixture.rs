//! A node in a namespace of its own, its API server, and kpx on it.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use proxy_agent::status::Status;
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::agent::{Agent, Source, wait_until};
use testbed::apiserver::{ApiServer, Options};
use testbed::netns::NetNs;

pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) struct Fixture {
    pub(crate) api: ApiServer,
    pub(crate) node: NetNs,
    dir: TempDir,
}

impl Fixture {
    /// A node of the name n1 at 192.0.2.1 and fd00::1, without an object as yet. `wire` is the other end of its eth0.
    pub(crate) fn new() -> Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let node = NetNs::machine(&format!("events{}", MADE.fetch_add(1, Ordering::Relaxed)))?;
        let listener = node.run(|| TcpListener::bind(("127.0.0.1", 6443))).context("listen on the node")?;
        let dir = TempDir::with_prefix("kpx-")?;
        let api = ApiServer::start(Options::on(listener))?;
        api.kubeconfig(&dir.path().join("kubeconfig"))?;
        Ok(Self { api, node, dir })
    }

    /// With the node's object.
    pub(crate) fn with_node() -> Result<Self> {
        let fixture = Self::new()?;
        fixture.put(&node(&["192.0.2.1", "fd00::1"]))?;
        Ok(fixture)
    }

    pub(crate) fn put(&self, object: &Value) -> Result<Value> {
        self.api.apply(object)
    }

    /// Starts kpx, and waits until it answers.
    pub(crate) fn start(&self, arguments: &str) -> Result<Agent<'_>> {
        self.spawn(arguments)?.answering()
    }

    /// Starts kpx, which may end at once.
    pub(crate) fn spawn(&self, arguments: &str) -> Result<Agent<'_>> {
        let dir = self.dir.path();
        // The size of the connection table belongs to the machine, and no test changes it.
        let arguments = format!("{arguments} --conntrack-max-per-core 0");
        Agent::launch_in(&self.node, Source::Kubeconfig(&dir.join("kubeconfig")), dir, &arguments)
    }

    /// Starts kpx, and waits until it is healthy.
    pub(crate) fn start_healthy(&self, arguments: &str) -> Result<Agent<'_>> {
        self.spawn(arguments)?.healthy()
    }

    /// Returns the Events, in the order of their first times.
    pub(crate) fn events(&self) -> Vec<Value> {
        let mut events = self.api.list("events.events.k8s.io");
        events.sort_by_key(|event| event["eventTime"].to_string());
        events
    }

    /// Waits until something is told for this reason, and that `holds`.
    pub(crate) fn told(&self, reason: &str, holds: impl Fn(&Value) -> bool) -> Result<Value> {
        let find = || self.events().into_iter().find(|event| event["reason"] == reason && holds(event));
        wait_until(DEADLINE, &format!("{reason} is told"), || Ok(find().is_some()))
            .with_context(|| format!("told: {:#?}\n{}", self.events(), self.log()))?;
        find().context("an event that stays")
    }

    /// Returns the answer to `/metrics`.
    pub(crate) fn metrics(&self) -> Result<String> {
        let ask = || {
            let mut stream = TcpStream::connect(("127.0.0.1", 10249))?;
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: kpx\r\nConnection: close\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        self.node.run(ask)
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }
}

/// Waits until the agent tells of a problem, in its status.
pub(crate) fn wait_problem(kpx: &Agent, what: &str, why: &str) -> Result<()> {
    let is_it =
        |status: &Status| status.problems.iter().any(|problem| problem.what == what && problem.why.contains(why));
    kpx.wait(DEADLINE, why, is_it)
}

/// Waits until the agent ends by itself, with 1 and for this reason.
pub(crate) fn fails(mut kpx: Agent, why: &str) -> Result<()> {
    let (status, log) = (kpx.ended(DEADLINE)?, kpx.log());
    ensure!(status.code() == Some(1) && log.contains(why), "{status}, and not {why:?}: {log}");
    Ok(())
}

pub(crate) fn node(addresses: &[&str]) -> Value {
    let addresses: Vec<_> = addresses.iter().map(|ip| json!({ "type": "InternalIP", "address": ip })).collect();
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" }, "status": { "addresses": addresses } })
}

/// A Service of one UDP port in both families: `nth` of the service network, port 53.
pub(crate) fn service(name: &str, nth: u8) -> Value {
    let ips = [format!("10.96.0.{nth}"), format!("fd00:96::{nth:x}")];
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "type": "ClusterIP", "clusterIP": ips[0], "clusterIPs": ips, "ipFamilies": ["IPv4", "IPv6"],
            "ipFamilyPolicy": "RequireDualStack", "ports": [{ "port": 53, "protocol": "UDP" }],
        },
    })
}

/// An endpoint of `service` at port 5353.
pub(crate) fn slice(service: &str, address: &str) -> Value {
    let family = if address.contains(':') { "IPv6" } else { "IPv4" };
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": format!("{service}-{}", family.to_lowercase()), "namespace": "default",
            "labels": { "kubernetes.io/service-name": service },
        },
        "addressType": family,
        "endpoints": [{ "addresses": [address], "conditions": { "ready": true } }],
        "ports": [{ "port": 5353, "protocol": "UDP", "name": "" }],
    })
}
