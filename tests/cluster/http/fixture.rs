//! A kpx with an API server, in a network namespace of their own, asked by HTTP.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::agent::{Agent, Source};
use testbed::apiserver::{ApiServer, Options};
use testbed::exposition::{self, Exposition};
use testbed::netns::NetNs;

pub(crate) const DEADLINE: Duration = Duration::from_secs(20);
pub(crate) const HEALTH: &str = "127.0.0.1:10256";
pub(crate) const METRICS: &str = "127.0.0.1:10249";

/// A network namespace with an API server that has the node `n1`.
pub(crate) struct Fixture {
    pub(crate) ns: NetNs,
    pub(crate) api: ApiServer,
    dir: TempDir,
}

/// An answer by HTTP.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    /// The headers as they were sent, without `Date`.
    pub(crate) headers: Vec<String>,
    pub(crate) body: String,
}

impl Fixture {
    pub(crate) fn start(name: &str) -> Result<Self> {
        let ns = NetNs::create(format!("kpx-{}-{name}", std::process::id()))?;
        let dir = TempDir::with_prefix("kpx-")?;
        let listener = ns.run(|| TcpListener::bind("127.0.0.1:6443")).context("listen for the API server")?;
        let api = ApiServer::start(Options::on(listener))?;
        api.kubeconfig(&dir.path().join("kubeconfig"))?;
        api.apply(&node(&json!([])))?;
        Ok(Self { ns, api, dir })
    }

    /// Starts kpx, and waits until it answers `kpx status`.
    pub(crate) fn kpx(&self, arguments: &str) -> Result<Agent<'_>> {
        self.spawn(arguments)?.answering()
    }

    /// Starts kpx, and waits until it is healthy.
    pub(crate) fn healthy_kpx(&self, arguments: &str) -> Result<Agent<'_>> {
        self.spawn(arguments)?.healthy()
    }

    /// Starts kpx, with a new log.
    pub(crate) fn spawn(&self, arguments: &str) -> Result<Agent<'_>> {
        let dir = self.dir.path();
        let _old = fs::remove_file(dir.join("log"));
        Agent::launch_in(&self.ns, Source::Kubeconfig(&dir.join("kubeconfig")), dir, arguments)
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    pub(crate) fn get(&self, at: &str, path: &str) -> Result<Answer> {
        self.ask(at, "GET", path)
    }

    pub(crate) fn ask(&self, at: &str, method: &str, path: &str) -> Result<Answer> {
        let to: SocketAddr = at.parse()?;
        let stream = self.ns.run(|| TcpStream::connect_timeout(&to, DEADLINE)).with_context(|| at.to_owned())?;
        stream.set_read_timeout(Some(DEADLINE))?;
        converse(stream, method, path).with_context(|| format!("{method} {at}{path}"))
    }

    pub(crate) fn scrape(&self) -> Result<Exposition> {
        let answer = self.get(METRICS, "/metrics")?;
        ensure!(answer.code == 200, "{answer:?}");
        exposition::parse(&answer.body)
    }
}

/// Asks an agent at the socket in its run directory.
pub(crate) fn ask_at_socket(kpx: &Agent, path: &str) -> Result<Answer> {
    converse(UnixStream::connect(kpx.run_dir().join("kpx.sock"))?, "GET", path)
}

fn converse(mut stream: impl Read + Write, method: &str, path: &str) -> Result<Answer> {
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").with_context(|| format!("no end of the header: {answer}"))?;
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).context("no status line")?;
    let headers = lines.filter(|line| !line.starts_with("Date: ")).map(str::to_owned).collect();
    Ok(Answer { code: status.parse()?, headers, body: body.to_owned() })
}

pub(crate) fn node(taints: &Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": "n1" },
        "spec": { "taints": taints },
        "status": { "addresses": [{ "type": "InternalIP", "address": "192.0.2.1" }] },
    })
}

/// A Service of both families, whose internal traffic stays on its node if `local`.
pub(crate) fn service(name: &str, nth: u8, local: bool) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "clusterIP": format!("10.96.0.{nth}"),
            "clusterIPs": [format!("10.96.0.{nth}"), format!("fd00:96::{nth}")],
            "ipFamilies": ["IPv4", "IPv6"],
            "ipFamilyPolicy": "RequireDualStack",
            "internalTrafficPolicy": if local { "Local" } else { "Fixture" },
            "ports": [{ "port": 80, "protocol": "TCP" }],
        },
    })
}

/// An IPv4 slice with an endpoint on another node, `changed` at a time in RFC 3339.
pub(crate) fn slice(service: &str, nth: u8, changed: &str) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": format!("{service}-ipv4"),
            "namespace": "default",
            "labels": { "kubernetes.io/service-name": service },
            "annotations": { "endpoints.kubernetes.io/last-change-trigger-time": changed },
        },
        "addressType": "IPv4",
        "endpoints": [{ "addresses": [format!("10.244.1.{nth}")], "nodeName": "n2", "conditions": { "ready": true } }],
        "ports": [{ "name": "", "port": 8080, "protocol": "TCP" }],
    })
}
