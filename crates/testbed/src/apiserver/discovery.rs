//! Discovery: the server's version, its kinds, and the OpenAPI that kubectl needs.

use serde_json::{Value, json};

use super::kinds::{KINDS, Kind, Status, api_version, version};

const VERBS: [&str; 7] = [
    "create", "delete", "get", "list", "patch", "update", "watch",
];

/// Returns the answer to a GET of a path outside objects.
pub(crate) fn document(path: &str) -> Option<Value> {
    let segments: Vec<_> = path.trim_matches('/').split('/').collect();
    Some(match segments[..] {
        ["version"] => {
            json!({"major": "1", "minor": "36", "gitVersion": "v1.36.0+kpx", "gitCommit": "",
            "gitTreeState": "clean", "buildDate": "1970-01-01T00:00:00Z", "goVersion": "", "compiler": "",
            "platform": "linux/amd64"})
        }
        ["api"] => {
            json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})
        }
        ["apis"] => {
            let groups: Vec<_> = groups().into_iter().map(group).collect();
            json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        }
        ["apis", name] if groups().contains(&name) => {
            let mut group = group(name);
            (group["kind"], group["apiVersion"]) = (json!("APIGroup"), json!("v1"));
            group
        }
        ["api", "v1"] => resources(""),
        ["apis", name, given] if groups().contains(&name) && given == version(name) => {
            resources(name)
        }
        ["openapi", "v2"] => {
            json!({"swagger": "2.0", "info": {"title": "Kubernetes", "version": "v1.36.0"}, "paths": {},
            "definitions": {}})
        }
        ["openapi", "v3"] => {
            let paths = groups().into_iter().chain([""]).map(|group| {
                let path = prefix(group);
                (
                    path.clone(),
                    json!({"serverRelativeURL": format!("/openapi/v3/{path}")}),
                )
            });
            json!({"paths": paths.collect::<serde_json::Map<_, _>>()})
        }
        ["openapi", "v3", "api", "v1"] => openapi(""),
        ["openapi", "v3", "apis", name, given]
            if groups().contains(&name) && given == version(name) =>
        {
            openapi(name)
        }
        _ => return None,
    })
}

/// Returns the groups except the core group, each once.
fn groups() -> Vec<&'static str> {
    let mut groups: Vec<_> = KINDS
        .iter()
        .map(|k| k.group)
        .filter(|g| !g.is_empty())
        .collect();
    groups.sort_unstable();
    groups.dedup();
    groups
}

fn group(name: &str) -> Value {
    let version = json!({"groupVersion": api_version(name), "version": version(name)});
    json!({"name": name, "versions": [version], "preferredVersion": version})
}

fn resources(group: &str) -> Value {
    let of_kind = |kind: &Kind| {
        let mut resource = json!({"name": kind.plural, "singularName": kind.singular, "namespaced": kind.namespaced,
            "kind": kind.kind, "verbs": VERBS});
        if !kind.short.is_empty() {
            resource["shortNames"] = json!(kind.short);
        }
        if kind.kind == "Service" {
            resource["categories"] = json!(["all"]);
        }
        let status = json!({"name": format!("{}/status", kind.plural), "singularName": "",
            "namespaced": kind.namespaced, "kind": kind.kind, "verbs": ["get", "patch", "update"]});
        [
            Some(resource),
            (kind.status != Status::None).then_some(status),
        ]
    };
    let resources: Vec<_> = KINDS
        .iter()
        .filter(|k| k.group == group)
        .flat_map(of_kind)
        .flatten()
        .collect();
    let version = api_version(group);
    json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources})
}

/// Returns the kinds' patch parameters: kubectl leaves field validation to a server that declares
/// them.
fn openapi(group: &str) -> Value {
    let paths = KINDS.iter().filter(|k| k.group == group).map(|kind| {
        let place = if kind.namespaced { "namespaces/{namespace}/" } else { "" };
        let parameters: Vec<_> =
            ["dryRun", "fieldManager", "fieldValidation"].map(|name| json!({"name": name, "in": "query"})).into();
        let patch = json!({"parameters": parameters, "responses": {"200": {"description": "OK"}},
            "x-kubernetes-action": "patch",
            "x-kubernetes-group-version-kind": {"group": group, "version": version(group), "kind": kind.kind}});
        (format!("/{}/{place}{}/{{name}}", prefix(group), kind.plural), json!({"patch": patch}))
    });
    json!({"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.36.0"},
        "paths": paths.collect::<serde_json::Map<_, _>>(), "components": {"schemas": {}}})
}

fn prefix(group: &str) -> String {
    if group.is_empty() {
        "api/v1".to_owned()
    } else {
        format!("apis/{}", api_version(group))
    }
}
