//! The settings in `deploy/` match kpx's settings: in the chart, in the package's files, and beside
//! kubeadm's ConfigMap.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Volume;
use proxy_agent::config::{Configuration, KpxConfiguration};
use serde_json::{Map, Value};

use crate::deploy::own::container;
use crate::deploy::render::{Objects, deploy_dir, helm_output, kustomize};

const KUBE_PROXY: &str =
    "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
const KPX: &str = "apiVersion: kpx.dev/v1alpha1\nkind: KpxConfiguration\n";

/// Returns the fields of a KpxConfiguration with their defaults.
fn fields() -> Result<Map<String, Value>> {
    let Value::Object(mut fields) = serde_json::to_value(KpxConfiguration::default())? else {
        unreachable!("a struct")
    };
    fields.retain(|name, _| name != "apiVersion" && name != "kind");
    Ok(fields)
}

/// Returns the valid values from kpx's error about an invalid one.
fn choices(field: &str) -> Result<BTreeSet<String>> {
    let refused = Configuration::parse(&format!("{KUBE_PROXY}---\n{KPX}{field}: nonsense\n"));
    let error = format!(
        "{:#}",
        refused
            .err()
            .with_context(|| format!("{field} takes any text"))?
    );
    let (_, names) = error
        .split_once("must be one of ")
        .with_context(|| error.clone())?;
    let names = names.lines().next().unwrap_or_default().split(", ");
    Ok(names
        .map(|name| {
            name.trim_end_matches(|letter: char| !letter.is_alphanumeric())
                .to_owned()
        })
        .collect())
}

#[test]
fn chart_has_exactly_the_settings_of_kpx() -> Result<()> {
    let schema: Value = serde_json::from_str(&std::fs::read_to_string(
        deploy_dir().join("helm/kpx/values.schema.json"),
    )?)?;
    let known = schema["properties"]["kpxConfig"]["properties"]
        .as_object()
        .context("properties of kpxConfig")?;
    let fields = fields()?;
    let names = |map: &Map<String, Value>| map.keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(names(known), names(&fields));
    for (name, default) in &fields {
        let rule = &known[name];
        if let Some(values) = rule["enum"].as_array() {
            ensure!(
                values.contains(default),
                "{name}: the default {default} is not in {values:?}"
            );
            let texts = values
                .iter()
                .filter_map(Value::as_str)
                .filter(|text| !text.is_empty());
            assert_eq!(
                texts.map(str::to_owned).collect::<BTreeSet<_>>(),
                choices(name)?,
                "{name}"
            );
            // Helm parses these words as booleans.
            let has = |text: &str| values.contains(&text.into());
            assert_eq!(has("off"), values.contains(&false.into()), "{name}");
            assert_eq!(has("on"), values.contains(&true.into()), "{name}");
            continue;
        }
        let fits = match rule["type"].as_str() {
            Some("string") => default.is_string(),
            Some("boolean") => default.is_boolean(),
            Some("integer") => default.is_u64(),
            Some("array") => default.is_array() && rule["items"]["type"] == "string",
            _ => false,
        };
        ensure!(fits, "{name}: the default {default} is not of {rule}");
    }
    Ok(())
}

fn chart(args: &[&str]) -> Result<Objects> {
    let args: Vec<_> = args.iter().map(Into::into).collect();
    Objects::read(&helm_output(&args)?)
}

/// Returns the chart's error about these values.
fn refusal(args: &[&str]) -> Result<String> {
    Ok(format!(
        "{:#}",
        chart(args)
            .map(drop)
            .err()
            .with_context(|| format!("the chart takes {args:?}"))?
    ))
}

fn written(objects: &Objects, file: &str) -> Result<String> {
    let files = objects
        .config_map
        .as_ref()
        .and_then(|map| map.data.as_ref())
        .context("a ConfigMap")?;
    files
        .get(file)
        .cloned()
        .with_context(|| format!("no {file} in {files:?}"))
}

/// Helm parses unquoted `on` and `off` as booleans.
#[test]
fn settings_of_kpx_arrive_as_they_are_written() -> Result<()> {
    let values = tempfile::NamedTempFile::new()?;
    let settings = "backendHealth: on, socketLB: off, fastPath: auto, localRedirect: true, serviceMetrics: 500, \
                    monitorHistory: 10000, kubernetesVersion: '1.40', nodeIPs: ['192.0.2.7']";
    std::fs::write(
        values.path(),
        format!(
            "apiServer: {{host: 192.0.2.1}}\nimage: {{repository: localhost/kpx}}\nkpxConfig: {{{settings}}}\n"
        ),
    )?;
    let given = format!("--values={}", values.path().display());
    let kpx = Configuration::parse(&written(&chart(&[&given])?, "config.conf")?)?.kpx;
    let kpx = serde_json::to_value(kpx)?;
    for (field, value) in [
        ("backendHealth", Value::from("on")),
        ("socketLB", "off".into()),
        ("fastPath", "auto".into()),
        ("localRedirect", true.into()),
        ("serviceMetrics", 500.into()),
        ("monitorHistory", 10_000.into()),
        ("kubernetesVersion", "1.40".into()),
        ("nodeIPs", serde_json::json!(["192.0.2.7"])),
    ] {
        assert_eq!(kpx[field], value, "{field}");
    }
    let error = refusal(&[&given, "--set=kpxConfig.localRedirct=true"])?;
    ensure!(error.contains("localRedirct"), "{error}");
    Ok(())
}

