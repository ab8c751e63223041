//! The migration from kube-proxy to kpx and back as docs/migration.md describes it, under load.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde_json::Value;

use crate::addons::{apply_text, deploy};
use crate::command::output;
use crate::images;
use crate::load::{Client, Load};
use crate::nodes;
use crate::parts::Parts;
use crate::state::State;
use crate::up::until;

const NAMESPACE: &str = "kpx-migration";
const NODE_PORT: u16 = 30080;

#[derive(Args)]
pub(crate) struct Options {
    /// An archive with kpx's image, as `cargo xtask dist` makes it
    #[arg(long)]
    image: PathBuf,
    /// The number of connections that each client keeps open
    #[arg(long, default_value_t = 56)]
    held: usize,
    /// The number of new connections and datagrams of each client in a second
    #[arg(long, default_value_t = 50)]
    rate: u32,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let state = State::running()?;
    ensure!(
        state.proxy.starts_with("kube-proxy"),
        "the cluster runs {}: start one with --proxy kube-proxy-nftables or kube-proxy-iptables",
        state.proxy
    );
    let parts = Parts::of(&state);
    for node in &state.nodes {
        output(&mut nodes::import(&parts, node, &options.image))?;
    }
    let manifests = include_str!("manifests/web.yaml");
    apply_text(
        &state,
        "web",
        &manifests.replace("AGNHOST", &images::agnhost(&parts)?),
    )?;
    for set in ["daemonset/web", "daemonset/client"] {
        kubectl(
            &state,
            &[
                "--namespace",
                NAMESPACE,
                "rollout",
                "status",
                set,
                "--timeout=60s",
            ],
        )?;
    }
    let clients = clients(&state)?;
    let load = Load::start(&clients, options.held, options.rate)?;
    let mut run = Run {
        state: &state,
        load: &load,
        failed: 0,
    };
    println!(
        "{} clients, each with {} open connections and {} new ones a second",
        clients.len(),
        options.held,
        options.rate
    );
    let result = run.steps(&parts);
    let failed = run.failed;
    load.stop()?;
    result?;
    println!("{failed} connections and datagrams failed");
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

struct Run<'a> {
    state: &'a State,
    load: &'a Load,
    failed: u64,
}

impl Run<'_> {
    fn steps(&mut self, parts: &Parts) -> Result<()> {
        let system = |args: &[&str]| {
            kubectl(self.state, &[&["--namespace=kube-system"], args].concat()).map(drop)
        };
        let kustomize = |verb: &str, folder: &str| {
            let folder = deploy(folder);
            let folder = folder.to_string_lossy();
            kubectl(self.state, &[verb, "-k", &folder]).map(drop)
        };
        let rolled_out = |set: &str| system(&["rollout", "status", set, "--timeout=180s"]);
        let state = self.state;
        let patch = deploy("kubeadm/kubeproxydaemonset.yaml");
        let patch = patch.to_string_lossy();
        let set = "daemonset/kube-proxy";

        // The clients open their connections meanwhile.
        sleep(Duration::from_secs(5));
        self.step("kube-proxy serves", || {
            sleep(Duration::from_secs(10));
            Ok(())
        })?;
        self.step("kpx's image in kube-proxy's DaemonSet", || {
            kustomize("apply", "kubernetes/way-back")?;
            system(&["patch", set, "--patch-file", &patch])?;
            rolled_out(set)
        })?;
        self.step("kube-proxy's rules removed", || {
            kustomize("apply", "kubernetes/kube-proxy-cleanup")?;
            rolled_out("daemonset/kpx-kube-proxy-cleanup")?;
            kustomize("delete", "kubernetes/kube-proxy-cleanup")
        })?;
        self.step("rollout restart", || {
            system(&["rollout", "restart", set])?;
            rolled_out(set)
        })?;
        self.step("kill -9 on each node", || {
            for node in &state.nodes {
                let mut kill = state.enter(node, "pkill")?;
                output(kill.args(["-KILL", "-f", "^/usr/local/bin/kube-proxy"]))?;
            }
            sleep(Duration::from_secs(5));
            rolled_out(set)
        })?;
        self.step("back to kube-proxy", || {
            let image = format!("kube-proxy=registry.k8s.io/kube-proxy:{}", parts.kubernetes);
            system(&["set", "image", set, &image])?;
            rolled_out(set)?;
            until("kpx has left the nodes", || {
                for node in &state.nodes {
                    let mut link = state.enter(node, "ip")?;
                    let found = output(link.args(["-brief", "link"]))?;
                    ensure!(!found.contains("kpx0"), "{node} has kpx0");
                }
                Ok(())
            })?;
            kustomize("delete", "kubernetes/way-back")
        })?;
        self.step("kube-proxy serves again", || {
            sleep(Duration::from_secs(10));
            Ok(())
        })
    }

    fn step(&mut self, name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let started = Instant::now();
        let result = work();
        sleep(Duration::from_secs(3));
        let counts = self.load.counts();
        let failures: u64 = counts.failures.values().sum();
        println!(
            "{name}: {:.0} s, {} open, {} exchanges on them, {} new, slowest {} ms, {failures} failed",
            started.elapsed().as_secs_f64(),
            counts.held,
            counts.exchanges,
            counts.dials,
            counts.slowest.as_millis(),
        );
        for (what, number) in &counts.failures {
            println!("    {number} x {what}");
        }
        self.failed += failures;
        result.with_context(|| name.to_owned())
    }
}

