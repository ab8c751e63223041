//! Parses a packet's client and destination on the command line: addresses, and names of Kubernetes
//! objects.

use std::str::FromStr;

use proxy_common::addr::Proto;

use crate::target::{Client, Target};
use proxy_view::object_name::{ObjectName, SERVICES, ServiceName, is_name};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum From {
    At(Client),
    /// A process of a node: `node/n1`.
    Node(String),
    Pod(Pod),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum To {
    At(Target),
    Service(ServiceName, Port),
    Pod(Pod, Port),
    /// A node port: `node/n1:30080`.
    Node(String, Port),
}

/// A pod, by its own name or by the name of its workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pod {
    pub(crate) object: ObjectName,
    /// The kind of the workload, for example `deploy`; `None` for a pod's own name.
    pub(crate) of: Option<&'static str>,
}

/// The port of a destination. Missing parts come from the Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Port {
    /// The number, or the name of a Service's port.
    pub(crate) port: Option<String>,
    pub(crate) proto: Option<Proto>,
}

const PODS: &[&str] = &["pod", "pods", "po"];
const NODES: &[&str] = &["node", "nodes", "no"];
/// The workloads whose pods' names begin with the workload's name, with kubectl's abbreviations.
const WORKLOADS: &[(&str, &[&str])] = &[
    ("deploy", &["deploy", "deployment", "deployments"]),
    ("sts", &["sts", "statefulset", "statefulsets"]),
    ("ds", &["ds", "daemonset", "daemonsets"]),
    ("rs", &["rs", "replicaset", "replicasets"]),
    ("job", &["job", "jobs"]),
];
/// The label after the namespace in the DNS name of a Service.
const SVC: &str = "svc";

impl FromStr for From {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(client) = text.parse() {
            return Ok(Self::At(client));
        }
        let (kind, name) = kind_of(text);
        match kind {
            Some(kind) if NODES.contains(&kind) => Ok(Self::Node(name.to_owned())),
            Some(kind) => pod(kind, name)?
                .map(Self::Pod)
                .ok_or_else(|| format!("a {kind} sends no packets")),
            None => Err(format!(
                "{text:?} is not IP, IP:PORT, pod/NAMESPACE/NAME, deploy/NAMESPACE/NAME or node/NAME"
            )),
        }
    }
}

impl FromStr for To {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let not_at = match text.parse::<Target>() {
            Ok(target) => return Ok(Self::At(target)),
            Err(why) => why,
        };
        // The text looks like an address, so its port or a part of it is wrong or missing.
        let starts_as_addr = |text: &str| {
            text.starts_with('[') || text.starts_with(|first: char| first.is_ascii_digit())
        };
        if starts_as_addr(text) || text.matches(':').count() > 1 {
            return Err(not_at);
        }
        let (name, port) = split_port(text)?;
        let (kind, name) = kind_of(name);
        match kind {
            Some(kind) if SERVICES.contains(&kind) => {
                Ok(Self::Service(ServiceName(name.parse()?), port))
            }
            Some(kind) if NODES.contains(&kind) => Ok(Self::Node(name.to_owned(), port)),
            Some(kind) => match pod(kind, name)? {
                Some(pod) => Ok(Self::Pod(pod, port)),
                None => Err(format!("{kind:?} is not a kind that takes packets")),
            },
            None => Ok(Self::Service(
                ServiceName(dns_name(name)?.map_or_else(|| name.parse(), Ok)?),
                port,
            )),
        }
    }
}

/// Splits `KIND/REST`. Returns `None` and the whole text if the kind is unknown.
fn kind_of(text: &str) -> (Option<&str>, &str) {
    let is_kind = |kind: &str| {
        let of_workloads = || WORKLOADS.iter().flat_map(|(_, names)| *names);
        [SERVICES, PODS, NODES]
            .concat()
            .iter()
            .chain(of_workloads())
            .any(|name| *name == kind)
    };
    match text.split_once('/') {
        Some((kind, rest)) if is_kind(kind) => (Some(kind), rest),
        _ => (None, text),
    }
}

/// Returns the pod or the workload; `None` for other kinds.
fn pod(kind: &str, name: &str) -> Result<Option<Pod>, String> {
    if PODS.contains(&kind) {
        return Ok(Some(Pod {
            object: name.parse()?,
            of: None,
        }));
    }
    let workload = WORKLOADS.iter().find(|(_, names)| names.contains(&kind));
    workload
        .map(|(short, _)| {
            Ok(Pod {
                object: name.parse()?,
                of: Some(*short),
            })
        })
        .transpose()
}

