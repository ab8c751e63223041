//! The parts of the cluster: kpx's objects, their Events, the agents' logs.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::pin::pin;

use anyhow::{Context, Result};
use futures::{AsyncReadExt, StreamExt, stream};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::api::{ListParams, LogParams};
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::TIMEOUT;
use super::archive::Archive;
use crate::connect::ConnectArgs;
use crate::pods::{Cluster, NodePod};

/// Maximum size of an agent's log in bytes.
const LONGEST_LOG: i64 = 16 << 20;
/// The text in place of redacted values.
const LEFT_OUT: &str = "<left out>";

/// Adds the objects and the logs. Fails only if the archive cannot be written.
pub(super) async fn gather(
    archive: &mut Archive,
    cluster: &Cluster,
    connect: &ConnectArgs,
    log_lines: u32,
) -> Result<()> {
    let ConnectArgs {
        namespace,
        selector,
        ..
    } = connect;
    let client = || cluster.client.clone();
    let labelled = ListParams::default().labels(selector);
    let sets = list(
        connect,
        &Api::<DaemonSet>::namespaced(client(), namespace),
        &labelled,
    )
    .await;
    archive.add(
        "daemonsets.json",
        &format!("DaemonSets of {namespace} with {selector}"),
        text(sets),
    )?;
    let pods = list(
        connect,
        &Api::<Pod>::namespaced(client(), namespace),
        &labelled,
    )
    .await;
    archive.add(
        "pods.json",
        &format!("Pods of {namespace} with {selector}"),
        text(pods),
    )?;
    let nodes = list(connect, &Api::<Node>::all(client()), &ListParams::default())
        .await
        .map(|nodes| of_nodes(nodes, cluster));
    archive.add("nodes.json", "Nodes of these pods", text(nodes))?;
    let events = Api::<Event>::all(client());
    let events = list(connect, &events, &ListParams::default())
        .await
        .map(|events| about(events, cluster, connect));
    archive.add(
        "events.json",
        "Events of kpx, and about its pods and DaemonSet",
        text(events),
    )?;
    let logs = cluster
        .nodes
        .iter()
        .filter(|at| !at.pod.is_empty())
        .map(|at| async move {
            let log = log(connect, cluster, at, log_lines).await;
            (at, log)
        });
    let mut logs = stream::iter(logs).buffer_unordered(connect.parallel());
    while let Some((at, log)) = logs.next().await {
        archive.add(
            &format!("logs/{}.txt", at.node),
            &format!("the last {log_lines} lines of pod {}", at.pod),
            log,
        )?;
    }
    Ok(())
}

/// Lists objects, and removes the values that must not leave the cluster.
async fn list<K>(connect: &ConnectArgs, api: &Api<K>, params: &ListParams) -> Result<Vec<Value>>
where
    K: Resource + Clone + Debug + DeserializeOwned + Serialize,
{
    let mut objects = Vec::new();
    for mut object in connect
        .call(TIMEOUT, "list the objects", api.list(params))
        .await?
        .items
    {
        object.managed_fields_mut().clear();
        // kubectl's last-applied annotation contains the whole object.
        object
            .annotations_mut()
            .remove("kubectl.kubernetes.io/last-applied-configuration");
        let mut value = serde_json::to_value(&object).context("write an object")?;
        redact(&mut value);
        objects.push(value);
    }
    Ok(objects)
}

fn text(objects: Result<Vec<Value>>) -> Result<Vec<u8>> {
    serde_json::to_vec_pretty(&json!({ "apiVersion": "v1", "kind": "List", "items": objects? }))
        .context("write objects")
}

/// Removes the values of environment variables from all containers.
fn redact(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                if let ("env", Value::Array(variables)) = (name.as_str(), &mut *value) {
                    for variable in variables {
                        if let Some(value) = variable.get_mut("value") {
                            *value = Value::from(LEFT_OUT);
                        }
                    }
                }
                redact(value);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(redact),
        _ => {}
    }
}

fn of_nodes(nodes: Vec<Value>, cluster: &Cluster) -> Vec<Value> {
    let names: BTreeSet<_> = cluster.nodes.iter().map(|at| at.node.as_str()).collect();
    let is_asked = |node: &Value| {
        node["metadata"]["name"]
            .as_str()
            .is_some_and(|name| names.contains(name))
    };
    nodes.into_iter().filter(is_asked).collect()
}

/// Returns the Events that kpx sent, and the Events about its pods and its DaemonSet.
fn about(events: Vec<Value>, cluster: &Cluster, connect: &ConnectArgs) -> Vec<Value> {
    let pods: BTreeSet<_> = cluster.nodes.iter().map(|at| at.pod.as_str()).collect();
    let is_ours = |event: &Value| {
        let sender = [&event["reportingComponent"], &event["source"]["component"]];
        let object = &event["involvedObject"];
        let name = object["name"].as_str().unwrap_or_default();
        let is_object = match object["kind"].as_str() {
            Some("Pod") => pods.contains(name),
            Some("DaemonSet") => {
                object["namespace"] == connect.namespace.as_str()
                    && pods.iter().any(|pod| pod.starts_with(name))
            }
            _ => false,
        };
        is_object
            || sender.iter().any(|sender| {
                ["kpx", "kube-proxy"]
                    .iter()
                    .any(|kpx| sender.as_str() == Some(kpx))
            })
    };
    events.into_iter().filter(is_ours).collect()
}

async fn log(
    connect: &ConnectArgs,
    cluster: &Cluster,
    at: &NodePod,
    lines: u32,
) -> Result<Vec<u8>> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &at.namespace);
    let params = LogParams {
        container: at.container.clone(),
        tail_lines: Some(lines.into()),
        limit_bytes: Some(LONGEST_LOG),
        timestamps: true,
        ..LogParams::default()
    };
    let read = async |params: LogParams| {
        let call = async {
            let mut text = Vec::new();
            // Only an honest kubelet obeys the limit.
            let log = pods
                .log_stream(&at.pod, &params)
                .await?
                .take(LONGEST_LOG.unsigned_abs());
            pin!(log)
                .read_to_end(&mut text)
                .await
                .map_err(|error| kube::Error::Service(error.into()))?;
            Ok(text)
        };
        connect.call(TIMEOUT, "read the log", call).await
    };
    let text = read(params.clone()).await?;
    // The log of the previous container often has the cause of its restart.
    match read(LogParams {
        previous: true,
        ..params
    })
    .await
    {
        Ok(previous) => Ok([
            &b"--- before the last restart\n"[..],
            &previous,
            b"--- since\n",
            &text,
        ]
        .concat()),
        Err(_) => Ok(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_environment_variables_are_left_out() {
        let mut pod = json!({"spec": {"containers": [{"env": [
            {"name": "TOKEN", "value": "secret"},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ], "args": ["run"]}]}});
        redact(&mut pod);
        assert!(!pod.to_string().contains("secret"), "{pod}");
        assert_eq!(pod["spec"]["containers"][0]["env"][0]["value"], LEFT_OUT);
        assert_eq!(
            pod["spec"]["containers"][0]["env"][1]["valueFrom"]["fieldRef"]["fieldPath"],
            "spec.nodeName"
        );
    }
}
