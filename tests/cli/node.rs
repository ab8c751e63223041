//! A node in its own namespace, with kpx and a small cluster.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Output;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, Source, kpx, run, wait_until};
use testbed::netns::NetNs;

/// Returns a namespace with eth0 (192.0.2.1/24), a default route and forwarding.
pub(crate) fn namespace(name: &str) -> Result<NetNs> {
    let ns = NetNs::machine_v4(&format!("cli-{name}"))?;
    ns.ip("route add default via 192.0.2.254")?;
    ns.run(|| fs::write("/proc/sys/net/ipv4/ip_forward", "1"))?;
    Ok(ns)
}

/// A node with a running kpx.
pub(crate) struct Node {
    agent: Agent<'static>,
}

impl Node {
    /// Starts kpx with the cluster's manifests, and waits until it is healthy.
    pub(crate) fn start(name: &str, arguments: &str) -> Result<Self> {
        let typo = "apiVersion: v1\nkind: Service\nmetadata: {nam: typo}\n";
        // The document shows these sizes; their defaults depend on the machine.
        let arguments =
            format!("{arguments} --service-table-size 65536 --endpoint-table-size 262144");
        let agent = Agent::start_alone(
            namespace(name)?,
            &[("cluster", CLUSTER), ("typo", typo)],
            &arguments,
        )?;
        let is_healthy = || {
            Ok(kpx(
                agent.ns(),
                &format!("status --run-dir {}", agent.run_dir().display()),
            )?
            .status
            .success())
        };
        wait_until(DEADLINE, "kpx is healthy", is_healthy).with_context(|| agent.log())?;
        Ok(Self { agent })
    }

    /// Starts kpx after the end of the previous one, and waits until it is healthy.
    pub(crate) fn again(&self) -> Result<Agent<'_>> {
        let command = run(
            "n1",
            Source::Manifests(&self.agent.manifests()?),
            self.run_dir(),
            self.ns(),
        )?;
        Agent::spawn(
            self.ns(),
            command,
            self.run_dir(),
            &self.run_dir().join("again.log"),
        )?
        .healthy()
    }

    pub(crate) fn ns(&self) -> &NetNs {
        self.agent.ns()
    }

    pub(crate) fn run_dir(&self) -> &Path {
        self.agent.run_dir()
    }

    pub(crate) fn log(&self) -> String {
        self.agent.log()
    }

    /// Writes a manifest into the agent's folder.
    pub(crate) fn put(&self, name: &str, manifest: &str) -> Result<()> {
        self.agent.put(name, manifest)
    }

    /// Returns the completion script of kpx for a shell.
    pub(crate) fn script(&self, shell: &str) -> Result<String> {
        Ok(String::from_utf8(
            kpx(self.ns(), &format!("completions {shell}"))?.stdout,
        )?)
    }

    /// Runs a command of kpx against this node's agent.
    pub(crate) fn kpx(&self, arguments: &str) -> Result<Output> {
        kpx(
            self.ns(),
            &format!("{arguments} --run-dir {}", self.agent.run_dir().display()),
        )
    }

    /// Returns the output of a command that must succeed.
    pub(crate) fn text(&self, arguments: &str) -> Result<String> {
        let output = self.kpx(arguments)?;
        ensure!(output.status.success(), "kpx {arguments}: {output:?}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Opens a connection to the Service web. Both sockets must live as long as the connection.
    pub(crate) fn connect(&self) -> Result<(TcpStream, TcpStream)> {
        self.ns().run(|| {
            let listener = TcpListener::bind("192.0.2.1:8080")?;
            let mut client = TcpStream::connect("10.96.0.10:80")?;
            let (mut server, _) = listener.accept()?;
            client.write_all(b"?")?;
            server.read_exact(&mut [0])?;
            server.write_all(b"!")?;
            client.read_exact(&mut [0])?;
            Ok((client, server))
        })
    }

    /// Kills kpx.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.agent.kill()
    }
}

pub(crate) const CLUSTER: &str = r#"
apiVersion: v1
kind: Node
metadata: {name: n1, labels: {topology.kubernetes.io/zone: a}}
status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop, creationTimestamp: "2126-01-01T00:00:00Z", labels: {app: web, tier: front}}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10]
  ipFamilies: [IPv4]
  externalIPs: [198.51.100.7]
  externalTrafficPolicy: Local
  healthCheckNodePort: 31080
  sessionAffinity: ClientIP
  ports: [{name: http, port: 80, nodePort: 30080}]
status: {loadBalancer: {ingress: [{ip: 203.0.113.7}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints:
- addresses: [192.0.2.1]
  nodeName: n1
  zone: a
  targetRef: {kind: Pod, name: web-0, namespace: shop}
- addresses: [10.244.2.5]
  nodeName: n2
  zone: b
  conditions: {ready: false, serving: true, terminating: true}
  targetRef: {kind: Pod, name: web-1, namespace: shop}
- addresses: [10.244.2.6]
  conditions: {ready: false, serving: false, terminating: false}
ports: [{name: http, port: 8080}]
---
apiVersion: v1
kind: Service
metadata: {name: web-old, namespace: shop, labels: {app: web, tier: old}}
spec:
  type: NodePort
  clusterIP: 10.96.0.11
  clusterIPs: [10.96.0.11]
  ipFamilies: [IPv4]
  ports: [{port: 80, nodePort: 30080}]
---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system}
spec:
  clusterIP: 10.96.0.53
  clusterIPs: [10.96.0.53]
  ipFamilies: [IPv4]
  ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: kube-dns-1, namespace: kube-system, labels: {kubernetes.io/service-name: kube-dns}}
addressType: IPv4
endpoints:
- {addresses: [10.244.2.9], nodeName: n2, zone: b, targetRef: {kind: Pod, name: dns-0, namespace: kube-system}}
ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53}]
"#;
