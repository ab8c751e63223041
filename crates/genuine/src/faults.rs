//! Failures of the control plane while clients use a Service.

use std::fs;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;

use crate::command::output;
use crate::init::held;
use crate::load::{Run, reach};
use crate::parts::Parts;
use crate::state::{State, dir};
use crate::up::until;
use crate::{clients, control_plane, web};

#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    load: web::LoadOptions,
}

const API_SERVER: &str = "kube-apiserver";
const ETCD: &str = "etcd";
const CONTROLLERS: &str = "kube-controller-manager";
const SCHEDULER: &str = "kube-scheduler";
const ETCD_AT: &str = "--endpoints=http://127.0.0.1:2379";

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let state = State::running()?;
    let parts = Parts::of(&state);
    web::under_load(&state, &parts, &options.load, |run| {
        steps(&state, &parts, run)
    })
}

fn steps(state: &State, parts: &Parts, run: &mut Run) -> Result<()> {
    let snapshot = dir().join("snapshot");
    let program = |name: &str| parts.program(name);
    run.step("no fault", || {
        sleep(Duration::from_secs(5));
        change(state, 1)?;
        let mut save = state.enter("control", program("etcdctl"))?;
        output(save.args([ETCD_AT, "snapshot", "save"]).arg(&snapshot)).map(drop)
    })?;
    run.step("API server away for 10 s", || {
        away(state, &[API_SERVER], Duration::from_secs(10), || Ok(()))?;
        change(state, 2)
    })?;
    run.step("etcd away for 5 s", || {
        away(state, &[ETCD], Duration::from_secs(5), || Ok(()))?;
        change(state, 3)
    })?;
    run.step("etcd restored from an older snapshot", || {
        // Controllers and kubelets take no resource version that goes back; the proxies have to.
        let all = [CONTROLLERS, SCHEDULER, API_SERVER, ETCD];
        away(state, &all, Duration::from_secs(2), || {
            let data = dir().join("etcd");
            fs::remove_dir_all(&data).with_context(|| format!("remove {}", data.display()))?;
            let mut restore = state.enter("control", program("etcdutl"))?;
            restore.args(["snapshot", "restore"]).arg(&snapshot);
            output(restore.arg("--data-dir").arg(&data)).map(drop)
        })?;
        restart_kubelets(state)?;
        change(state, 4)
    })?;
    run.step("API server certified by another authority", || {
        let certificate = control_plane::second_authority(parts)?;
        away(state, &[CONTROLLERS, SCHEDULER], Duration::ZERO, || Ok(()))?;
        restart_kubelets(state)?;
        // A kubelet refreshes the volumes of a pod once a minute.
        for node in &state.nodes {
            until(&format!("pods of {node} trust the authority"), || {
                let mut same = state.enter(node, "sh")?;
                same.args(["-euc", SAME, "same"]);
                output(same.arg(control_plane::authorities())).map(drop)
            })?;
        }
        away(state, &[API_SERVER], Duration::ZERO, || {
            for path in &certificate {
                let name = path.file_name().unwrap_or_default();
                fs::copy(path, control_plane::pki(&name.to_string_lossy()))
                    .with_context(|| format!("copy {}", path.display()))?;
            }
            Ok(())
        })?;
        change(state, 5)
    })
}

/// Compares the authorities in each pod of a node with a file.
const SAME: &str = "for file in /var/lib/kubelet/pods/*/volumes/*/kube-api-access-*/ca.crt; do
    cmp \"$file\" \"$1\"
done";

fn restart_kubelets(state: &State) -> Result<()> {
    let mut kill = state.enter("control", "pkill")?;
    output(kill.args(["-KILL", "-f", "/kubelet --"])).map(drop)
}

/// Kills programs of the control plane, and starts them again after `pause` and `meanwhile`.
fn away(
    state: &State,
    programs: &[&str],
    pause: Duration,
    meanwhile: impl FnOnce() -> Result<()>,
) -> Result<()> {
    for program in programs {
        fs::write(held(program), "").with_context(|| format!("hold {program}"))?;
        let mut kill = state.enter("control", "pkill")?;
        output(kill.args(["-KILL", "-f", &format!("/{program} --")]))?;
    }
    sleep(pause);
    meanwhile()?;
    for program in programs.iter().rev() {
        fs::remove_file(held(program)).with_context(|| format!("start {program}"))?;
    }
    until("the API server is ready", || {
        output(state.kubectl().args(["get", "--raw=/readyz"])).map(drop)
    })
}

/// Makes a Service with a node port, and waits until the client outside reaches it on each node.
fn change(state: &State, number: u16) -> Result<()> {
    let port = 30_090 + number;
    let manifest = include_str!("manifests/web-again.yaml")
        .replace("NUMBER", &number.to_string())
        .replace("PORT", &port.to_string());
    until("the API server takes a Service", || {
        crate::addons::apply_text(state, "web-again", &manifest)
    })?;
    let targets = clients::at_nodes(state, port)?;
    let client = [clients::outside(state, &targets)?];
    until(&format!("port {port} of each node answers"), || {
        reach(&client)
    })
}
