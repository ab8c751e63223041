//! The rendered manifests are consistent.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Container, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::Value;
use tempfile::TempDir;

use crate::deploy::render::{IMAGE, Objects, deploy_dir, helm, helm_output, kustomize};

/// Overlays of the base; each has equivalent values of the chart.
const OVERLAYS: [&str; 6] = ["k3s", "kind", "kubeadm", "minikube", "rke2", "talos"];

#[test]
fn every_overlay_fits_together() -> Result<()> {
    for name in OVERLAYS {
        fits(&kustomize(&overlay(name))?).with_context(|| format!("overlay {name}"))?;
    }
    fits(&monitored()?.0).context("overlay with the component monitoring")
}

/// Some of them leave the control plane's address to the operator.
#[test]
fn every_file_of_values_fits_together() -> Result<()> {
    for file in fs::read_dir(deploy_dir().join("helm/values"))? {
        let file = file?.path();
        let given = format!("--set=apiServer.host=192.0.2.1,image.repository={IMAGE}");
        let args: [OsString; 3] = ["--values".into(), file.clone().into(), given.into()];
        fits(&Objects::read(&helm_output(&args)?)?)
            .with_context(|| format!("chart, {}", file.display()))?;
    }
    Ok(())
}

#[test]
fn the_chart_makes_what_kustomize_makes() -> Result<()> {
    for name in OVERLAYS {
        same(kustomize(&overlay(name))?, helm(&values(name))?).with_context(|| name.to_owned())?;
    }
    same(monitored()?.0, helm(&values("monitoring"))?).context("monitoring")
}

