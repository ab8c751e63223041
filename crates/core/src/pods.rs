//! Decides which Pods of this node get socket load balancing.
//!
//! A Pod's own fields affect that Pod alone. Packet translation serves all other Pods, so a wrong
//! "no" costs only speed.

use std::fmt;

use crate::compact::{LocalPod, SOCKET_LB};

/// The reason why packet translation serves a Pod instead.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WhyPackets {
    /// The Pod is not running. Before it runs, a mesh's webhook may not have marked it yet.
    NotRunning,
    /// A mesh intercepts connections by the Service's address. Holds the mesh's marker.
    Mesh(Box<str>),
    VirtualMachine,
    /// The runtime class, which may run its own network stack.
    RuntimeClass(Box<str>),
    /// The Pod's annotation opts out.
    OptedOut,
    /// The annotation has this invalid value.
    BadChoice(Box<str>),
}

/// The treatment of a Pod's sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodPath {
    /// The Pod uses the host's network.
    Host,
    /// Socket load balancing translates its sockets.
    Sockets,
    Packets(WhyPackets),
}

impl PodPath {
    pub fn of(pod: &LocalPod) -> Self {
        if pod.host_network {
            return Self::Host;
        }
        let choice = pod.choice.as_deref();
        let is_forced = choice == Some("on");
        let why = match (&pod.mesh, &pod.runtime_class, choice) {
            (Some(sign), _, _) => WhyPackets::Mesh(sign.clone()),
            _ if pod.is_virtual_machine => WhyPackets::VirtualMachine,
            (_, _, Some("off")) => WhyPackets::OptedOut,
            (_, _, Some(bad)) if !is_forced => WhyPackets::BadChoice(bad.into()),
            (_, Some(class), _) if !is_forced => WhyPackets::RuntimeClass(class.clone()),
            _ if !pod.is_running => WhyPackets::NotRunning,
            _ => return Self::Sockets,
        };
        Self::Packets(why)
    }
}

impl WhyPackets {
    /// Returns the reason without the Pod's own values.
    pub fn group(&self) -> &'static str {
        match self {
            Self::NotRunning => "not running",
            Self::Mesh(_) => "in a mesh",
            Self::VirtualMachine => "virtual machines",
            Self::RuntimeClass(_) => "with a runtime class",
            Self::OptedOut => "opted out",
            Self::BadChoice(_) => "with a wrong annotation",
        }
    }
}

