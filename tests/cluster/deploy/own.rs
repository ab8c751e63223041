//! kpx in the pods of its own manifests, with only their capabilities, rights and writable files.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use caps::{CapSet, Capability};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Container, ContainerPort};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use testbed::lab::Layout;

use crate::deploy::cluster::Cluster;
use crate::deploy::render::{Objects, deploy_dir, kustomize};
use testbed::pod::{KUBE_PROXY, Running};
use testbed::rights::granted;

#[test]
fn grants_of_the_manifests_suffice() -> Result<()> {
    let cluster = Cluster::start()?;
    let objects = overlay("kind")?;
    let set = objects.daemon_set.context("a DaemonSet")?;
    let config = objects.config_map.context("a ConfigMap")?;
    let kpx = Running::ready(
        &cluster.lab,
        &cluster.lab.n1,
        &set,
        &cluster.supplies(&[&config]),
    )?;
    cluster.serves("n1").with_context(|| kpx.log())?;

    let asked: BTreeSet<_> = cluster.api().traffic().kinds().collect();
    let role = objects.cluster_role.context("a ClusterRole")?;
    let granted = granted(&role);
    ensure!(!asked.is_empty(), "nothing was asked of the API server");
    let refused: Vec<_> = asked
        .iter()
        .filter(|asked| !granted.contains(*asked))
        .collect();
    ensure!(
        refused.is_empty(),
        "the ClusterRole does not grant {refused:?}"
    );
    let log = kpx.log();
    // This one limit is global to the machine; the lab's nodes are only namespaces.
    let mut excused = vec!["nf_conntrack_max"];
    // If this machine is a container, it may lack the capability that it should grant.
    if !caps::has_cap(None, CapSet::Effective, Capability::CAP_SYS_RESOURCE)? {
        excused.push("oom score");
    }
    let is_excused = |line: &str| excused.iter().any(|what| line.contains(what));
    let warned: Vec<_> = log
        .lines()
        .filter(|line| line.contains(" WARN ") && !is_excused(line))
        .collect();
    ensure!(warned.is_empty(), "kpx lacks something: {warned:?}");
    kpx.stop()?;
    // Its programs stay for the next pod.
    cluster.serves("n1")?;
    let pins = cluster.lab.n1.host.ns.bpf_dir();
    ensure!(
        pins.join("kpx").exists(),
        "nothing is pinned in {}",
        pins.display()
    );
    drop(cluster);
    ensure!(!pins.exists(), "{} outlives its node", pins.display());
    Ok(())
}

/// kind's CNI plugin is ptp. Its pods use the cluster's DNS over UDP first, and UDP may run in
/// parallel.
#[test]
fn pods_of_kind_reach_services_by_the_overlay() -> Result<()> {
    for backend in ["p2a", "p1b"] {
        let cluster = Cluster::start_in(Layout::Ptp)?;
        let objects = overlay("kind")?;
        let set = objects.daemon_set.context("a DaemonSet")?;
        let config = objects.config_map.context("a ConfigMap")?;
        let kpx = Running::ready(
            &cluster.lab,
            &cluster.lab.n1,
            &set,
            &cluster.supplies(&[&config]),
        )?;
        cluster
            .is_served_by(backend, &["p1a", "p1b", "n1"])
            .with_context(|| kpx.log())?;
        kpx.stop()?;
    }
    Ok(())
}

#[test]
fn the_kubelets_probe_is_answered() -> Result<()> {
    let cluster = Cluster::start()?;
    let objects = overlay("kind")?;
    let mut set = objects.daemon_set.context("a DaemonSet")?;
    let config = objects.config_map.context("a ConfigMap")?;
    let kpx = Running::ready(
        &cluster.lab,
        &cluster.lab.n1,
        &set,
        &cluster.supplies(&[&config]),
    )?;
    let container = container(&mut set)?;
    let get = container
        .readiness_probe
        .as_ref()
        .and_then(|probe| probe.http_get.as_ref())
        .context("a probe by HTTP")?;
    let named = |port: &&ContainerPort| {
        port.name.clone().map(IntOrString::String).as_ref() == Some(&get.port)
    };
    let port = container.ports.iter().flatten().find(named);
    let port = port.context("the probe's port")?.container_port;
    let path = get.path.as_deref().unwrap_or("/");
    let status = kpx
        .probe(port, path)
        .with_context(|| format!("{path} on port {port}"))?;
    ensure!(
        status.starts_with("HTTP/1.1 200"),
        "{path} on port {port}: {status}"
    );
    kpx.stop()
}

#[test]
fn kubeadms_config_map_serves_our_daemon_set() -> Result<()> {
    let cluster = Cluster::start()?;
    let set = overlay("kubeadm")?.daemon_set.context("a DaemonSet")?;
    let config: ConfigMap = Objects::read(KUBE_PROXY)?
        .config_map
        .context("a ConfigMap")?;
    let kpx = Running::ready(
        &cluster.lab,
        &cluster.lab.n1,
        &set,
        &cluster.supplies(&[&config]),
    )?;
    cluster.serves("n1").with_context(|| kpx.log())?;
    kpx.stop()
}

