//! The reboot of a node, while clients elsewhere use a Service.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::clients::{self, Client};
use crate::command::output;
use crate::init::held;
use crate::load::{Load, Run, reach};
use crate::network::{self, CONTROL4, CONTROL6, Node};
use crate::parts::Parts;
use crate::state::State;
use crate::up::until;
use crate::web;

#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    load: web::LoadOptions,
}

/// `kubectl drain` leaves the pods of DaemonSets; this taint evicts the Service's.
const TAINT: &str = "kpx-cluster/reboot:NoExecute";

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let state = State::running()?;
    let parts = Parts::of(&state);
    let nodes = network::nodes(u8::try_from(state.nodes.len())?);
    ensure!(nodes.len() > 1, "the only node has all clients");
    let node = &nodes[nodes.len() - 1];
    let all = web::start(&state, &parts)?;
    let number = all.len();
    let others: Vec<Client> = all
        .into_iter()
        .filter_map(|client| client.beside(node))
        .collect();
    let taint = Taint::evict(&state, node)?;
    let load = until("the other nodes serve", || {
        Load::start(&others, &options.load)
    })?;
    let mut run = Run::new(load);
    let steps = steps(&state, &parts, taint, number, &mut run);
    run.finish(steps)
}

fn steps(
    state: &State,
    parts: &Parts,
    taint: Taint<'_>,
    number: usize,
    run: &mut Run,
) -> Result<()> {
    let node = taint.node;
    let name = &node.name;
    run.step(&format!("{name} has no backend"), || {
        sleep(Duration::from_secs(5));
        Ok(())
    })?;
    run.step(&format!("{name} boots"), || {
        reboot(state, node)?;
        let ports = clients::at_nodes(state, web::NODE_PORT)?;
        let clients = [
            clients::outside(state, &ports)?,
            clients::node(state, name, &ports)?,
        ];
        until("its node ports answer", || reach(&clients))
    })?;
    run.step(&format!("{name} has its backend again"), || {
        drop(taint);
        until("its clients reach the Service", || {
            let all = web::start(state, parts)?;
            ensure!(all.len() == number, "{} clients", all.len());
            Ok(())
        })
    })
}

/// The taint of a node without pods of the Service. It goes with this value, so that a test that
/// fails leaves the node to the next one.
struct Taint<'a> {
    state: &'a State,
    node: &'a Node,
}

impl<'a> Taint<'a> {
    fn evict(state: &'a State, node: &'a Node) -> Result<Self> {
        let taint = Self { state, node };
        output(&mut taint.command(""))?;
        let mut wait = state.kubectl();
        wait.args(["--namespace", web::NAMESPACE, "wait", "pods"]);
        wait.arg(format!("--field-selector=spec.nodeName={}", node.name));
        output(wait.args(["--for=delete", "--timeout=60s"]))?;
        Ok(taint)
    }

    fn command(&self, sign: &str) -> Command {
        let mut kubectl = self.state.kubectl();
        kubectl.args(["taint", "node", &self.node.name, &format!("{TAINT}{sign}")]);
        kubectl
    }
}

impl Drop for Taint<'_> {
    fn drop(&mut self) {
        if let Err(error) = output(&mut self.command("-")) {
            eprintln!("{} keeps its taint: {error:#}", self.node.name);
        }
    }
}

/// The file that keeps a node from starting. It goes with this value.
struct Hold(PathBuf);

impl Hold {
    fn new(name: &str) -> Result<Self> {
        let path = held(name);
        fs::write(&path, "").with_context(|| format!("hold {name}"))?;
        Ok(Self(path))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            eprintln!("{} holds a node: {error}", self.0.display());
        }
    }
}

/// Ends a node as the loss of its power does, and starts it: processes, mounts and the network are
/// new, the disk stays.
fn reboot(state: &State, node: &Node) -> Result<()> {
    let name = &node.name;
    let hold = Hold::new(name)?;
    kill(Pid::from_raw(state.node_pid(name)?), Signal::SIGKILL)
        .with_context(|| format!("end {name}"))?;
    until("the node has ended", || {
        ensure!(state.node_pid(name).is_err(), "{name} runs");
        Ok(())
    })?;
    let mut network = state.enter("control", "sh")?;
    network
        .env("CONTROL4", CONTROL4.to_string())
        .env("CONTROL6", CONTROL6.to_string())
        .args(["-euc", SCRIPT, "reboot", name])
        .args([node.ipv4.to_string(), node.ipv6.to_string()]);
    output(&mut network)?;
    drop(hold);
    until("the node has started", || state.node_pid(name).map(drop))
}

const SCRIPT: &str = concat!(
    include_str!("scripts/connect.sh"),
    "ip link delete \"$1\"\nip netns delete \"$1\"\nnode \"$@\"\n"
);
