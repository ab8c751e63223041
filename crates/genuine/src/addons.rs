//! The objects of the cluster: those that kubeadm makes, and the Service proxy.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::command::output;
use crate::control_plane::kubeadm_command;
use crate::network::Node;
use crate::parts::Parts;
use crate::state::{State, dir};
use crate::up::{Cni, Proxy, until};
use crate::{images, nodes};

pub(crate) fn apply(
    state: &State,
    parts: &Parts,
    nodes: &[Node],
    cni: Cni,
    proxy: Proxy,
) -> Result<()> {
    let kubectl = |args: &[&str]| {
        let mut kubectl = state.kubectl();
        kubectl.args(args);
        kubectl
    };
    for node in nodes {
        let patch = nodes::patch(node).to_string();
        until(&format!("the kubelet registers {}", node.name), || {
            output(&mut kubectl(&[
                "patch", "node", &node.name, "--patch", &patch,
            ]))
            .map(drop)
        })?;
    }
    let phase = |args: &[&str]| -> Result<String> {
        let inside = kubeadm_command(parts, &[&["init", "phase"], args].concat());
        let mut enter = state.enter("control", inside.get_program())?;
        enter
            .args(inside.get_args())
            .arg("--kubeconfig")
            .arg(crate::state::admin_inside());
        output(&mut enter)
    };
    // `kubeadm init` makes these bindings outside its phases. The API server's client of kubelets is
    // in the group up to Kubernetes 1.35.
    for (name, role, subject) in [
        (
            "kubeadm:cluster-admins",
            "cluster-admin",
            "--group=kubeadm:cluster-admins",
        ),
        (
            "kubeadm:kubelet-api-admin",
            "system:kubelet-api-admin",
            "--user=kube-apiserver-kubelet-client",
        ),
    ] {
        let role = format!("--clusterrole={role}");
        output(&mut kubectl(&[
            "create",
            "clusterrolebinding",
            name,
            &role,
            subject,
        ]))?;
    }
    phase(&["upload-config", "kubeadm"])?;
    if cni == Cni::KubeRouter {
        let manifests = include_str!("manifests/kube-router.yaml");
        let manifests = manifests.replace(
            "image: KUBE_ROUTER",
            &format!("image: {}", images::KUBE_ROUTER),
        );
        apply_text(state, "kube-router", &manifests)?;
    }
    phase(&["addon", "coredns"])?;
    match proxy {
        Proxy::KubeProxyNftables | Proxy::KubeProxyIptables => {
            phase(&["addon", "kube-proxy"])?;
        }
        Proxy::Kpx => {
            // kpx reads kube-proxy's ConfigMap.
            let printed = phase(&["addon", "kube-proxy", "--print-manifest"])?;
            apply_text(state, "kube-proxy", &without(&printed, "DaemonSet"))?;
            let overlay = deploy("kubernetes/overlays/kubeadm");
            let manifests = output(kubectl(&["kustomize"]).arg(overlay))?;
            apply_text(state, "kpx", &grantable(&manifests, has_sys_resource()?))?;
        }
    }
    Ok(())
}

/// Applies manifests, and keeps them in the cluster's folder.
pub(crate) fn apply_text(state: &State, name: &str, manifests: &str) -> Result<()> {
    let path = dir().join(format!("kubernetes/{name}.yaml"));
    fs::write(&path, manifests).with_context(|| format!("write {}", path.display()))?;
    output(state.kubectl().args(["apply", "-f"]).arg(&path)).map(drop)
}

/// Returns a folder or file of kpx's own manifests.
pub(crate) fn deploy(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../deploy")
        .join(path)
}

/// Leaves CAP_SYS_RESOURCE out where this machine cannot grant it: runc would start no container
/// that asks for it.
fn grantable(manifests: &str, has_sys_resource: bool) -> String {
    let lines = manifests.lines();
    let kept: Vec<_> = lines
        .filter(|line| has_sys_resource || line.trim() != "- SYS_RESOURCE")
        .collect();
    kept.join("\n") + "\n"
}

/// Returns true if containers on this machine can have CAP_SYS_RESOURCE.
pub(crate) fn has_sys_resource() -> Result<bool> {
    const SYS_RESOURCE: u64 = 1 << 24;
    let status = fs::read_to_string("/proc/self/status").context("read this process's status")?;
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("CapBnd:"))
        .context("the status has no CapBnd")?;
    let mask = u64::from_str_radix(mask.trim(), 16).context("read CapBnd")?;
    Ok(mask & SYS_RESOURCE != 0)
}

/// Removes the documents of this kind.
fn without(manifests: &str, kind: &str) -> String {
    let line = format!("kind: {kind}");
    let documents = manifests.split("\n---\n");
    let kept: Vec<_> = documents
        .filter(|document| !document.lines().any(|found| found == line))
        .collect();
    kept.join("\n---\n")
}

/// Waits until all nodes are ready and the system's pods run.
pub(crate) fn wait(state: &State) -> Result<()> {
    let run = |command: &mut Command| output(command).map(drop);
    run(state.kubectl().args([
        "wait",
        "--for=condition=Ready",
        "nodes",
        "--all",
        "--timeout=120s",
    ]))?;
    let daemon_set = if state.proxy == "kpx" {
        "daemonset/kpx"
    } else {
        "daemonset/kube-proxy"
    };
    for set in [daemon_set, "deployment/coredns"] {
        run(state.kubectl().args([
            "--namespace=kube-system",
            "rollout",
            "status",
            set,
            "--timeout=120s",
        ]))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_of_a_kind_are_left_out() {
        let manifests = "kind: ConfigMap\ndata:\n  text: 'kind: DaemonSet'\n---\napiVersion: apps/v1\nkind: DaemonSet\n---\nkind: Role\n";
        assert_eq!(
            without(manifests, "DaemonSet"),
            "kind: ConfigMap\ndata:\n  text: 'kind: DaemonSet'\n---\nkind: Role\n"
        );
    }
}