impl fmt::Display for WhyPackets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotRunning => f.write_str("it does not run"),
            Self::Mesh(sign) => write!(f, "it is in a mesh: {sign}"),
            Self::VirtualMachine => f.write_str("it is a virtual machine of KubeVirt"),
            Self::RuntimeClass(class) => write!(f, "its runtime class is {class}"),
            Self::OptedOut => write!(f, "its annotation {SOCKET_LB} is off"),
            Self::BadChoice(bad) => write!(
                f,
                "its annotation {SOCKET_LB} is {bad:?}, which is neither on nor off"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::compact::Compact;

    /// Returns the treatment of a running Pod with these annotations, labels and spec.
    fn way(annotations: Value, labels: Value, spec: Value) -> String {
        let object = json!({
            "metadata": { "namespace": "shop", "name": "cart", "uid": "1", "annotations": annotations, "labels": labels },
            "spec": spec, "status": { "phase": "Running" },
        });
        way_of(object)
    }

    fn way_of(mut object: Value) -> String {
        if object["spec"]["containers"].is_null() {
            object["spec"]["containers"] = json!([{ "name": "main" }]);
        }
        match PodPath::of(&LocalPod::compact(serde_json::from_value(object).unwrap())) {
            PodPath::Host => "host".to_owned(),
            PodPath::Sockets => "sockets".to_owned(),
            PodPath::Packets(why) => why.to_string(),
        }
    }

    fn check(rows: &[(Value, Value, Value, &str)]) {
        for (annotations, labels, spec, want) in rows {
            let case = format!("{annotations} {labels} {spec}");
            assert_eq!(
                way(annotations.clone(), labels.clone(), spec.clone()),
                *want,
                "{case}"
            );
        }
    }

    #[test]
    #[expect(clippy::too_many_lines, reason = "a table of cases")]
    fn a_mesh_keeps_the_connections_of_its_pods() {
        let none = || json!({});
        let annotated = |key: &str, value: &str| json!({ key: value });
        let rows = [
            (
                annotated("sidecar.istio.io/status", "{}"),
                none(),
                none(),
                "annotation sidecar.istio.io/status",
            ),
            (
                annotated("ambient.istio.io/redirection", "enabled"),
                none(),
                none(),
                "annotation ambient.istio.io/redirection",
            ),
            (
                annotated("ambient.istio.io/redirection", "pending"),
                none(),
                none(),
                "annotation ambient.istio.io/redirection",
            ),
            (
                annotated("kmesh.net/redirection", "enabled"),
                none(),
                none(),
                "annotation kmesh.net/redirection",
            ),
            (
                none(),
                annotated("istio.io/dataplane-mode", "Kmesh"),
                none(),
                "label istio.io/dataplane-mode",
            ),
            (
                none(),
                annotated("osm-proxy-uuid", "1"),
                none(),
                "label osm-proxy-uuid",
            ),
            (
                annotated("linkerd.io/proxy-version", "edge"),
                none(),
                none(),
                "annotation linkerd.io/proxy-version",
            ),
            (
                annotated("kuma.io/sidecar-injected", "true"),
                none(),
                none(),
                "annotation kuma.io/sidecar-injected",
            ),
            (
                annotated("consul.hashicorp.com/connect-inject-status", "injected"),
                none(),
                none(),
                "annotation consul.hashicorp.com/connect-inject-status",
            ),
            (
                none(),
                annotated("istio.io/dataplane-mode", "ambient"),
                none(),
                "label istio.io/dataplane-mode",
            ),
            (
                none(),
                annotated("kuma.io/sidecar-injection", "enabled"),
                none(),
                "label kuma.io/sidecar-injection",
            ),
            (
                none(),
                none(),
                json!({ "containers": [{ "name": "main" }, { "name": "linkerd-proxy" }] }),
                "container linkerd-proxy",
            ),
            (
                none(),
                none(),
                json!({ "initContainers": [{ "name": "istio-proxy" }] }),
                "container istio-proxy",
            ),
            (
                annotated("kpx.dev/socket-lb", "on"),
                annotated("istio.io/dataplane-mode", "ambient"),
                none(),
                "label istio.io/dataplane-mode",
            ),
        ];
        for (annotations, labels, spec, sign) in rows {
            check(&[(
                annotations,
                labels,
                spec,
                &format!("it is in a mesh: {sign}"),
            )]);
        }
        check(&[
            (
                annotated("ambient.istio.io/redirection", "disabled"),
                none(),
                none(),
                "sockets",
            ),
            (
                none(),
                annotated("istio.io/dataplane-mode", "none"),
                none(),
                "sockets",
            ),
        ]);
    }

    #[test]
    fn a_pods_kind_and_choice_decide_its_way() {
        let none = || json!({});
        let choice = |value: &str| json!({ "kpx.dev/socket-lb": value });
        let kata = || json!({ "runtimeClassName": "kata" });
        let machine = || json!({ "kubevirt.io": "virt-launcher" });
        check(&[
            (none(), none(), none(), "sockets"),
            (none(), none(), json!({ "hostNetwork": true }), "host"),
            (
                choice("off"),
                none(),
                json!({ "hostNetwork": true }),
                "host",
            ),
            (none(), none(), kata(), "its runtime class is kata"),
            (
                none(),
                machine(),
                none(),
                "it is a virtual machine of KubeVirt",
            ),
            (
                choice("on"),
                machine(),
                none(),
                "it is a virtual machine of KubeVirt",
            ),
            (
                choice("off"),
                none(),
                none(),
                "its annotation kpx.dev/socket-lb is off",
            ),
            (choice("on"), none(), none(), "sockets"),
            (choice("on"), none(), kata(), "sockets"),
            (
                choice("yes"),
                none(),
                kata(),
                "its annotation kpx.dev/socket-lb is \"yes\", which is neither on nor off",
            ),
        ]);
    }

    #[test]
    fn pods_sockets_are_translated_only_while_it_runs() {
        for (phase, want) in [
            (json!(null), "it does not run"),
            (json!("Pending"), "it does not run"),
            (json!("Running"), "sockets"),
            (json!("Succeeded"), "it does not run"),
        ] {
            let object =
                json!({ "metadata": { "name": "cart" }, "spec": {}, "status": { "phase": phase } });
            assert_eq!(way_of(object), want, "{phase}");
        }
    }
}
