//! Publishes that this node takes over packets of external clients, and finds the other nodes that
//! do: each has a Lease in the agents' own namespace.
//!
//! A Lease only names its node. The addresses come from the Node object, of which a right over Leases
//! changes nothing. Each Node is read once for each change of its Lease, because a watch on all Nodes
//! would bring each node's heartbeats to every node. An agent writes its Lease only when it starts,
//! and when its ability changes.

use std::collections::BTreeMap;
use std::future::pending;
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};
use k8s_openapi::jiff::Timestamp;
use kube::api::{
    DeleteParams, ListParams, PartialObjectMeta, Patch, PatchParams, PostParams, WatchEvent,
    WatchParams,
};
use kube::{Api, Client, ResourceExt as _};
use proxy_core::model::node_addresses;
use tokio::time::sleep;
use tracing::info;

use super::errors::explain;
use crate::health::{Health, Problem};
use crate::peers::{PeerSource, Peers};

/// The label of the Leases. Its value is the version of what the nodes agree on: the table, the
/// outer headers, and the packets that they take.
const LABEL: &str = "kpx.dev/handover";
const VERSION: &str = "1";
/// What comes before the node's name in the name of a Lease.
const PREFIX: &str = "kpx-handover-";
/// The time between attempts.
const RETRY: Duration = Duration::from_secs(5);
/// The longest time without a list, in seconds: API servers limit watches to about five minutes.
const WATCH_SECS: u32 = 290;

/// The part of a source that outlives its clients.
pub(super) struct Handover {
    node_name: String,
    link: PeerSource,
    found: Peers,
    /// The Leases by name, with the version that [`Self::found`] was read for.
    leases: BTreeMap<String, String>,
}

impl Handover {
    pub(super) fn new(node_name: &str, link: PeerSource) -> Self {
        Self {
            node_name: node_name.to_owned(),
            link,
            found: Peers::new(),
            leases: BTreeMap::new(),
        }
    }

    /// Runs until it is dropped. The peers found stay while the server is unavailable.
    pub(super) async fn run(&mut self, client: &Client, health: &Health) -> ! {
        let leases = Api::default_namespaced(client.clone());
        let nodes = Api::all(client.clone());
        loop {
            match self.follow(&leases, &nodes, health).await {
                Ok(()) => continue,
                Err(error) => health.begin(
                    &Problem::Handover,
                    format!(
                        "Leases of the nodes that take clients over: {}",
                        explain(&error)
                    ),
                ),
            }
            sleep(RETRY).await;
        }
    }

    /// Lists and watches the Leases until the watch ends.
    async fn follow(
        &mut self,
        leases: &Api<Lease>,
        nodes: &Api<Node>,
        health: &Health,
    ) -> kube::Result<()> {
        self.publish(leases, nodes).await?;
        let selector = format!("{LABEL}={VERSION}");
        let list = leases
            .list_metadata(&ListParams::default().labels(&selector))
            .await?;
        let names: Vec<_> = list.items.iter().map(|lease| lease.name_any()).collect();
        self.leases.retain(|name, _| names.contains(name));
        for lease in &list.items {
            self.take(lease, nodes).await?;
        }
        self.report();
        health.end(&Problem::Handover);
        let version = list.metadata.resource_version.unwrap_or_default();
        let params = WatchParams::default().labels(&selector).timeout(WATCH_SECS);
        let mut events = leases.watch_metadata(&params, &version).await?.boxed();
        loop {
            tokio::select! {
                changed = self.link.is_able.changed() => {
                    if changed.is_err() {
                        // The agent is about to end.
                        return pending().await;
                    }
                    self.publish(leases, nodes).await?;
                }
                event = events.try_next() => match event? {
                    Some(WatchEvent::Added(lease) | WatchEvent::Modified(lease)) => {
                        self.take(&lease, nodes).await?;
                    }
                    Some(WatchEvent::Deleted(lease)) => drop(self.leases.remove(&lease.name_any())),
                    Some(WatchEvent::Bookmark(_)) => {}
                    Some(WatchEvent::Error(error)) => return Err(kube::Error::Api(error)),
                    None => return Ok(()),
                },
            }
            self.report();
        }
    }

    /// Reads the Node of a Lease, if the Lease is new or changed. A Node that does not exist is no
    /// peer.
    async fn take(
        &mut self,
        lease: &PartialObjectMeta<Lease>,
        nodes: &Api<Node>,
    ) -> kube::Result<()> {
        let name = lease.name_any();
        let Some(node) = name
            .strip_prefix(PREFIX)
            .filter(|node| *node != self.node_name)
        else {
            return Ok(());
        };
        let version = lease.resource_version().unwrap_or_default();
        if self.leases.get(&name) == Some(&version) {
            return Ok(());
        }
        match nodes.get_opt(node).await? {
            Some(object) => {
                self.found.insert(node.to_owned(), node_addresses(&object));
                self.leases.insert(name, version);
            }
            None => drop(self.leases.remove(&name)),
        }
        Ok(())
    }

    /// Hands the peers to the agent, if they have changed.
    fn report(&mut self) {
        let leases = &self.leases;
        self.found
            .retain(|node, _| leases.contains_key(&format!("{PREFIX}{node}")));
        let found = &self.found;
        self.link.peers.send_if_modified(|peers| {
            let is_change = peers != found;
            if is_change {
                peers.clone_from(found);
            }
            is_change
        });
    }

    /// Makes this node's Lease match its ability. An existing Lease is renewed, so that the others
    /// read the addresses of the Node again.
    async fn publish(&mut self, leases: &Api<Lease>, nodes: &Api<Node>) -> kube::Result<()> {
        let name = format!("{PREFIX}{}", self.node_name);
        let is_able = *self.link.is_able.borrow_and_update();
        if !is_able {
            return match leases.delete(&name, &DeleteParams::default()).await {
                Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
                deleted => deleted.map(drop),
            };
        }
        let renewed = MicroTime(Timestamp::now());
        let patch = serde_json::json!({ "spec": { "renewTime": renewed } });
        match leases
            .patch(&name, &PatchParams::default(), &Patch::Merge(&patch))
            .await
        {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            patched => return patched.map(drop),
        }
        let owner = nodes.get_opt(&self.node_name).await?;
        let owner = owner.and_then(|node| {
            Some(OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Node".to_owned(),
                name: self.node_name.clone(),
                uid: node.metadata.uid?,
                ..Default::default()
            })
        });
        let lease = Lease {
            metadata: ObjectMeta {
                name: Some(name),
                labels: Some([(LABEL.to_owned(), VERSION.to_owned())].into()),
                // The Lease goes with the Node.
                owner_references: owner.map(|owner| vec![owner]),
                ..Default::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.node_name.clone()),
                renew_time: Some(renewed),
                ..Default::default()
            }),
        };
        leases.create(&PostParams::default(), &lease).await?;
        info!("this node takes over packets of external clients");
        Ok(())
    }
}
