//! Finds the pod of kpx on each node.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};

use crate::connect::ConnectArgs;

/// Time limit for the API server in seconds.
const TIMEOUT: u64 = 20;

/// The cluster's API, and the pods of kpx.
pub(crate) struct Cluster {
    pub(crate) client: Client,
    pub(crate) nodes: Vec<NodePod>,
}

#[derive(Clone, Debug)]
pub(crate) struct NodePod {
    pub(crate) node: String,
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) container: Option<String>,
    /// The image of the kpx container.
    pub(crate) image: Option<String>,
    /// The reason why no command can run in the pod.
    pub(crate) absent: Option<String>,
}

impl Cluster {
    /// Connects, and finds the pods of the selected nodes.
    pub(crate) async fn find(args: &ConnectArgs) -> Result<Self> {
        let client = args.client().await?;
        let nodes = find(&client, args, &args.node).await?;
        Ok(Self { client, nodes })
    }
}

/// Finds the pod of each of these nodes, or of all nodes. Fails if there is none.
pub(crate) async fn find(
    client: &Client,
    args: &ConnectArgs,
    wanted: &[String],
) -> Result<Vec<NodePod>> {
    let ConnectArgs {
        namespace,
        selector,
        ..
    } = args;
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let what = format!("list the pods of namespace {namespace}");
    let listed = args
        .call(
            TIMEOUT,
            what,
            pods.list(&ListParams::default().labels(selector)),
        )
        .await?;
    let mut by_node: BTreeMap<String, NodePod> = BTreeMap::new();
    for pod in listed.items {
        let Some(found) = node_pod(&pod, namespace) else {
            continue;
        };
        let known = by_node.get(&found.node);
        // While a pod is being replaced, the running pod is used.
        if known.is_none_or(|known| known.absent.is_some() && found.absent.is_none()) {
            by_node.insert(found.node.clone(), found);
        }
    }
    ensure!(
        !by_node.is_empty(),
        "no pod in namespace {namespace} has the labels {selector}: --namespace and --selector name kpx's pods"
    );
    if wanted.is_empty() {
        return Ok(by_node.into_values().collect());
    }
    let found = |node: &String| by_node.get(node).cloned();
    let mut nodes: Vec<_> = wanted
        .iter()
        .map(|node| found(node).unwrap_or_else(|| missing(args, node)))
        .collect();
    nodes.sort_by(|a, b| a.node.cmp(&b.node));
    nodes.dedup_by(|a, b| a.node == b.node);
    Ok(nodes)
}

/// Returns a node without a pod of kpx.
pub(crate) fn missing(args: &ConnectArgs, node: &str) -> NodePod {
    let ConnectArgs {
        namespace,
        selector,
        ..
    } = args;
    NodePod {
        node: node.to_owned(),
        namespace: namespace.clone(),
        pod: String::new(),
        container: None,
        image: None,
        absent: Some(format!(
            "no pod of kpx is on this node (namespace {namespace}, labels {selector})"
        )),
    }
}

/// Returns the pod with its node; `None` if it is not scheduled yet.
fn node_pod(pod: &Pod, namespace: &str) -> Option<NodePod> {
    let spec = pod.spec.as_ref()?;
    let name = pod.metadata.name.clone()?;
    let container = spec
        .containers
        .iter()
        .find(|container| ["kpx", "kube-proxy"].contains(&container.name.as_str()));
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or("Pending");
    let absent = match (phase, &pod.metadata.deletion_timestamp) {
        ("Running", None) => None,
        ("Running", Some(_)) => Some(format!("pod {name} is about to end")),
        (phase, _) => Some(format!("pod {name} is {phase}")),
    };
    Some(NodePod {
        node: spec.node_name.clone()?,
        namespace: namespace.to_owned(),
        pod: name,
        container: container.map(|container| container.name.clone()),
        image: container.and_then(|container| container.image.clone()),
        absent,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pod_that_cannot_answer_says_why() {
        let pod = |value: serde_json::Value| -> Pod { serde_json::from_value(value).unwrap() };
        let spec = json!({"nodeName": "n1", "containers": [{"name": "side"}, {"name": "kpx"}]});
        let cases = [
            (json!({"phase": "Running"}), json!({"name": "kpx-1"}), None),
            (
                json!({"phase": "Pending"}),
                json!({"name": "kpx-1"}),
                Some("pod kpx-1 is Pending"),
            ),
            (
                json!({"phase": "Running"}),
                json!({"name": "kpx-1", "deletionTimestamp": "2026-01-02T03:04:05Z"}),
                Some("pod kpx-1 is about to end"),
            ),
        ];
        for (status, metadata, absent) in cases {
            let found = node_pod(
                &pod(json!({"metadata": metadata, "spec": spec, "status": status})),
                "a",
            )
            .unwrap();
            assert_eq!(
                (found.node.as_str(), found.container.as_deref()),
                ("n1", Some("kpx"))
            );
            assert_eq!(found.absent.as_deref(), absent);
        }
        let homeless = json!({"metadata": {"name": "kpx-1"}, "spec": {"containers": []}});
        assert!(node_pod(&pod(homeless), "a").is_none());
    }
}
