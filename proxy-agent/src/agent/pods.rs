//! Selects the pods of this node with socket load balancing, and reports how each pod's packets are
//! translated.

use std::collections::BTreeSet;

use proxy_core::compact::LocalPod;
use proxy_core::model::{Cause, ObjectRef, Skipped};
use proxy_core::pods::{PodPath, WhyPackets};
use proxy_datapath::PodRow;

use super::Agent;
use crate::node::Node;
use crate::pod_sockets::{Found, SelectedPods};
use proxy_view::status::{PodStatus, PodsStatus};

#[derive(Debug, Default)]
pub(super) struct Pods {
    /// The pods with socket load balancing, if pods are selected.
    pub(super) selected: Option<SelectedPods>,
    /// The Pods whose annotation has no valid value.
    pub(super) bad: BTreeSet<Skipped>,
}

impl Agent {
    pub(super) fn on_pods(&mut self) {
        let (Some(selected), Some(pods)) = (&self.pods.selected, self.desired.store().pods())
        else {
            return;
        };
        let mut uids = BTreeSet::new();
        let mut bad = BTreeSet::new();
        for pod in pods {
            match PodPath::of(pod) {
                PodPath::Sockets => drop(uids.insert(pod.uid.clone())),
                PodPath::Packets(WhyPackets::BadChoice(value)) => {
                    bad.insert(skipped(pod, &value));
                }
                PodPath::Host | PodPath::Packets(_) => {}
            }
        }
        selected.set(uids);
        let before = std::mem::replace(&mut self.pods.bad, bad);
        self.pods
            .bad
            .difference(&before)
            .for_each(|skipped| self.skip(skipped));
    }

    pub(super) fn pods_status(&self, node: &Node) -> Option<PodsStatus> {
        // While the socket programs are detached, devices translate the packets of all pods.
        let selected = self
            .pods
            .selected
            .as_ref()
            .filter(|_| node.attachments().sockets_status().is_some())?;
        let store = self.desired.store();
        let found = selected.found();
        let why_none = match store.pods() {
            None => Some("the Pods of this node are not listed yet".to_owned()),
            Some(_) if store.are_pods_refused() => Some(REFUSED.to_owned()),
            Some(_) => found.error.clone(),
        };
        let skips = node.opens_bypass_connections();
        let pods: Vec<_> = store
            .pods()
            .into_iter()
            .flatten()
            .map(|pod| status(pod, &found, skips))
            .collect();
        let by_sockets = pods.iter().filter(|pod| pod.path == SOCKETS).count();
        Some(PodsStatus {
            by_sockets,
            led: by_sockets,
            why_none,
            pods,
        })
    }
}

const REFUSED: &str = "the API server does not let kpx list and watch Pods";

const HOST: &str = "host";
const SOCKETS: &str = "sockets";
const PACKETS: &str = "packets";

fn skipped(pod: &LocalPod, value: &str) -> Skipped {
    let bad = WhyPackets::BadChoice(value.into());
    Skipped {
        object: ObjectRef {
            kind: "Pod",
            name: pod.name.clone(),
        },
        field: "metadata.annotations".to_owned(),
        why: format!("{bad}: kpx translates the pod's packets instead of its sockets"),
        cause: Cause::Invalid,
    }
}

/// `skips` is set while connections of pods may bypass the stack from their first packet on.
fn status(pod: &LocalPod, found: &Found, skips: bool) -> PodStatus {
    let (path, group, why) = match PodPath::of(pod) {
        PodPath::Host => (HOST, "", Some("its sockets are the host's".to_owned())),
        PodPath::Packets(why) => (PACKETS, why.group(), Some(why.to_string())),
        PodPath::Sockets if skips => (PACKETS, "quicker past the stack", Some(QUICKER.to_owned())),
        PodPath::Sockets => match found.rows.get(&pod.uid) {
            Some(PodRow::Written) => (SOCKETS, "", None),
            Some(PodRow::NoRoom) => (
                PACKETS,
                "beyond the table",
                Some("the table of pods is full".to_owned()),
            ),
            Some(PodRow::NoCgroup) | None => {
                (PACKETS, "without a cgroup", Some(NO_CGROUP.to_owned()))
            }
        },
    };
    PodStatus {
        namespace: pod.name.namespace.to_string(),
        name: pod.name.name.to_string(),
        path: path.to_owned(),
        way: if path == SOCKETS { "led" } else { path }.to_owned(),
        group: group.to_owned(),
        why,
    }
}

const QUICKER: &str = "its connections skip the stack from their first packet on, which is quicker";
const NO_CGROUP: &str = "kubelet's folders have no cgroup of it";