#[test]
fn the_chart_names_missing_values() {
    let refused = |args: &[&str]| {
        let args: Vec<_> = args.iter().map(Into::into).collect();
        format!("{:#}", helm_output(&args).expect_err("the chart takes it"))
    };
    let unnamed = refused(&["--set=image.repository=localhost/kpx"]);
    assert!(
        unnamed.contains("Set apiServer.host to an address of the control plane"),
        "{unnamed}"
    );
    let named = "--set=apiServer.host=192.0.2.1,image.repository=localhost/kpx";
    let without_image = refused(&["--set=apiServer.host=192.0.2.1"]);
    assert!(
        without_image.contains("Set image.repository to the name of kpx's image"),
        "{without_image}"
    );
    for (wrong, field) in [
        ("--set=apiserver.host=192.0.2.1", "apiserver"),
        ("--set=apiServer.port=70000", "/apiServer/port"),
        ("--set=image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("--set-json=capabilities=[\"CAP_BPF\"]", "/capabilities/0"),
        ("--set=config.kind=KubeProxyConfiguration", "/config/kind"),
    ] {
        let error = refused(&[named, wrong]);
        assert!(
            error.contains("don't meet the specifications of the schema") && error.contains(field),
            "{error}"
        );
    }
}

#[test]
fn settings_of_the_chart_arrive() -> Result<()> {
    let args = [
        "--set=apiServer.host=192.0.2.1",
        "--set=image.repository=example.com/kpx,image.tag=1.2.3",
        "--set-json=config={\"nodePortAddresses\":[\"primary\"],\"conntrack\":{\"min\":1}}",
        "--set=podLabels.team=net,podAnnotations.note=yes,updateStrategy.rollingUpdate.maxUnavailable=10%",
    ];
    let objects = Objects::read(&helm_output(&args.map(Into::into))?)?;
    fits(&objects)?;
    let set = objects
        .daemon_set
        .context("a DaemonSet")?
        .spec
        .context("a spec")?;
    let labels = set
        .template
        .metadata
        .context("metadata of pods")?
        .labels
        .unwrap_or_default();
    assert_eq!(labels.get("team").map(String::as_str), Some("net"));
    let pod = set.template.spec.context("a pod's spec")?;
    assert_eq!(
        pod.containers[0].image.as_deref(),
        Some("example.com/kpx:1.2.3")
    );
    let files = objects
        .config_map
        .context("a ConfigMap")?
        .data
        .unwrap_or_default();
    let documents: Vec<Value> = serde_saphyr::from_multiple(&files["config.conf"])?;
    assert_eq!(
        documents[0]["nodePortAddresses"],
        serde_json::json!(["primary"])
    );
    assert_eq!(documents[0]["conntrack"]["min"], 1);
    Ok(())
}

#[test]
fn manifests_name_their_image_with_its_registry() -> Result<()> {
    for folder in [
        "base",
        "kube-proxy-cleanup",
        "preflight",
        "uninstall",
        "way-back",
    ] {
        let objects = kustomize(&deploy_dir().join("kubernetes").join(folder))?;
        let pod = objects
            .daemon_set
            .and_then(|set| set.spec?.template.spec)
            .context("a pod's spec")?;
        let images: Vec<_> = pod
            .containers
            .into_iter()
            .chain(pod.init_containers.into_iter().flatten())
            .filter_map(|container| container.image)
            .collect();
        assert!(
            images.contains(&format!("{IMAGE}:{}", env!("CARGO_PKG_VERSION"))),
            "{folder}: {images:?}"
        );
        assert!(images.iter().all(|image| image.contains('/')), "{images:?}");
    }
    let patch = std::fs::read_to_string(deploy_dir().join("kubeadm/kubeproxydaemonset.yaml"))?;
    assert!(
        patch.contains(&format!("image: {IMAGE}:{}", env!("CARGO_PKG_VERSION"))),
        "{patch}"
    );
    Ok(())
}

/// The base needs an overlay, and reports its absence.
#[test]
fn the_base_names_no_api_server() -> Result<()> {
    let objects = kustomize(&deploy_dir().join("kubernetes/base"))?;
    fits(&objects)?;
    let pod = objects
        .daemon_set
        .and_then(|set| set.spec?.template.spec)
        .context("a pod's spec")?;
    let env = pod.containers[0]
        .env
        .iter()
        .flatten()
        .find(|env| env.name == "KUBERNETES_SERVICE_HOST");
    assert!(
        env.and_then(|env| env.value.as_deref())
            .is_some_and(|host| host.ends_with(".invalid"))
    );
    Ok(())
}

fn overlay(name: &str) -> PathBuf {
    deploy_dir().join("kubernetes/overlays").join(name)
}

fn values(name: &str) -> PathBuf {
    deploy_dir()
        .join("helm/values")
        .join(format!("{name}.yaml"))
}

/// Returns the overlay for kind with the component for the Prometheus operator, as a user adds it,
/// and its folder.
fn monitored() -> Result<(Objects, TempDir)> {
    // The folder is in the repository: kustomize refuses absolute paths.
    let folder = tempfile::Builder::new()
        .prefix(".test-")
        .tempdir_in(deploy_dir().join("kubernetes/overlays"))?;
    let kustomization = "resources: [../kind]\ncomponents: [../../components/monitoring]\n";
    fs::write(folder.path().join("kustomization.yaml"), kustomization)?;
    Ok((kustomize(folder.path())?, folder))
}

/// Checks that every reference has its target.
fn fits(objects: &Objects) -> Result<()> {
    let set = objects.daemon_set.as_ref().context("no DaemonSet")?;
    let spec = set.spec.as_ref().context("no spec")?;
    let pod = spec.template.spec.as_ref().context("no pod")?;
    let labels = spec
        .template
        .metadata
        .as_ref()
        .and_then(|metadata| metadata.labels.clone())
        .unwrap_or_default();
    let selector = spec.selector.match_labels.clone().unwrap_or_default();
    ensure!(
        !selector.is_empty()
            && selector
                .iter()
                .all(|(key, value)| labels.get(key) == Some(value)),
        "selector"
    );
    if let Some(monitor) = &objects.pod_monitor {
        ensure!(
            monitor.spec.selector.match_labels == selector,
            "selector of the PodMonitor"
        );
        for endpoint in &monitor.spec.pod_metrics_endpoints {
            port(
                &pod.containers[0],
                &IntOrString::String(endpoint.port.clone()),
            )
            .context("PodMonitor")?;
        }
    }
    rights_are_of_the_pod(objects, set.metadata.namespace.as_deref(), pod)?;
    let [container] = pod.containers.as_slice() else {
        anyhow::bail!("{} containers", pod.containers.len())
    };
    ensure!(
        container.liveness_probe.is_none(),
        "what is refused by the kernel is no reason to cut all that works"
    );
    let get = container
        .readiness_probe
        .as_ref()
        .and_then(|probe| probe.http_get.as_ref());
    port(container, &get.context("no probe by HTTP")?.port).context("probe")?;
    volumes_are_mounted(pod, container)?;
    configuration_is_there(objects, pod, container)
}

fn rights_are_of_the_pod(objects: &Objects, namespace: Option<&str>, pod: &PodSpec) -> Result<()> {
    let account = &objects
        .service_account
        .as_ref()
        .context("no ServiceAccount")?
        .metadata;
    ensure!(
        account.namespace.as_deref() == namespace && account.name == pod.service_account_name,
        "ServiceAccount"
    );
    let binding = objects
        .cluster_role_binding
        .as_ref()
        .context("no ClusterRoleBinding")?;
    let role = objects.cluster_role.as_ref().context("no ClusterRole")?;
    ensure!(
        Some(&binding.role_ref.name) == role.metadata.name.as_ref(),
        "roleRef"
    );
    let [subject] = binding.subjects.as_deref().unwrap_or_default() else {
        anyhow::bail!("subjects")
    };
    ensure!(
        Some(&subject.name) == account.name.as_ref() && subject.namespace == account.namespace,
        "subject"
    );
    Ok(())
}

fn port<'a>(container: &'a Container, wanted: &IntOrString) -> Result<&'a i32> {
    let IntOrString::String(wanted) = wanted else {
        anyhow::bail!("a port without name")
    };
    let port = container
        .ports
        .iter()
        .flatten()
        .find(|port| port.name.as_ref() == Some(wanted));
    Ok(&port
        .with_context(|| format!("no port {wanted}"))?
        .container_port)
}

