//! A single node: a network namespace with an API server on lo, where kpx runs as n1.

use std::fs;
use std::net::TcpListener;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::agent::{Agent, Source};
use crate::apiserver::{ApiServer, Options};
use crate::exposition::Exposition;
use crate::http::{self, Answer};
use crate::netns::NetNs;

#[derive(Debug)]
pub struct WatchedNode {
    pub api: ApiServer,
    pub ns: NetNs,
    dir: TempDir,
}

impl WatchedNode {
    /// Starts an empty API server in a namespace.
    pub fn new(ns: NetNs) -> Result<Self> {
        let listener = ns
            .run(|| TcpListener::bind("127.0.0.1:6443"))
            .context("listen for the API server")?;
        let dir = TempDir::with_prefix("kpx-")?;
        let api = ApiServer::start(Options::on(listener))?;
        api.kubeconfig(&dir.path().join("kubeconfig"))?;
        Ok(Self { api, ns, dir })
    }

    /// Creates or replaces an object.
    pub fn put(&self, object: &Value) -> Result<Value> {
        self.api.apply(object)
    }

    /// Starts kpx with a new log. kpx may end at once.
    pub fn spawn(&self, arguments: &str) -> Result<Agent<'_>> {
        let dir = self.dir.path();
        let _old = fs::remove_file(dir.join("log"));
        Agent::launch_in(
            &self.ns,
            Source::Kubeconfig(&dir.join("kubeconfig")),
            dir,
            arguments,
        )
    }

    /// Starts kpx, and waits until it answers `kpx status`.
    pub fn kpx(&self, arguments: &str) -> Result<Agent<'_>> {
        self.spawn(arguments)?.answering()
    }

    /// Starts kpx, and waits until it is healthy.
    pub fn healthy_kpx(&self, arguments: &str) -> Result<Agent<'_>> {
        self.spawn(arguments)?.healthy()
    }

    /// Returns the log of kpx, also after its end.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    pub fn get(&self, at: &str, path: &str) -> Result<Answer> {
        http::ask(&self.ns, at, "GET", path)
    }

    pub fn scrape(&self) -> Result<Exposition> {
        http::scrape(&self.ns)
    }
}

/// Returns the Node n1 with these addresses.
pub fn node(addresses: &[&str]) -> Value {
    let addresses: Vec<_> = addresses
        .iter()
        .map(|ip| json!({ "type": "InternalIP", "address": ip }))
        .collect();
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" }, "status": { "addresses": addresses } })
}

/// Returns a dual-stack Service with one port and the `nth` addresses of the service network.
pub fn service(name: &str, nth: u8, protocol: &str, port: u16) -> Value {
    let ips = [format!("10.96.0.{nth}"), format!("fd00:96::{nth:x}")];
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "type": "ClusterIP", "clusterIP": ips[0], "clusterIPs": ips, "ipFamilies": ["IPv4", "IPv6"],
            "ipFamilyPolicy": "RequireDualStack", "ports": [{ "port": port, "protocol": protocol }],
        },
    })
}

/// Returns a slice with one endpoint of `service`.
pub fn slice(service: &str, address: &str, protocol: &str, port: u16) -> Value {
    let family = if address.contains(':') {
        "IPv6"
    } else {
        "IPv4"
    };
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": format!("{service}-{}", family.to_lowercase()), "namespace": "default",
            "labels": { "kubernetes.io/service-name": service },
        },
        "addressType": family,
        "endpoints": [{ "addresses": [address], "conditions": { "ready": true } }],
        "ports": [{ "port": port, "protocol": protocol, "name": "" }],
    })
}
