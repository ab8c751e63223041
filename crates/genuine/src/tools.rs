//! kpx's own commands against the cluster, as docs/kubectl.md describes them.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::clients::OUTSIDE;
use crate::command::output;
use crate::parts::Parts;
use crate::state::{State, admin_inside, dir};
use crate::web;

/// The commands of `kubectl kpx`. POD is a client's pod, and the addresses are unused ones that the
/// first node gets from outside.
const COMMANDS: [&str; 11] = [
    "status",
    "status -A -o json",
    "services kpx-web/web",
    "backends kpx-web/web",
    "flows --service kpx-web/web --node n1 --node n2 --sort-by client",
    "events kpx-web/web",
    "trace --from pod/kpx-web/POD --to svc/kpx-web/web",
    "top",
    "version",
    "sysdump",
    "connectivity-test --load-balancer-ip 172.29.1.250 --external-ip 172.29.1.251",
];

pub(crate) fn run() -> Result<ExitCode> {
    let state = State::running()?;
    ensure!(
        state.proxy == "kpx",
        "the cluster runs {}: start one with --proxy kpx",
        state.proxy
    );
    web::start(&state, &Parts::of(&state))?;
    let pod = output(state.kubectl().args([
        "--namespace=kpx-web",
        "get",
        "pods",
        "--selector=app=client",
        "--output=jsonpath={.items[0].metadata.name}",
    ]))?;
    let kpx = dir().join("kpx");
    copy_kpx(&state, &kpx)?;
    let plugin = dir().join("kubectl-kpx");
    let _absent = fs::remove_file(&plugin);
    symlink(&kpx, &plugin).with_context(|| format!("make {}", plugin.display()))?;
    let mut failed = 0;
    for node in &state.nodes {
        let mut check = state.enter(node, &kpx)?;
        failed += report(&format!("kpx check on {node}"), check.arg("check"));
    }
    for line in COMMANDS {
        let line = line.replace("POD", &pod);
        let mut kubectl = state.enter(OUTSIDE, state.parts.join("kubectl"))?;
        kubectl
            .arg("kpx")
            .args(line.split(' '))
            .current_dir(dir())
            .env("PATH", path_with(dir())?)
            .env("KUBECONFIG", admin_inside());
        failed += report(&format!("kubectl kpx {line}"), &mut kubectl);
    }
    println!("{failed} commands failed");
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Copies the program of the agent that runs on the first node.
fn copy_kpx(state: &State, to: &Path) -> Result<()> {
    let node = state.nodes.first().context("a cluster without nodes")?;
    let mut copy = state.enter(node, "sh")?;
    let script = r#"cp "/proc/$(pgrep --oldest --exact kpx)/exe" "$0""#;
    output(copy.args(["-euc", script]).arg(to)).map(drop)
}

/// Returns the PATH with one more folder, where kubectl finds its plugins.
fn path_with(folder: &Path) -> Result<OsString> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(folder.to_owned()).chain(std::env::split_paths(&path));
    std::env::join_paths(folders).context("add a folder to PATH")
}

/// Runs a command, and prints its output. Returns 1 if it fails.
fn report(name: &str, command: &mut Command) -> u32 {
    let started = Instant::now();
    let ended = output(command);
    let seconds = started.elapsed().as_secs();
    match ended {
        Ok(text) => {
            println!("passed   {name}: {seconds} s");
            print!("{text}");
            0
        }
        Err(error) => {
            println!("failed   {name}: {seconds} s, {error:#}");
            1
        }
    }
}