/// Parses `NAME.NAMESPACE.svc`, with or without the cluster's domain.
fn dns_name(text: &str) -> Result<Option<ObjectName>, String> {
    let labels: Vec<_> = text.trim_end_matches('.').split('.').collect();
    let Some(svc) = labels.iter().position(|label| *label == SVC) else {
        return Ok(None);
    };
    match labels[..svc] {
        [name, namespace] => format!("{namespace}/{name}").parse().map(Some),
        _ => Err(format!(
            "{text:?} is not the DNS name of a Service: NAME.NAMESPACE.svc is expected"
        )),
    }
}

/// Splits `NAME[:PORT[/PROTOCOL]]`. A slash before the colon belongs to the name.
fn split_port(text: &str) -> Result<(&str, Port), String> {
    let Some((name, port)) = text.split_once(':') else {
        return Ok((text, Port::default()));
    };
    let (port, proto) = match port.split_once('/') {
        Some((port, proto)) => (port, Some(crate::target::protocol(proto)?)),
        None => (port, None),
    };
    // A port's name contains a letter.
    let may_be_name = || is_name(port) && port.contains(|letter: char| letter.is_ascii_lowercase());
    let is_port = port
        .parse::<u16>()
        .map_or_else(|_| may_be_name(), |number| number != 0);
    if !is_port {
        return Err(format!(
            "{port:?} is neither the number nor the name of a port"
        ));
    }
    Ok((
        name,
        Port {
            port: Some(port.to_owned()),
            proto,
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(namespace: Option<&str>, name: &str) -> ObjectName {
        ObjectName {
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
        }
    }

    fn port(port: &str, proto: Option<Proto>) -> Port {
        Port {
            port: Some(port.to_owned()),
            proto,
        }
    }

    #[test]
    fn destinations_are_addresses_or_names() {
        let web = || ServiceName(named(Some("shop"), "web"));
        let pod = |of| Pod {
            object: named(Some("shop"), "cart-0"),
            of,
        };
        let cases = [
            ("svc/shop/web", To::Service(web(), Port::default())),
            (
                "service/shop/web:http",
                To::Service(web(), port("http", None)),
            ),
            ("shop/web:80", To::Service(web(), port("80", None))),
            (
                "shop/web:53/udp",
                To::Service(web(), port("53", Some(Proto::UDP))),
            ),
            (
                "web",
                To::Service(ServiceName(named(None, "web")), Port::default()),
            ),
            (
                "svc/web:80",
                To::Service(ServiceName(named(None, "web")), port("80", None)),
            ),
            ("web.shop.svc:80", To::Service(web(), port("80", None))),
            (
                "web.shop.svc.cluster.local",
                To::Service(web(), Port::default()),
            ),
            (
                "web.shop.svc.cluster.local.",
                To::Service(web(), Port::default()),
            ),
            (
                "pod/shop/cart-0:8080",
                To::Pod(pod(None), port("8080", None)),
            ),
            (
                "deploy/shop/cart-0:8080",
                To::Pod(pod(Some("deploy")), port("8080", None)),
            ),
            (
                "node/n1:30080/sctp",
                To::Node("n1".to_owned(), port("30080", Some(Proto::SCTP))),
            ),
        ];
        for (text, want) in cases {
            assert_eq!(text.parse::<To>(), Ok(want), "{text}");
        }
        assert!(matches!("10.96.0.10:80".parse(), Ok(To::At(_))));
        for text in [
            "",
            "10.96.0.10",
            "fd00::a",
            "Web",
            "shop/web:0",
            "shop/web:70000",
            "a/b/c",
            "web.svc",
            "web:80/icmp",
        ] {
            assert!(text.parse::<To>().is_err(), "{text}");
        }
        assert_eq!(
            "10.96.0.10".parse::<To>(),
            Err("\"10.96.0.10\" is not IP:PORT".to_owned())
        );
    }

    #[test]
    fn clients_are_addresses_pods_and_nodes() {
        let pod = |namespace, of| {
            From::Pod(Pod {
                object: named(namespace, "cart"),
                of,
            })
        };
        let cases = [
            ("pod/shop/cart", pod(Some("shop"), None)),
            ("po/cart", pod(None, None)),
            ("deployment/shop/cart", pod(Some("shop"), Some("deploy"))),
            ("sts/cart", pod(None, Some("sts"))),
            ("node/n1", From::Node("n1".to_owned())),
        ];
        for (text, want) in cases {
            assert_eq!(text.parse::<From>(), Ok(want), "{text}");
        }
        assert!(matches!("10.244.1.10".parse(), Ok(From::At(_))));
        assert_eq!(
            "svc/web".parse::<From>(),
            Err("a svc sends no packets".to_owned())
        );
        for text in ["", "web", "shop/web", "pod/", "pod/a/b/c"] {
            assert!(text.parse::<From>().is_err(), "{text}");
        }
    }
}
