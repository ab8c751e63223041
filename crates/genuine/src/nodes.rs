//! The nodes: plans of their first processes, and configurations of containerd and the kubelet.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::control_plane::kubeconfig_of;
use crate::init::{Plan, Program};
use crate::network::{CONTROL4, DNS, Node};
use crate::parts::Parts;
use crate::state::{dir, plan_of};
use crate::up::Cni;

/// Writes a node's configurations. Returns the program that starts the node.
pub(crate) fn prepare(
    parts: &Parts,
    node: &Node,
    variables: &BTreeMap<String, String>,
    cni: Cni,
    pause: &str,
) -> Result<Program> {
    let name = &node.name;
    let folder = dir().join(name);
    let write = |file: &str, text: String| {
        let path = folder.join(file);
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        Ok::<_, anyhow::Error>(path.display().to_string())
    };
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    let containerd = write("containerd.toml", containerd(parts, node, pause))?;
    let kubelet = write("kubelet.json", kubelet(node).to_string())?;
    let cni = write("cni.conflist", cni_config(node, cni).to_string())?;
    let mut variables = variables.clone();
    variables.insert("NODE".to_owned(), name.clone());
    variables.insert("CNI".to_owned(), cni);
    let log = |program: &str| dir().join(format!("logs/{name}-{program}.log"));
    let path = format!(
        "PATH={}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        parts.dir().display()
    );
    let started = |program: &str, args: &[String]| Program {
        name: format!("{name}-{program}"),
        command: [
            vec![
                "env".to_owned(),
                path.clone(),
                parts.program(program).display().to_string(),
            ],
            args.to_vec(),
        ]
        .concat(),
        log: log(program),
    };
    let plan = Plan {
        setup: include_str!("scripts/node.sh").to_owned(),
        variables,
        programs: vec![
            started("containerd", &["--config".to_owned(), containerd]),
            started(
                "kubelet",
                &[
                    format!("--config={kubelet}"),
                    format!("--kubeconfig={}", kubeconfig_of(name).display()),
                    format!("--hostname-override={name}"),
                    format!("--node-ip={},{}", node.ipv4, node.ipv6),
                ],
            ),
        ],
        ready: folder.join("ready"),
        forward: None,
    };
    let path = plan_of(name);
    fs::write(&path, serde_json::to_vec_pretty(&plan)?)
        .with_context(|| format!("write {}", path.display()))?;
    let this = std::env::current_exe().context("find this program")?;
    Ok(Program {
        name: name.clone(),
        command: vec![
            "sh".to_owned(),
            "-euc".to_owned(),
            include_str!("scripts/enter.sh").to_owned(),
            "enter".to_owned(),
            name.clone(),
            this.display().to_string(),
            path.display().to_string(),
        ],
        log: log("init"),
    })
}

pub(crate) fn containerd_socket(node: &str) -> PathBuf {
    dir().join(node).join("containerd.sock")
}

/// Imports images into a node's containerd.
pub(crate) fn import(parts: &Parts, node: &str, archive: &std::path::Path) -> Command {
    let mut ctr = ctr(parts, node);
    ctr.args(["images", "import"]).arg(archive);
    ctr
}

/// Lists the names of images in a node's containerd.
pub(crate) fn images(parts: &Parts, node: &str) -> Command {
    let mut ctr = ctr(parts, node);
    ctr.args(["images", "list", "--quiet"]);
    ctr
}

/// Gives an image of a node's containerd another name.
pub(crate) fn tag(parts: &Parts, node: &str, image: &str, name: &str) -> Command {
    let mut ctr = ctr(parts, node);
    ctr.args(["images", "tag", "--force", image, name]);
    ctr
}

fn ctr(parts: &Parts, node: &str) -> Command {
    let mut ctr = Command::new(parts.program("ctr"));
    ctr.arg("--address")
        .arg(containerd_socket(node))
        .args(["--namespace", "k8s.io"]);
    ctr
}

fn containerd(parts: &Parts, node: &Node, pause: &str) -> String {
    let socket = containerd_socket(&node.name);
    format!(
        r#"version = 3
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
address = "{socket}"

[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{pause}"

[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["/opt/cni/bin"]
conf_dir = "/etc/cni/net.d"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "{runc}"
"#,
        socket = socket.display(),
        runc = parts.program("runc").display(),
    )
}

fn kubelet(node: &Node) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": true },
            "x509": { "clientCAFile": dir().join("pki/ca.crt") },
        },
        "authorization": { "mode": "Webhook" },
        "cgroupDriver": "cgroupfs",
        "clusterDNS": [DNS],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": format!("unix://{}", containerd_socket(&node.name).display()),
        "enforceNodeAllocatable": [],
        "evictionHard": { "memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%" },
        "failCgroupV1": false,
        "failSwapOn": false,
        "imageGCHighThresholdPercent": 100,
        "maxPods": 200,
        "resolvConf": "/etc/resolv.conf",
        "serializeImagePulls": false,
    })
}

fn cni_config(node: &Node, cni: Cni) -> Value {
    let ipam = json!({
        "type": "host-local",
        "ranges": [[{ "subnet": node.pods4 }], [{ "subnet": node.pods6 }]],
        "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }],
    });
    let bridge = |name: &str| {
        json!({
            "type": "bridge", "bridge": name, "isGateway": true, "hairpinMode": true, "ipam": ipam,
        })
    };
    let main = match cni {
        Cni::Bridge => bridge("cni0"),
        Cni::KubeRouter => bridge("kube-bridge"),
        Cni::Ptp => json!({ "type": "ptp", "ipam": ipam }),
    };
    let portmap = json!({ "type": "portmap", "capabilities": { "portMappings": true } });
    json!({ "cniVersion": "1.0.0", "name": "kpx-cluster", "plugins": [main, portmap] })
}

/// Returns the patch that gives a node its zone and its networks of pods.
pub(crate) fn patch(node: &Node) -> Value {
    let zone = format!("zone-{}", node.name);
    json!({
        "metadata": { "labels": { "topology.kubernetes.io/zone": zone } },
        "spec": { "podCIDR": node.pods4, "podCIDRs": [node.pods4, node.pods6] },
    })
}

/// Returns the variables of the scripts.
pub(crate) fn variables(parts: &Parts, nodes: &[Node]) -> BTreeMap<String, String> {
    [
        ("STATE", dir().display().to_string()),
        ("PARTS", parts.dir().display().to_string()),
        ("CONTROL4", CONTROL4.to_string()),
        ("CONTROL6", crate::network::CONTROL6.to_string()),
        ("NODES", crate::network::table(nodes)),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}
