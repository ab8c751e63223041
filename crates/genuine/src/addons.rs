//! The objects of the cluster: those that kubeadm makes, and the Service proxy.

use std::process::Command;

use anyhow::Result;

use crate::command::output;
use crate::control_plane::kubeadm_command;
use crate::network::Node;
use crate::nodes;
use crate::parts::Parts;
use crate::state::State;
use crate::up::{Proxy, until};

pub(crate) fn apply(state: &State, parts: &Parts, nodes: &[Node], proxy: Proxy) -> Result<()> {
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
    phase(&["addon", "kube-proxy"])?;
    phase(&["addon", "coredns"])?;
    match proxy {
        Proxy::KubeProxyNftables | Proxy::KubeProxyIptables => {}
        Proxy::Kpx => {
            output(&mut kubectl(&[
                "--namespace=kube-system",
                "delete",
                "daemonset",
                "kube-proxy",
                "--wait=false",
            ]))?;
            let overlay = concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/../../deploy/kubernetes/overlays/kubeadm"
            );
            output(&mut kubectl(&["apply", "-k", overlay]))?;
        }
    }
    Ok(())
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
    run(state.kubectl().args([
        "--namespace=kube-system",
        "rollout",
        "status",
        "deployment/coredns",
        "--timeout=120s",
    ]))
}