#[test]
fn uninstall_waits_for_the_end_of_kpx_and_leaves_nothing() -> Result<()> {
    let cluster = Cluster::start()?;
    let node = &cluster.lab.n1;
    let objects = overlay("kind")?;
    let set = objects.daemon_set.context("a DaemonSet")?;
    let config = objects.config_map.context("a ConfigMap")?;
    let supplies = cluster.supplies(&[&config]);
    let uninstall = initial("uninstall")?;
    let kpx = Running::ready(&cluster.lab, node, &set, &supplies)?;
    let mut early = Running::start(&cluster.lab, node, &uninstall, &supplies)?;
    ensure!(
        !early.wait()?.success(),
        "it does not wait: {}",
        early.log()
    );
    cluster.serves("n1").context("beside a running kpx")?;
    kpx.stop()?;
    cluster.serves("n1").context("the programs stay")?;
    let mut late = Running::start(&cluster.lab, node, &uninstall, &supplies)?;
    ensure!(late.wait()?.success(), "{}", late.log());
    cluster.serves_no_more("n1")?;
    let links = node
        .host
        .ns
        .exec(Command::new("ip").args(["-brief", "link"]))?;
    ensure!(!links.contains("kpx0"), "{links}");
    ensure!(
        !node.host.ns.bpf_dir().join("kpx").exists(),
        "pins are left: {}",
        late.log()
    );
    Ok(())
}

/// A node without kpx has the findings in its log.
#[test]
fn preflight_shows_findings_of_its_node() -> Result<()> {
    let cluster = Cluster::start()?;
    let node = &cluster.lab.n1;
    let preflight = initial("preflight")?;
    let supplies = cluster.supplies(&[]);
    let plugins = Running::on_node(&cluster.lab, node, Path::new("/etc/cni/net.d"))?;
    fs::create_dir_all(&plugins)?;
    fs::write(
        plugins.join("10-net.conflist"),
        r#"{ "name": "net", "plugins": [{ "type": "ptp" }] }"#,
    )?;
    let mut fit = Running::start(&cluster.lab, node, &preflight, &supplies)?;
    ensure!(fit.wait()?.success(), "{}", fit.log());
    for (what, found) in [
        ("programs", "the kernel takes them"),
        ("bpf file system", "mounted"),
        ("CNI", "ptp"),
        ("kube-proxy's rules", "none"),
    ] {
        let line =
            |line: &str| line.starts_with("ok ") && line.contains(what) && line.contains(found);
        ensure!(fit.log().lines().any(line), "no {what}: {}", fit.log());
    }
    ensure!(
        !node.host.ns.bpf_dir().join("kpx").exists(),
        "the check pins nothing"
    );
    node.host.ns.nft("table ip kube-proxy { }")?;
    let mut unfit = Running::start(&cluster.lab, node, &preflight, &supplies)?;
    ensure!(!unfit.wait()?.success(), "{}", unfit.log());
    let found =
        |line: &str| line.starts_with("fail ") && line.contains("nftables table ip kube-proxy");
    ensure!(unfit.log().lines().any(found), "{}", unfit.log());
    Ok(())
}

#[test]
fn kpx_ends_and_names_a_missing_capability_with_its_purpose() -> Result<()> {
    let cluster = Cluster::start()?;
    let objects = overlay("kind")?;
    let config = objects.config_map.context("a ConfigMap")?;
    let set = objects.daemon_set.context("a DaemonSet")?;
    for capability in ["BPF", "NET_ADMIN", "PERFMON"] {
        let set = without(&set, capability)?;
        let mut kpx = Running::start(
            &cluster.lab,
            &cluster.lab.n1,
            &set,
            &cluster.supplies(&[&config]),
        )?;
        let status = kpx
            .wait()
            .with_context(|| format!("without {capability}\n{}", kpx.log()))?;
        ensure!(!status.success(), "without {capability}: {status}");
        ensure!(
            kpx.log().contains(&format!("lacks CAP_{capability}, to ")),
            "without {capability}: {}",
            kpx.log()
        );
    }
    Ok(())
}

/// The capability only serves the OOM score, and locked memory on kernels before 5.11.
#[test]
fn kpx_serves_without_sys_resource_and_names_it() -> Result<()> {
    let cluster = Cluster::start()?;
    let objects = overlay("kind")?;
    let config = objects.config_map.context("a ConfigMap")?;
    let all = objects.daemon_set.context("a DaemonSet")?;
    let supplies = cluster.supplies(&[&config]);
    let kpx = Running::ready(
        &cluster.lab,
        &cluster.lab.n1,
        &without(&all, "SYS_RESOURCE")?,
        &supplies,
    )?;
    cluster.serves("n1").with_context(|| kpx.log())?;
    ensure!(
        kpx.log()
            .contains("oom score not adjusted: to lower it takes CAP_SYS_RESOURCE"),
        "{}",
        kpx.log()
    );
    kpx.stop()
}

fn without(set: &DaemonSet, capability: &str) -> Result<DaemonSet> {
    let mut set = set.clone();
    let security = container(&mut set)?.security_context.as_mut();
    let added = security.and_then(|security| security.capabilities.as_mut()?.add.as_mut());
    let added = added.context("added capabilities")?;
    let before = added.len();
    added.retain(|name| name != capability);
    ensure!(
        added.len() < before,
        "the manifests do not add {capability}"
    );
    Ok(set)
}

/// Returns the DaemonSet of a folder with only its init containers.
pub(crate) fn initial(folder: &str) -> Result<DaemonSet> {
    let folder = deploy_dir().join("kubernetes").join(folder);
    let mut set = kustomize(&folder)?.daemon_set.context("a DaemonSet")?;
    let pod = set
        .spec
        .as_mut()
        .and_then(|spec| spec.template.spec.as_mut())
        .context("a pod's spec")?;
    pod.containers = pod.init_containers.take().context("initial containers")?;
    Ok(set)
}

pub(crate) fn overlay(name: &str) -> Result<Objects> {
    kustomize(&deploy_dir().join("kubernetes/overlays").join(name))
}

pub(crate) fn container(set: &mut DaemonSet) -> Result<&mut Container> {
    let pod = set
        .spec
        .as_mut()
        .and_then(|spec| spec.template.spec.as_mut())
        .context("a pod's spec")?;
    pod.containers.first_mut().context("a container")
}
