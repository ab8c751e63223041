//! Parses names below the cluster's domain.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result, ensure};
use domain::base::Name;
use domain::base::name::{ToLabelIter, ToName};
use proxy_core::input::ObjectName;

pub(crate) type OwnedName = Name<Vec<u8>>;

/// The cluster's domain, such as `cluster.local`.
#[derive(Clone, Debug, PartialEq)]
pub struct Zone {
    name: OwnedName,
    /// The name server's address. `None` until it listens.
    server: Option<IpAddr>,
}

/// The object of a name below the domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The domain itself.
    Apex,
    /// `svc`, `pod` or `dns`: an empty non-terminal.
    Inner,
    /// `ns.dns`: the name server.
    NameServer,
    /// `dns-version`: the version of the specification.
    Version,
    /// `NAMESPACE.svc` or `NAMESPACE.pod`.
    Namespace(String),
    /// `NAME.NAMESPACE.svc`.
    Service(ObjectName),
    /// `_PROTOCOL.NAME.NAMESPACE.svc`: an empty non-terminal above ports.
    Protocol(ObjectName),
    /// `_PORT._PROTOCOL.NAME.NAMESPACE.svc`.
    Port {
        service: ObjectName,
        port: String,
        protocol: String,
    },
    /// `HOST.NAME.NAMESPACE.svc`: an endpoint by its hostname, or by its address with dashes.
    Endpoint { service: ObjectName, host: String },
    /// `ADDRESS.NAMESPACE.pod`, with dashes in the address.
    Pod { namespace: String, address: IpAddr },
    /// Any other name below the domain, which does not exist.
    Unknown,
}

impl fmt::Display for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name.fmt(f)
    }
}

impl Zone {
    /// Parses a domain, with or without the final dot. Returns an error for an invalid name and for
    /// the root.
    pub fn new(domain: &str) -> Result<Self> {
        let domain = domain
            .strip_suffix('.')
            .unwrap_or(domain)
            .to_ascii_lowercase();
        ensure!(!domain.is_empty(), "cluster domain must not be the root");
        let name = OwnedName::from_chars(domain.chars())
            .with_context(|| format!("`{domain}` is not a domain name"))?;
        Ok(Self { name, server: None })
    }

    /// Returns the zone with the name server's address.
    #[must_use]
    pub fn served_at(self, address: IpAddr) -> Self {
        Self {
            server: Some(address),
            ..self
        }
    }

    pub(crate) const fn server(&self) -> Option<IpAddr> {
        self.server
    }

    pub(crate) fn name(&self) -> &OwnedName {
        &self.name
    }

    /// Returns the name `labels` below the domain. `None` if it is too long.
    pub(crate) fn below(&self, labels: &str) -> Option<OwnedName> {
        OwnedName::from_chars(format!("{labels}.{}", self.name).chars()).ok()
    }

    /// Returns the subject of a name. `None` for names outside the domain.
    pub fn subject(&self, name: &impl ToName) -> Option<Subject> {
        if !name.ends_with(&self.name) {
            return None;
        }
        let labels = name.iter_labels().count() - self.name.iter_labels().count();
        let labels: Option<Vec<String>> = name
            .iter_labels()
            .take(labels)
            .map(|label| text(label.as_slice()))
            .collect();
        let Some(labels) = labels else {
            return Some(Subject::Unknown);
        };
        let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
        Some(match labels[..] {
            [] => Subject::Apex,
            ["svc" | "pod" | "dns"] => Subject::Inner,
            ["ns", "dns"] => Subject::NameServer,
            ["dns-version"] => Subject::Version,
            [namespace, "svc" | "pod"] => Subject::Namespace(namespace.to_owned()),
            [address, namespace, "pod"] => {
                let pod = |address| Subject::Pod {
                    namespace: namespace.to_owned(),
                    address,
                };
                dashed(address).map_or(Subject::Unknown, pod)
            }
            [name, namespace, "svc"] => Subject::Service(ObjectName::new(namespace, name)),
            [first, name, namespace, "svc"] => {
                let service = ObjectName::new(namespace, name);
                match first.strip_prefix('_') {
                    Some(_) => Subject::Protocol(service),
                    None => Subject::Endpoint {
                        service,
                        host: first.to_owned(),
                    },
                }
            }
            [port, protocol, name, namespace, "svc"] => {
                port_of(port, protocol, ObjectName::new(namespace, name))
            }
            _ => Subject::Unknown,
        })
    }
}

