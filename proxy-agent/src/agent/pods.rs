//! Selects the pods of this node with socket load balancing, and reports the path of the other
//! pods.

use std::collections::BTreeSet;

use proxy_core::compact::LocalPod;
use proxy_core::model::{Cause, ObjectRef, Skipped};
use proxy_core::pods::{PodWay, WhyPackets};
use proxy_datapath::PodRow;

use super::Agent;
use crate::node::Node;
use crate::pod_sockets::{Found, LedPods};
use proxy_view::status::{PodStatus, PodsStatus};

#[derive(Debug, Default)]
pub(super) struct Pods {
    /// The pods with socket load balancing, if pods are selected.
    pub(super) led: Option<LedPods>,
    /// Annotations of Pods without a meaning.
    pub(super) bad: BTreeSet<Skipped>,
}

impl Agent {
    pub(super) fn on_pods(&mut self) {
        let (Some(led), Some(pods)) = (&self.pods.led, self.desired.store().pods()) else {
            return;
        };
        let mut uids = BTreeSet::new();
        let mut bad = BTreeSet::new();
        for pod in pods {
            match PodWay::of(pod) {
                PodWay::Led => drop(uids.insert(pod.uid.clone())),
                PodWay::Packets(WhyPackets::BadChoice(value)) => {
                    bad.insert(skipped(pod, &value));
                }
                PodWay::Host | PodWay::Packets(_) => {}
            }
        }
        led.set(uids);
        let before = std::mem::replace(&mut self.pods.bad, bad);
        self.pods
            .bad
            .difference(&before)
            .for_each(|skipped| self.skip(skipped));
    }

    pub(super) fn pods_status(&self, node: &Node) -> Option<PodsStatus> {
        // Programs that could not be reattached leave pods to packet translation.
        let led = self
            .pods
            .led
            .as_ref()
            .filter(|_| node.attachments().sockets_status().is_some())?;
        let store = self.desired.store();
        let found = led.found();
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
        Some(PodsStatus {
            led: pods.iter().filter(|pod| pod.way == LED).count(),
            why_none,
            pods,
        })
    }
}

const REFUSED: &str = "the API server does not let kpx list and watch Pods";

const HOST: &str = "host";
const LED: &str = "led";
const PACKETS: &str = "packets";

fn skipped(pod: &LocalPod, value: &str) -> Skipped {
    let bad = WhyPackets::BadChoice(value.into());
    Skipped {
        object: ObjectRef {
            kind: "Pod",
            name: pod.name.clone(),
        },
        field: "metadata.annotations".to_owned(),
        why: format!("{bad}: packets serve it"),
        cause: Cause::Invalid,
    }
}

/// `skips` is set while bypass connections of pods skip the stack.
fn status(pod: &LocalPod, found: &Found, skips: bool) -> PodStatus {
    let (way, group, why) = match PodWay::of(pod) {
        PodWay::Host => (HOST, "", Some("its sockets are the host's".to_owned())),
        PodWay::Packets(why) => (PACKETS, why.group(), Some(why.to_string())),
        PodWay::Led if skips => (PACKETS, "quicker past the stack", Some(QUICKER.to_owned())),
        PodWay::Led => match found.rows.get(&pod.uid) {
            Some(PodRow::Led) => (LED, "", None),
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
        way: way.to_owned(),
        group: group.to_owned(),
        why,
    }
}

const QUICKER: &str = "its connections skip the stack from their first packet on, which is quicker";
const NO_CGROUP: &str = "kubelet's folders have no cgroup of it";
