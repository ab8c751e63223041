//! The CustomResourceDefinition of LocalRedirect in `deploy/` has all fields that kpx reads.

use anyhow::{Context, Result, ensure};
use k8s_openapi::Resource;
use proxy_core::compact::LocalRedirect;
use serde_json::{Value, json};
use testbed::rights::granted;

use crate::deploy::render::{Objects, deploy_dir, kustomize};

/// An API server drops fields that the schema lacks.
#[test]
fn the_kind_keeps_every_field_that_kpx_reads() -> Result<()> {
    let path =
        deploy_dir().join("kubernetes/components/local-redirect/custom-resource-definition.yaml");
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let kind: Value = serde_saphyr::from_str(&text)?;
    let names = &kind["spec"]["names"];
    let version = &kind["spec"]["versions"][0];
    let api_version = format!(
        "{}/{}",
        kind["spec"]["group"].as_str().unwrap_or_default(),
        version["name"].as_str().unwrap_or_default()
    );
    ensure!(api_version == LocalRedirect::API_VERSION && names["kind"] == LocalRedirect::KIND);
    ensure!(names["plural"] == LocalRedirect::URL_PATH_SEGMENT);

    let ports = json!([{ "name": "dns", "port": "53", "protocol": "UDP" }]);
    let spec = json!({
        "redirectFrontend": {
            "serviceMatcher": { "serviceName": "dns", "namespace": "default", "toPorts": ports },
            "addressMatcher": { "ip": "192.0.2.1", "toPorts": ports },
        },
        "redirectBackend": {
            "localEndpointSelector": {
                "matchLabels": {},
                "matchExpressions": [{ "key": "app", "operator": "In", "values": ["cache"] }],
            },
            "toPorts": ports,
        },
        "skipRedirectFromBackend": true,
    });
    let read: LocalRedirect =
        serde_json::from_value(json!({ "metadata": {}, "spec": spec.clone() }))?;
    let written = serde_json::to_value(&read.spec)?;
    let schema = &version["schema"]["openAPIV3Schema"]["properties"]["spec"];
    for value in [&spec, &written] {
        keeps(schema, value, "spec")?;
    }
    Ok(())
}

/// kpx's base role lacks the right, so that nodes have it only with local redirects.
#[test]
fn only_the_component_grants_the_kind_to_kpx() -> Result<()> {
    let folder = deploy_dir().join("kubernetes");
    let text = std::fs::read_to_string(folder.join("components/local-redirect/cluster-role.yaml"))?;
    let role = Objects::read(&text)?;
    let base = kustomize(&folder.join("base"))?;
    let grants = |objects: &Objects| -> Result<bool> {
        let role = objects.cluster_role.as_ref().context("a ClusterRole")?;
        let granted = granted(role);
        Ok(["list", "watch"]
            .iter()
            .all(|verb| granted.contains(&(*verb, "kpx.dev", "localredirects"))))
    };
    ensure!(grants(&role)? && !grants(&base)?, "{role:?}");
    let binding = role.cluster_role_binding.context("a binding")?;
    let account = base.service_account.context("an account")?.metadata;
    let subject = &binding.subjects.as_deref().context("subjects")?[0];
    ensure!(Some(&subject.name) == account.name.as_ref() && subject.namespace == account.namespace);
    ensure!(
        Some(&binding.role_ref.name)
            == role
                .cluster_role
                .and_then(|role| role.metadata.name)
                .as_ref()
    );
    Ok(())
}

fn keeps(schema: &Value, value: &Value, path: &str) -> Result<()> {
    match value {
        Value::Object(fields) => fields.iter().try_for_each(|(name, value)| {
            let path = format!("{path}.{name}");
            let field = schema["properties"]
                .get(name)
                .with_context(|| format!("the schema has no {path}"))?;
            keeps(field, value, &path)
        }),
        Value::Array(items) => items
            .iter()
            .try_for_each(|item| keeps(&schema["items"], item, path)),
        _ => {
            let type_ = if value.is_boolean() {
                "boolean"
            } else {
                "string"
            };
            ensure!(schema["type"] == type_, "{path}: {:?}", schema["type"]);
            Ok(())
        }
    }
}
