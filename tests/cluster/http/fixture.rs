//! kpx with an API server in one network namespace, and its HTTP endpoints.

use std::ops::Deref;

use anyhow::Result;
use serde_json::{Value, json};
use testbed::http::{self, Answer};
use testbed::netns::NetNs;
use testbed::watched_node::{self, WatchedNode};

/// A network namespace with an API server that has the node `n1`.
pub(crate) struct Fixture(WatchedNode);

impl Deref for Fixture {
    type Target = WatchedNode;

    fn deref(&self) -> &WatchedNode {
        &self.0
    }
}

impl Fixture {
    pub(crate) fn start(name: &str) -> Result<Self> {
        let base = WatchedNode::new(NetNs::create(format!("kpx-{}-{name}", std::process::id()))?)?;
        base.put(&node(&json!([])))?;
        Ok(Self(base))
    }

    pub(crate) fn ask(&self, at: &str, method: &str, path: &str) -> Result<Answer> {
        http::ask(&self.ns, at, method, path)
    }
}

pub(crate) fn node(taints: &Value) -> Value {
    let mut node = watched_node::node(&["192.0.2.1"]);
    node["spec"] = json!({ "taints": taints });
    node
}

/// Returns a Service of both families, with internalTrafficPolicy Local if `local`.
pub(crate) fn service(name: &str, nth: u8, local: bool) -> Value {
    let mut service = watched_node::service(name, nth, "TCP", 80);
    service["spec"]["internalTrafficPolicy"] = if local { "Local" } else { "Cluster" }.into();
    service
}

/// Returns an IPv4 slice with an endpoint on another node, `changed` at a time in RFC 3339.
pub(crate) fn slice(service: &str, nth: u8, changed: &str) -> Value {
    let mut slice = watched_node::slice(service, &format!("10.244.1.{nth}"), "TCP", 8080);
    slice["metadata"]["annotations"] =
        json!({ "endpoints.kubernetes.io/last-change-trigger-time": changed });
    slice["endpoints"][0]["nodeName"] = "n2".into();
    slice
}
