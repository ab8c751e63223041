//! kpx runs in kube-proxy's own manifest, in which the user changes only the image.

use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::ConfigMap;

use crate::deploy::cluster::Cluster;
use crate::deploy::render::Objects;
use testbed::pod::{KUBE_PROXY, Running};

#[test]
fn kubeadms_daemon_set_runs_kpx_by_its_image_alone() -> Result<()> {
    let cluster = Cluster::start()?;
    let (set, config) = kubeadm()?;
    let kpx = Running::ready(
        &cluster.lab,
        &cluster.lab.n1,
        &set,
        &cluster.supplies(&[&config]),
    )?;
    cluster.serves("n1").with_context(|| kpx.log())?;
    kpx.stop()?;
    cluster.serves("n1").context("its programs stay")
}

/// Before 1.33, kube-proxy's role lacks ServiceCIDRs.
#[test]
fn a_role_without_service_cidrs_suffices() -> Result<()> {
    let cluster = Cluster::start()?;
    for verb in ["get", "list", "watch"] {
        cluster.api().fail(verb, "servicecidrs", 403);
    }
    let (set, config) = kubeadm()?;
    let kpx = Running::start(
        &cluster.lab,
        &cluster.lab.n1,
        &set,
        &cluster.supplies(&[&config]),
    )?;
    cluster.serves("n1").with_context(|| kpx.log())?;
    kpx.stop()
}

/// Returns the objects of kube-proxy in a kubeadm cluster.
pub(crate) fn kubeadm() -> Result<(DaemonSet, ConfigMap)> {
    let objects = Objects::read(KUBE_PROXY)?;
    Ok((
        objects.daemon_set.context("a DaemonSet")?,
        objects.config_map.context("a ConfigMap")?,
    ))
}
