//! The migration from kube-proxy to kpx and back as docs/migration.md describes it, under load.

use std::path::PathBuf;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;

use crate::addons::deploy;
use crate::command::output;
use crate::load::Run;
use crate::parts::Parts;
use crate::state::State;
use crate::up::until_within;
use crate::{nodes, web};

#[derive(Args)]
pub(crate) struct Options {
    /// An archive with kpx's image, as `cargo xtask dist` makes it
    #[arg(long)]
    image: PathBuf,
    /// An archive with the image of an upgrade; the same kpx under another name by default
    #[arg(long)]
    upgrade: Option<PathBuf>,
    #[command(flatten)]
    load: web::LoadOptions,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let state = State::running()?;
    ensure!(
        state.proxy.starts_with("kube-proxy"),
        "the cluster runs {}: start one with --proxy kube-proxy-nftables or kube-proxy-iptables",
        state.proxy
    );
    let parts = Parts::of(&state);
    // Both archives have the same name in them.
    let upgrade = options.upgrade.as_ref().unwrap_or(&options.image);
    for node in &state.nodes {
        output(&mut nodes::import(&parts, node, upgrade))?;
        output(&mut nodes::tag(&parts, node, IMAGE, UPGRADE))?;
        output(&mut nodes::import(&parts, node, &options.image))?;
    }
    web::under_load(&state, &parts, &options.load, |run| {
        steps(&state, &parts, run)
    })
}

/// The image in the patch of kube-proxy's DaemonSet, and that of an upgrade.
pub(crate) const IMAGE: &str = concat!("localhost/kpx:", env!("CARGO_PKG_VERSION"));
const UPGRADE: &str = "localhost/kpx:upgrade";

fn steps(state: &State, parts: &Parts, run: &mut Run) -> Result<()> {
    let system =
        |args: &[&str]| kubectl(state, &[&["--namespace=kube-system"], args].concat()).map(drop);
    let kustomize = |verb: &str, folder: &str| {
        let folder = deploy(folder);
        let folder = folder.to_string_lossy();
        kubectl(state, &[verb, "-k", &folder]).map(drop)
    };
    let rolled_out = |set: &str| system(&["rollout", "status", set, "--timeout=180s"]);
    let patch = deploy("kubeadm/kubeproxydaemonset.yaml");
    let patch = patch.to_string_lossy();
    let set = "daemonset/kube-proxy";

    run.step("kube-proxy serves", || {
        sleep(Duration::from_secs(10));
        Ok(())
    })?;
    run.step("kpx's image in kube-proxy's DaemonSet", || {
        kustomize("apply", "kubernetes/way-back")?;
        system(&["patch", set, "--patch-file", &patch])?;
        rolled_out(set)
    })?;
    run.step("kube-proxy's rules removed", || {
        kustomize("apply", "kubernetes/kube-proxy-cleanup")?;
        rolled_out("daemonset/kpx-kube-proxy-cleanup")?;
        kustomize("delete", "kubernetes/kube-proxy-cleanup")
    })?;
    run.step("rollout restart", || {
        system(&["rollout", "restart", set])?;
        rolled_out(set)
    })?;
    run.step("upgrade", || {
        system(&["set", "image", set, &format!("kube-proxy={UPGRADE}")])?;
        rolled_out(set)
    })?;
    run.step("kill -9 on each node", || {
        for node in &state.nodes {
            let mut kill = state.enter(node, "pkill")?;
            output(kill.args(["-KILL", "-f", "^/usr/local/bin/kube-proxy"]))?;
        }
        sleep(Duration::from_secs(5));
        rolled_out(set)
    })?;
    run.step("back to kube-proxy", || {
        let image = format!("kube-proxy=registry.k8s.io/kube-proxy:{}", parts.kubernetes);
        system(&["set", "image", set, &image])?;
        rolled_out(set)
    })?;
    // The drain ends with the last open connection, or after five minutes.
    run.release();
    run.step("kpx drained", || {
        until_within(Duration::from_secs(330), "kpx has left the nodes", || {
            for node in &state.nodes {
                let mut link = state.enter(node, "ip")?;
                let found = output(link.args(["-brief", "link"]))?;
                ensure!(!found.contains("kpx0"), "{node} has kpx0");
            }
            Ok(())
        })?;
        kustomize("delete", "kubernetes/way-back")
    })?;
    run.step("kube-proxy serves again", || {
        sleep(Duration::from_secs(10));
        Ok(())
    })
}

fn kubectl(state: &State, args: &[&str]) -> Result<String> {
    output(state.kubectl().args(args))
}