#[test]
fn settings_of_kpx_stand_beside_kubeadms_config_map() -> Result<()> {
    let kubeadm = format!(
        "--values={}",
        deploy_dir().join("helm/values/kubeadm.yaml").display()
    );
    ensure!(
        chart(&[&kubeadm])?.config_map.is_none(),
        "without settings, kubeadm's ConfigMap is alone"
    );
    let objects = chart(&[&kubeadm, "--set=kpxConfig.backendHealth=on"])?;
    let text = written(&objects, "kpx.conf")?;
    let kpx = Configuration::parse(&format!("{KUBE_PROXY}---\n{text}"))?.kpx;
    assert_eq!(serde_json::to_value(kpx)?["backendHealth"], "on", "{text}");
    let mut set = objects.daemon_set.context("a DaemonSet")?;
    let args = container(&mut set)?.args.clone().unwrap_or_default();
    let has = |wanted: &str| args.iter().any(|arg| arg == wanted);
    ensure!(
        has("--config=/var/lib/kube-proxy/config.conf") && has("--kpx-config=/etc/kpx/kpx.conf"),
        "{args:?}"
    );
    let mounts = container(&mut set)?
        .volume_mounts
        .clone()
        .unwrap_or_default();
    let volumes = set
        .spec
        .and_then(|spec| spec.template.spec?.volumes)
        .unwrap_or_default();
    let mounted = |at: &str| {
        let mount = mounts.iter().find(|mount| mount.mount_path == at)?;
        let is_its = |volume: &&Volume| volume.name == mount.name;
        volumes
            .iter()
            .find(is_its)?
            .config_map
            .as_ref()
            .map(|map| map.name.clone())
    };
    assert_eq!(
        (mounted("/var/lib/kube-proxy"), mounted("/etc/kpx")),
        (Some("kube-proxy".into()), Some("kpx".into()))
    );
    Ok(())
}

/// A values file may leave `kpxConfig:` above lines that are all comments.
#[test]
fn empty_chart_value_uses_default() -> Result<()> {
    let named = [
        "--set=apiServer.host=192.0.2.1",
        "--set=image.repository=localhost/kpx",
    ];
    let plain = chart(&named)?;
    for value in [
        "kpxConfig",
        "config",
        "podMonitor",
        "existingConfigMap",
        "seccompProfile",
        "podLabels",
    ] {
        assert_eq!(
            chart(&[named[0], named[1], &format!("--set={value}=null")])?,
            plain,
            "{value}"
        );
    }
    for (value, reported, other) in [
        ("image", "Set image.repository", named[0]),
        ("apiServer", "Set apiServer.host", named[1]),
    ] {
        let error = refusal(&[other, &format!("--set={value}=null")])?;
        ensure!(error.contains(reported), "{error}");
    }
    Ok(())
}

#[test]
fn the_chart_refuses_two_config_maps_of_one_name() -> Result<()> {
    let named = [
        "--set=image.repository=localhost/kpx",
        "--set=existingConfigMap=kpx",
    ];
    ensure!(
        chart(&named)?.config_map.is_none(),
        "a ConfigMap of this name may be the operator's own"
    );
    let error = refusal(&[named[0], named[1], "--set=kpxConfig.ui=true"])?;
    ensure!(
        error.contains("existingConfigMap=kpx and kpxConfig cannot stand together"),
        "{error}"
    );
    Ok(())
}

#[test]
fn the_chart_brings_the_kind_local_redirect_where_kpx_reads_it() -> Result<()> {
    let named = [
        "--set=apiServer.host=192.0.2.1",
        "--set=image.repository=localhost/kpx",
    ];
    ensure!(
        chart(&named)?.custom_resource.is_none(),
        "kpx does not read the kind by default"
    );
    let kind = chart(&[named[0], named[1], "--set=kpxConfig.localRedirect=true"])?
        .custom_resource
        .context("the kind")?;
    let plain =
        kustomize(&deploy_dir().join("kubernetes/components/local-redirect"))?.custom_resource;
    assert_eq!(kind.spec, plain.context("the kind")?.spec);
    let kept = kind.metadata.annotations.unwrap_or_default();
    assert_eq!(
        kept.get("helm.sh/resource-policy").map(String::as_str),
        Some("keep")
    );
    Ok(())
}

/// Lines such as `#backendHealth: observe` show settings with their defaults.
#[test]
fn files_of_the_package_name_settings_with_their_defaults() -> Result<()> {
    let is_setting = |line: &str| {
        line.split_once(": ")
            .is_some_and(|(name, _)| name.chars().all(char::is_alphanumeric))
    };
    for file in ["debian/config.yaml", "systemd/host.yaml"] {
        let text =
            std::fs::read_to_string(deploy_dir().join(file)).with_context(|| file.to_owned())?;
        let mut settings = Vec::new();
        let mut lines = Vec::new();
        for line in text.lines() {
            let setting = line.strip_prefix('#').filter(|line| is_setting(line));
            settings.extend(
                setting
                    .and_then(|line| line.split_once(": "))
                    .map(|(name, _)| name.to_owned()),
            );
            lines.push(setting.unwrap_or(line));
        }
        let fields = fields()?;
        let unknown: Vec<_> = settings
            .iter()
            .filter(|name| !fields.contains_key(*name))
            .collect();
        ensure!(
            unknown.is_empty() && settings.len() >= 5,
            "{file}: {unknown:?} of {settings:?}"
        );
        let as_is = Configuration::parse(&text)?.kpx;
        let shown = Configuration::parse(&lines.join("\n"))?.kpx;
        assert_eq!(as_is, shown, "{file}");
    }
    Ok(())
}