fn port_of(port: &str, protocol: &str, service: ObjectName) -> Subject {
    match (port.strip_prefix('_'), protocol.strip_prefix('_')) {
        (Some(port), Some(protocol)) => Subject::Port {
            service,
            port: port.to_owned(),
            protocol: protocol.to_owned(),
        },
        _ => Subject::Unknown,
    }
}

/// Returns a label in lower case. `None` unless it is ASCII, as Kubernetes names are.
fn text(label: &[u8]) -> Option<String> {
    label
        .is_ascii()
        .then(|| String::from_utf8_lossy(label).to_ascii_lowercase())
}

/// Parses an address with dashes for dots or colons.
fn dashed(text: &str) -> Option<IpAddr> {
    let v4 = || {
        text.replace('-', ".")
            .parse::<Ipv4Addr>()
            .ok()
            .map(IpAddr::V4)
    };
    let v6 = || {
        text.replace('-', ":")
            .parse::<Ipv6Addr>()
            .ok()
            .map(IpAddr::V6)
    };
    v4().or_else(v6)
}

/// Returns an address as a label, with dashes for dots and colons.
pub(crate) fn dashes(address: IpAddr) -> String {
    let text = address.to_string().replace(['.', ':'], "-");
    // A hostname may not begin or end with a dash, so CoreDNS adds a zero.
    let before = if text.starts_with('-') { "0" } else { "" };
    let after = if text.ends_with('-') { "0" } else { "" };
    format!("{before}{text}{after}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject(name: &str) -> Option<Subject> {
        let name = OwnedName::from_chars(name.chars()).expect("a name");
        Zone::new("cluster.local").expect("a domain").subject(&name)
    }

    #[test]
    fn names_stand_for_services_ports_endpoints_and_pods() {
        let web = || ObjectName::new("shop", "web");
        let cases = [
            ("cluster.local", Subject::Apex),
            ("svc.cluster.local", Subject::Inner),
            ("dns-version.cluster.local", Subject::Version),
            ("shop.svc.cluster.local", Subject::Namespace("shop".into())),
            ("web.shop.svc.cluster.local", Subject::Service(web())),
            ("WEB.Shop.SVC.Cluster.Local", Subject::Service(web())),
            ("_tcp.web.shop.svc.cluster.local", Subject::Protocol(web())),
            (
                "_http._tcp.web.shop.svc.cluster.local",
                Subject::Port {
                    service: web(),
                    port: "http".into(),
                    protocol: "tcp".into(),
                },
            ),
            (
                "web-0.web.shop.svc.cluster.local",
                Subject::Endpoint {
                    service: web(),
                    host: "web-0".into(),
                },
            ),
            (
                "10-244-1-2.shop.pod.cluster.local",
                Subject::Pod {
                    namespace: "shop".into(),
                    address: [10, 244, 1, 2].into(),
                },
            ),
            ("nonsense.shop.pod.cluster.local", Subject::Unknown),
            ("a.b.web.shop.svc.cluster.local", Subject::Unknown),
            ("a.b.c.web.shop.svc.cluster.local", Subject::Unknown),
            ("other.cluster.local", Subject::Unknown),
        ];
        for (name, expected) in cases {
            assert_eq!(subject(name), Some(expected), "{name}");
        }
        for name in ["example.com", "local", "mycluster.local", "web.shop.svc"] {
            assert_eq!(subject(name), None, "{name}");
        }
    }

    #[test]
    fn an_address_is_read_as_it_is_written() {
        for address in ["10.244.1.2", "fd00:10:244::7", "::1", "fd00::"] {
            let address: IpAddr = address.parse().expect("an address");
            let label = dashes(address);
            assert_eq!(dashed(&label), Some(address), "{label}");
        }
    }

    #[test]
    fn a_domain_is_a_name_below_the_root() {
        for domain in ["", ".", "a..b", &"a".repeat(64)] {
            assert!(Zone::new(domain).is_err(), "{domain}");
        }
        assert_eq!(
            Zone::new("Cluster.Local.")
                .expect("a domain")
                .name()
                .to_string(),
            "cluster.local"
        );
    }
}
