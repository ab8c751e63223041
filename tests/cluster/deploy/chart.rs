//! The chart's values: their table, their effect on names, rights and image, and the bundled alerts
//! and dashboard.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::deploy::render::{deploy_dir, helm_output};

const NEEDED: &str = "--set=apiServer.host=192.0.2.1,image.repository=localhost/kpx";

/// Renders the chart with these values besides the required ones. Returns all documents.
fn rendered(values: &str) -> Result<Vec<Value>> {
    let args = [NEEDED.into(), format!("--set={values}").into()];
    let documents: Vec<Value> = serde_saphyr::from_multiple(&helm_output(&args)?)?;
    Ok(documents.into_iter().filter(|one| !one.is_null()).collect())
}

fn of_kind<'a>(documents: &'a [Value], kind: &str) -> Option<&'a Value> {
    documents.iter().find(|document| document["kind"] == kind)
}

fn file(path: &str) -> Result<String> {
    fs::read_to_string(deploy_dir().join(path)).with_context(|| format!("read {path}"))
}

/// Adds the leaf values below `path`.
fn flatten(path: &str, value: &Value, values: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(fields)
            if !fields.is_empty() && fields.keys().all(|name| !name.contains('.')) =>
        {
            for (name, value) in fields {
                let path = match path {
                    "" => name.clone(),
                    path => format!("{path}.{name}"),
                };
                flatten(&path, value, values);
            }
        }
        value => drop(values.insert(path.to_owned(), value.to_string())),
    }
}

#[test]
fn readme_lists_each_value_with_its_default() -> Result<()> {
    let mut values = BTreeMap::new();
    let of_chart: Value = serde_saphyr::from_str(&file("helm/kpx/values.yaml")?)?;
    flatten("", &of_chart, &mut values);
    let listed: BTreeMap<String, String> = file("helm/kpx/README.md")?
        .lines()
        .filter_map(|line| {
            let mut cells = line.strip_prefix("| `")?.split("` | `");
            let name = cells.next()?.to_owned();
            Some((name, cells.next()?.split("` | ").next()?.to_owned()))
        })
        .collect();
    assert_eq!(listed, values);
    Ok(())
}

#[test]
fn image_is_pinned_by_its_digest() -> Result<()> {
    let digest = format!("sha256:{}", "0a".repeat(32));
    for (values, image) in [
        (
            format!("image.digest={digest}"),
            format!("localhost/kpx@{digest}"),
        ),
        (
            format!("image.tag=1.2.3,image.digest={digest}"),
            format!("localhost/kpx:1.2.3@{digest}"),
        ),
    ] {
        let documents = rendered(&values)?;
        let set = of_kind(&documents, "DaemonSet").context("a DaemonSet")?;
        assert_eq!(
            set["spec"]["template"]["spec"]["containers"][0]["image"],
            image
        );
    }
    let refused = rendered("image.digest=latest").map(drop).unwrap_err();
    ensure!(
        format!("{refused:#}").contains("/image/digest"),
        "{refused:#}"
    );
    Ok(())
}

#[test]
fn objects_refer_to_each_other_by_their_chosen_names() -> Result<()> {
    let documents = rendered("fullnameOverride=proxy,nameOverride=net")?;
    for document in documents
        .iter()
        .filter(|document| document["kind"] != "CustomResourceDefinition")
    {
        assert_eq!(
            document["metadata"]["name"], "proxy",
            "{}",
            document["kind"]
        );
        let label = &document["metadata"]["labels"]["app.kubernetes.io/name"];
        assert_eq!(label, "net", "{}", document["kind"]);
    }
    let binding = of_kind(&documents, "ClusterRoleBinding").context("a binding")?;
    assert_eq!(binding["roleRef"]["name"], "proxy");
    assert_eq!(binding["subjects"][0]["name"], "proxy");
    let spec = &of_kind(&documents, "DaemonSet").context("a DaemonSet")?["spec"];
    assert_eq!(spec["template"]["spec"]["serviceAccountName"], "proxy");
    assert_eq!(
        spec["template"]["metadata"]["labels"],
        spec["selector"]["matchLabels"]
    );
    let volumes = spec["template"]["spec"]["volumes"]
        .as_array()
        .context("volumes")?;
    ensure!(
        volumes
            .iter()
            .any(|volume| volume["configMap"]["name"] == "proxy")
    );
    Ok(())
}

#[test]
fn account_and_rights_may_be_the_operators_own() -> Result<()> {
    let documents = rendered("serviceAccount.create=false,serviceAccount.name=mine")?;
    ensure!(of_kind(&documents, "ServiceAccount").is_none());
    let binding = of_kind(&documents, "ClusterRoleBinding").context("a binding")?;
    assert_eq!(binding["subjects"][0]["name"], "mine");
    let set = of_kind(&documents, "DaemonSet").context("a DaemonSet")?;
    assert_eq!(
        set["spec"]["template"]["spec"]["serviceAccountName"],
        "mine"
    );
    let documents = rendered("rbac.create=false")?;
    for kind in ["ClusterRole", "ClusterRoleBinding"] {
        ensure!(of_kind(&documents, kind).is_none(), "{kind}");
    }
    Ok(())
}

