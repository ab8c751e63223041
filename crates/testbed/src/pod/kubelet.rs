//! Acts as both nodes' kubelets for the pods of a client, and as the EndpointSlice controller.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::PodSpec;
use serde_json::{Value, json};

use super::{Pod, Running, Supplies};
use crate::apiserver::ApiServer;
use crate::lab::{Dual, Family, Host, Lab, Node};

/// A pod's namespace and name.
type Name = (String, String);

/// The running pods, each in a pod of the lab or in its node's network.
pub struct Kubelets<'a> {
    lab: &'a Lab,
    supplies: Supplies,
    running: BTreeMap<Name, Played<'a>>,
    /// A Service, and the port of its endpoints in place of their own.
    pub misdirected: Option<(&'static str, u16)>,
}

struct Played<'a> {
    // Killed with this value.
    container: Running<'a>,
    host: &'a Host,
    in_node: bool,
}

impl<'a> Kubelets<'a> {
    pub fn new(lab: &'a Lab, supplies: Supplies) -> Self {
        Self {
            lab,
            supplies,
            running: BTreeMap::new(),
            misdirected: None,
        }
    }

    /// Returns the number of running pods.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Starts new pods with a node, ends deleted pods, and writes the endpoints of Services.
    pub fn sync(&mut self, api: &ApiServer) -> Result<()> {
        let pods = api.list("pods");
        let named = |pod: &Value| {
            (
                word(pod, "/metadata/namespace"),
                word(pod, "/metadata/name"),
            )
        };
        self.running
            .retain(|name, _| pods.iter().any(|pod| &named(pod) == name));
        for mut pod in pods {
            let name = named(&pod);
            if self.running.contains_key(&name) || !word(&pod, "/status/phase").is_empty() {
                continue;
            }
            let Some(node) = self
                .lab
                .nodes()
                .into_iter()
                .find(|node| node.host.name == word(&pod, "/spec/nodeName"))
            else {
                continue;
            };
            let spec: PodSpec =
                serde_json::from_value(pod["spec"].clone()).context("read a pod's spec")?;
            let played = self.play(node, &format!("{}-{}", name.0, name.1), &spec)?;
            let Dual { v4, v6 } = played.host.addrs;
            let inside = Arc::new(played.container.inside()?);
            self.running.insert(name.clone(), played);
            pod["status"] = json!({
                "phase": "Running", "podIP": v4, "podIPs": [{"ip": v4}, {"ip": v6}],
                "conditions": [{"type": "Ready", "status": "True"}],
            });
            api.reach(&name.0, &name.1, inside);
            api.apply_within(&pod)?;
        }
        self.write_endpoints(api)
    }

    fn play(&self, node: &'a Node, name: &str, spec: &PodSpec) -> Result<Played<'a>> {
        let in_node = spec.host_network == Some(true);
        let is_free = |host: &&Host| {
            !self
                .running
                .values()
                .any(|played| played.host.name == host.name)
        };
        let host = match in_node {
            true => &node.host,
            false => node
                .pods
                .iter()
                .find(is_free)
                .context("the node has no room for another pod")?,
        };
        let container = Running::run(
            self.lab,
            node,
            &Pod::new(self.lab, node, host, name, spec, &self.supplies)?,
        )?;
        Ok(Played {
            container,
            host,
            in_node,
        })
    }

    /// Writes an EndpointSlice of each family for each Service with a selector.
    fn write_endpoints(&self, api: &ApiServer) -> Result<()> {
        let pods = api.list("pods");
        for service in api.list("services") {
            let Some(selector) = service["spec"]["selector"].as_object() else {
                continue;
            };
            let namespace = word(&service, "/metadata/namespace");
            let name = word(&service, "/metadata/name");
            let selected = pods.iter().filter(|pod| {
                let labels = &pod["metadata"]["labels"];
                word(pod, "/metadata/namespace") == namespace
                    && selector
                        .iter()
                        .all(|(label, value)| &labels[label] == value)
            });
            let hosts: Vec<_> = selected
                .filter_map(|pod| {
                    self.running
                        .get(&(namespace.clone(), word(pod, "/metadata/name")))
                })
                .filter(|played| !played.in_node)
                .map(|played| played.host)
                .collect();
            for family in Family::ALL {
                api.apply_within(&self.slice(&service, &namespace, &name, family, &hosts))?;
            }
        }
        Ok(())
    }

    fn slice(
        &self,
        service: &Value,
        namespace: &str,
        name: &str,
        family: Family,
        hosts: &[&Host],
    ) -> Value {
        let endpoints = hosts.iter().map(|host| {
            json!({
                "addresses": [host.addrs.ip(family)],
                "conditions": {"ready": true, "serving": true, "terminating": false},
                "nodeName": self.lab.node_of(host).map(|node| node.host.name),
            })
        });
        let wrong = self
            .misdirected
            .filter(|(service, _)| *service == name)
            .map(|(_, port)| port);
        let ports = service["spec"]["ports"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|port| {
                let number = wrong.map_or(port["targetPort"].clone(), Value::from);
                json!({"name": port["name"], "protocol": port["protocol"], "port": number})
            });
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": format!("{name}-{}", family.to_string().to_lowercase()),
                "namespace": namespace,
                "labels": {"kubernetes.io/service-name": name},
            },
            "addressType": family.to_string(),
            "endpoints": endpoints.collect::<Vec<_>>(),
            "ports": ports.collect::<Vec<_>>(),
        })
    }
}

fn word(object: &Value, pointer: &str) -> String {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned()
}