fn volumes_are_mounted(pod: &PodSpec, container: &Container) -> Result<()> {
    let mut volumes: Vec<_> = pod
        .volumes
        .iter()
        .flatten()
        .map(|volume| &volume.name)
        .collect();
    let mut mounts: Vec<_> = container
        .volume_mounts
        .iter()
        .flatten()
        .map(|mount| &mount.name)
        .collect();
    volumes.sort();
    mounts.sort();
    ensure!(volumes == mounts, "volumes {volumes:?}, mounts {mounts:?}");
    Ok(())
}

/// Checks that the command's file is in a ConfigMap, among the objects or kubeadm's.
fn configuration_is_there(objects: &Objects, pod: &PodSpec, container: &Container) -> Result<()> {
    let config = container
        .args
        .iter()
        .flatten()
        .find_map(|arg| arg.strip_prefix("--config="))
        .context("no --config")?;
    let (folder, file) = config.rsplit_once('/').context("a path")?;
    let mount = container
        .volume_mounts
        .iter()
        .flatten()
        .find(|mount| mount.mount_path == folder);
    let mount = mount.with_context(|| format!("nothing is mounted at {folder}"))?;
    let volume = pod
        .volumes
        .iter()
        .flatten()
        .find(|volume| volume.name == mount.name)
        .context("its volume")?;
    let source = volume.config_map.as_ref().context("its ConfigMap")?;
    match &objects.config_map {
        None => ensure!(
            source.name == "kube-proxy" && file == "config.conf",
            "{} has no {file}",
            source.name
        ),
        Some(map) => {
            ensure!(
                map.metadata.name.as_ref() == Some(&source.name),
                "ConfigMap {}",
                source.name
            );
            ensure!(
                map.data.iter().flatten().any(|(name, _)| name == file),
                "{} has no {file}",
                source.name
            );
        }
    }
    Ok(())
}

fn same(kustomize: Objects, chart: Objects) -> Result<()> {
    let kustomize = format!("{:#?}", plain(kustomize)?);
    let chart = format!("{:#?}", plain(chart)?);
    let difference = kustomize
        .lines()
        .zip(chart.lines())
        .position(|(one, other)| one != other);
    let around = |text: &str, at: usize| {
        text.lines()
            .skip(at.saturating_sub(20))
            .take(21)
            .collect::<Vec<_>>()
            .join("\n")
    };
    if let Some(at) = difference {
        anyhow::bail!(
            "kustomize makes\n{}\nand the chart\n{}",
            around(&kustomize, at),
            around(&chart, at)
        );
    }
    ensure!(kustomize == chart, "one ends before the other");
    Ok(())
}

/// Removes the additions of one tool, Helm's labels and defaults in the text of a file, and sorts
/// the rest.
fn plain(mut objects: Objects) -> Result<Objects> {
    let strip = |metadata: &mut ObjectMeta| {
        let helms = [
            "app.kubernetes.io/instance",
            "app.kubernetes.io/version",
            "app.kubernetes.io/managed-by",
        ];
        let labels = metadata.labels.get_or_insert_default();
        labels.retain(|key, _| !helms.contains(&key.as_str()) && key != "helm.sh/chart");
    };
    objects
        .service_account
        .iter_mut()
        .for_each(|object| strip(&mut object.metadata));
    objects
        .cluster_role
        .iter_mut()
        .for_each(|object| strip(&mut object.metadata));
    objects
        .cluster_role_binding
        .iter_mut()
        .for_each(|object| strip(&mut object.metadata));
    objects
        .pod_monitor
        .iter_mut()
        .for_each(|object| strip(&mut object.metadata));
    objects
        .daemon_set
        .iter_mut()
        .for_each(|object| strip(&mut object.metadata));
    if let Some(map) = &mut objects.config_map {
        strip(&mut map.metadata);
        let files = map.data.take().unwrap_or_default();
        let read = files.into_iter().map(|(name, text)| {
            let documents: Vec<Value> = serde_saphyr::from_multiple(&text)?;
            Ok((name, serde_json::to_string(&documents)?))
        });
        map.data = Some(read.collect::<Result<BTreeMap<_, _>>>()?);
    }
    let pod = objects
        .daemon_set
        .as_mut()
        .and_then(|set| set.spec.as_mut()?.template.spec.as_mut());
    let pod = pod.context("a pod's spec")?;
    pod.volumes
        .iter_mut()
        .for_each(|volumes| volumes.sort_by(|a, b| a.name.cmp(&b.name)));
    for container in &mut pod.containers {
        container
            .env
            .iter_mut()
            .for_each(|env| env.sort_by(|a, b| a.name.cmp(&b.name)));
        container
            .volume_mounts
            .iter_mut()
            .for_each(|mounts| mounts.sort_by(|a, b| a.name.cmp(&b.name)));
    }
    Ok(objects)
}