/// kpx reads Pods for socket load balancing and local redirects, and LocalRedirects only for the
/// latter.
#[test]
fn rights_follow_the_options_that_need_them() -> Result<()> {
    for (values, pods, redirects) in [
        ("kpxConfig.ui=true", true, false),
        ("kpxConfig.socketLB=off", false, false),
        ("kpxConfig.socketLB=host", false, false),
        ("kpxConfig.socketLB=auto", true, false),
        (
            "kpxConfig.socketLB=off,kpxConfig.localRedirect=true",
            true,
            true,
        ),
        (
            "existingConfigMap=kube-proxy,kpxConfig.socketLB=off",
            true,
            false,
        ),
        (
            "kpxConfig.socketLB=off,extraArgs={--socket-lb=all}",
            true,
            false,
        ),
        (
            "kpxConfig.socketLB=off,extraArgs={--local-redirect}",
            true,
            true,
        ),
        (
            "kpxConfig.socketLB=off,extraArgs={--local-redirect-addresses=192.0.2.1/32}",
            false,
            false,
        ),
        ("kpxConfig.socketLB=off,extraArgs={--v=4}", false, false),
    ] {
        let documents = rendered(values)?;
        let role = of_kind(&documents, "ClusterRole").context("a ClusterRole")?;
        let rules = role["rules"].as_array().context("rules")?;
        let grants = |resource: &str| {
            rules
                .iter()
                .any(|rule| rule["resources"] == json!([resource]))
        };
        assert_eq!(grants("pods"), pods, "{values}");
        assert_eq!(grants("localredirects"), redirects, "{values}");
    }
    Ok(())
}

/// Rights over all Leases of kube-system would be rights over its leader elections.
#[test]
fn leases_of_external_forwarding_have_a_namespace_of_their_own() -> Result<()> {
    for (values, is_granted) in [
        ("kpxConfig.externalForwarding=dsr", true),
        ("extraArgs={--external-forwarding=dsr}", true),
        (
            "existingConfigMap=kube-proxy,extraArgs={--external-forwarding=dsr}",
            true,
        ),
        (
            "existingConfigMap=kube-proxy,kpxConfig.externalForwarding=dsr",
            true,
        ),
        ("existingConfigMap=kube-proxy", false),
        ("extraArgs={--external-forwarding=masquerade}", false),
        ("kpxConfig.externalForwarding=masquerade", false),
        ("kpxConfig.ui=true", false),
        ("kpxConfig.externalForwarding=dsr,rbac.create=false", false),
    ] {
        let documents = rendered(values)?;
        for kind in ["Namespace", "Role", "RoleBinding"] {
            assert_eq!(
                of_kind(&documents, kind).is_some(),
                is_granted,
                "{kind}: {values}"
            );
        }
        let cluster_role = of_kind(&documents, "ClusterRole").map(Value::to_string);
        ensure!(cluster_role.is_none_or(|role| !role.contains("leases")));
    }
    let chart = rendered("kpxConfig.externalForwarding=dsr,serviceAccount.name=kpx")?;
    let component = file("kubernetes/components/external-forwarding/role.yaml")?;
    let component: Vec<Value> = serde_saphyr::from_multiple(&component)?;
    for (kind, paths) in [
        ("Namespace", &["/metadata/name"][..]),
        ("Role", &["/metadata/name", "/metadata/namespace", "/rules"]),
        (
            "RoleBinding",
            &["/metadata/name", "/metadata/namespace", "/roleRef"],
        ),
    ] {
        for path in paths {
            let [chart, component] = [&chart, &component]
                .map(|all| of_kind(all, kind).and_then(|one| one.pointer(path)));
            ensure!(
                chart.is_some() && chart == component,
                "{kind} {path}: {chart:?}"
            );
        }
    }
    let rules = of_kind(&chart, "Role").context("a Role")?["rules"].clone();
    assert_eq!(rules[0]["resources"], json!(["leases"]));
    Ok(())
}

#[test]
fn settings_of_pods_arrive() -> Result<()> {
    let documents = rendered(
        "affinity.nodeAffinity.x=y,extraArgs={--v=4,--socket-group=net},terminationGracePeriodSeconds=5",
    )?;
    let set = of_kind(&documents, "DaemonSet").context("a DaemonSet")?;
    let pod = &set["spec"]["template"]["spec"];
    assert_eq!(pod["affinity"], json!({ "nodeAffinity": { "x": "y" } }));
    assert_eq!(pod["terminationGracePeriodSeconds"], 5);
    let args = pod["containers"][0]["args"]
        .as_array()
        .context("arguments")?;
    ensure!(
        args.ends_with(&["--v=4".into(), "--socket-group=net".into()]),
        "{args:?}"
    );
    Ok(())
}

#[test]
fn alerts_and_dashboard_are_those_of_the_files() -> Result<()> {
    let documents = rendered("podLabels.a=b")?;
    let is_off = |document: &Value| {
        document["kind"] != "PrometheusRule" && document["metadata"]["name"] != "kpx-dashboard"
    };
    ensure!(documents.iter().all(is_off), "they are off by default");
    let documents = rendered(
        "prometheusRule.enabled=true,prometheusRule.labels.release=p,dashboard.enabled=true",
    )?;
    let rule = of_kind(&documents, "PrometheusRule").context("a PrometheusRule")?;
    assert_eq!(rule["metadata"]["labels"]["release"], "p");
    let alerts: Value = serde_saphyr::from_str(&file("monitoring/alerts.yaml")?)?;
    assert_eq!(rule["spec"], alerts);
    let mut maps = documents
        .iter()
        .filter(|document| document["kind"] == "ConfigMap");
    let dashboard = maps
        .find(|map| map["metadata"]["name"] == "kpx-dashboard")
        .context("a dashboard")?;
    assert_eq!(dashboard["metadata"]["labels"]["grafana_dashboard"], "1");
    let text = dashboard["data"]["kpx.json"].as_str().context("its file")?;
    let inside: Value = serde_json::from_str(text)?;
    let outside: Value = serde_json::from_str(&file("monitoring/grafana-dashboard.json")?)?;
    ensure!(
        inside == outside,
        "deploy/helm/kpx/files differs from deploy/monitoring"
    );
    Ok(())
}
