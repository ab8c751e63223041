//! A Service with backends on each node, and its clients.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use serde_json::Value;

use crate::addons::apply_text;
use crate::clients::{self, Client};
use crate::command::output;
use crate::images;
use crate::load::{Load, Run, reach};
use crate::parts::Parts;
use crate::state::State;
use crate::up::until;

pub(crate) const NAMESPACE: &str = "kpx-web";
pub(crate) const NODE_PORT: u16 = 30080;

/// The load of each client.
#[derive(Args)]
pub(crate) struct LoadOptions {
    /// The number of connections that each client keeps open
    #[arg(long, default_value_t = 56, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) held: u32,
    /// The number of new connections and datagrams of each client in a second
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rate: u32,
}

#[derive(Args)]
pub(crate) struct Options {
    /// The time in seconds
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    #[command(flatten)]
    load: LoadOptions,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let state = State::running()?;
    under_load(&state, &Parts::of(&state), &options.load, |run| {
        run.step(&format!("{} serves", state.proxy), || {
            sleep(Duration::from_secs(options.seconds));
            Ok(())
        })
    })
}

/// Runs the steps while clients of the Service keep connections open and open new ones.
pub(crate) fn under_load(
    state: &State,
    parts: &Parts,
    options: &LoadOptions,
    steps: impl FnOnce(&mut Run) -> Result<()>,
) -> Result<ExitCode> {
    let clients = start(state, parts)?;
    let mut run = Run::new(Load::start(&clients, options)?);
    let result = steps(&mut run);
    run.finish(result)
}

/// Makes the Service. Returns a pod of each node, each node, and the machine outside as its clients.
pub(crate) fn start(state: &State, parts: &Parts) -> Result<Vec<Client>> {
    let manifests = include_str!("manifests/web.yaml");
    apply_text(
        state,
        "web",
        &manifests.replace("AGNHOST", &images::agnhost(parts)?),
    )?;
    let kubectl =
        |args: &[&str]| output(state.kubectl().args(["--namespace", NAMESPACE]).args(args));
    for set in ["daemonset/web", "daemonset/client"] {
        kubectl(&["rollout", "status", set, "--timeout=60s"])?;
    }
    let text = kubectl(&["get", "service", "web", "--output=json"])?;
    let service: Value = serde_json::from_str(&text).context("read kubectl's Service")?;
    let mut cluster_ips = Vec::new();
    for ip in service["spec"]["clusterIPs"]
        .as_array()
        .into_iter()
        .flatten()
    {
        let ip: IpAddr = ip.as_str().context("a ClusterIP")?.parse()?;
        cluster_ips.push(SocketAddr::from((ip, 80)));
    }
    let node_ports = clients::at_nodes(state, NODE_PORT)?;
    let inside = [cluster_ips, node_ports.clone()].concat();
    let mut all = vec![clients::outside(state, &node_ports)?];
    all.extend(clients::pods(state, NAMESPACE, "app=client", &inside)?);
    all.extend(clients::nodes(state, &inside)?);
    // A proxy serves a new Service some time after its pods are ready: kube-proxy syncs once a second.
    until("each client reaches the Service", || reach(&all))?;
    Ok(all)
}