fn kubectl(state: &State, args: &[&str]) -> Result<String> {
    output(state.kubectl().args(args))
}

/// Returns the clients: a pod of each node, each node, and the machine outside.
fn clients(state: &State) -> Result<Vec<Client>> {
    let service: Value = serde_json::from_str(&kubectl(
        state,
        &[
            "--namespace",
            NAMESPACE,
            "get",
            "service",
            "web",
            "-o",
            "json",
        ],
    )?)?;
    let mut cluster_ips = Vec::new();
    for ip in service["spec"]["clusterIPs"]
        .as_array()
        .into_iter()
        .flatten()
    {
        let ip: IpAddr = ip.as_str().context("a ClusterIP")?.parse()?;
        cluster_ips.push(SocketAddr::from((ip, 80)));
    }
    let nodes = crate::network::nodes(u8::try_from(state.nodes.len())?);
    let node_ports: Vec<_> = nodes
        .iter()
        .flat_map(|node| [(node.ipv4, NODE_PORT).into(), (node.ipv6, NODE_PORT).into()])
        .collect();
    let inside: Vec<_> = cluster_ips.into_iter().chain(node_ports.clone()).collect();
    let pods: Value = serde_json::from_str(&kubectl(
        state,
        &[
            "--namespace",
            NAMESPACE,
            "get",
            "pods",
            "-l",
            "app=client",
            "-o",
            "json",
        ],
    )?)?;
    let mut clients = vec![Client {
        name: "x".to_owned(),
        namespace: format!("/proc/{}/root/run/netns/x", state.pid).into(),
        targets: node_ports,
    }];
    for pod in pods["items"].as_array().into_iter().flatten() {
        let node = pod["spec"]["nodeName"].as_str().context("a pod's node")?;
        let ip = pod["status"]["podIP"].as_str().context("a pod's address")?;
        clients.push(Client {
            name: format!("a pod of {node}"),
            namespace: pod_namespace(state, node, ip)?,
            targets: inside.clone(),
        });
    }
    for node in &state.nodes {
        clients.push(Client {
            name: node.clone(),
            namespace: format!("/proc/{}/ns/net", state.node_pid(node)?).into(),
            targets: inside.clone(),
        });
    }
    Ok(clients)
}

/// Finds a pod's network namespace by its address.
fn pod_namespace(state: &State, node: &str, ip: &str) -> Result<PathBuf> {
    let folder = format!("/proc/{}/root/run/netns", state.node_pid(node)?);
    let entries = std::fs::read_dir(&folder).with_context(|| format!("read {folder}"))?;
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
