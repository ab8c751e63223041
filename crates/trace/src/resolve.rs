//! Resolves the names on the command line to addresses of known Services and endpoints.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, bail, ensure};
use proxy_common::addr::Proto;

use crate::name::{From, Pod, Port, To};
use crate::target::{CLIENT_PORT, Client, Target};
use proxy_view::object_name::suggestion;
use proxy_view::{BackendView, PortView, ServiceView};

/// The objects that an argument may name.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(crate) services: Vec<ServiceView>,
    pub(crate) node_name: String,
    pub(crate) node_addresses: Vec<IpAddr>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ends {
    /// The client; `None` for a process of the node, from any of the node's addresses.
    pub(crate) from: Option<SocketAddr>,
    pub(crate) to: Target,
}

/// Returns true if the client or the destination is an object's name.
pub(crate) fn has_names(from: Option<&From>, to: &To) -> bool {
    !matches!(to, To::At(_)) || from.is_some_and(|from| !matches!(from, From::At(_)))
}

impl Known {
    /// Returns the addresses of client and destination, IPv4 first. Fails if an object is unknown,
    /// ambiguous, or on another node.
    pub(crate) fn resolve(&self, from: Option<&From>, to: &To) -> Result<Ends> {
        let to = self.destinations(to)?;
        let Some(from) = self.clients(from)? else {
            return Ok(Ends {
                from: None,
                to: *to.first().context("no address to dial")?,
            });
        };
        let pairs = from
            .iter()
            .flat_map(|from| to.iter().map(move |to| (*from, *to)));
        let pair = pairs
            .into_iter()
            .find(|(from, to)| from.is_ipv4() == to.addr.is_ipv4());
        let of = |addrs: Vec<IpAddr>| {
            addrs
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        };
        let (from, to) = pair.with_context(|| {
            let [from, to] = [
                from.iter().map(SocketAddr::ip).collect(),
                to.iter().map(|to| to.addr.ip()).collect(),
            ];
            format!("{} and {} are of different families", of(from), of(to))
        })?;
        Ok(Ends {
            from: Some(from),
            to,
        })
    }

    fn clients(&self, from: Option<&From>) -> Result<Option<Vec<SocketAddr>>> {
        match from {
            None => Ok(None),
            Some(From::At(Client(at))) => Ok(Some(vec![*at])),
            Some(From::Node(name)) => {
                self.ensure_here(name)?;
                Ok(None)
            }
            Some(From::Pod(pod)) => {
                let (name, endpoints) = self.pod(pod)?;
                if let Some(node) = endpoints
                    .iter()
                    .find(|(_, backend)| !backend.local)
                    .and_then(|(_, backend)| backend.node.as_ref())
                {
                    bail!("pod {name} is on node {node}: trace on that node");
                }
                let addrs: BTreeSet<IpAddr> = endpoints
                    .iter()
                    .map(|(_, backend)| backend.address.ip())
                    .collect();
                Ok(Some(
                    addrs
                        .into_iter()
                        .map(|addr| SocketAddr::new(addr, CLIENT_PORT))
                        .collect(),
                ))
            }
        }
    }

    fn destinations(&self, to: &To) -> Result<Vec<Target>> {
        match to {
            To::At(target) => Ok(vec![*target]),
            To::Service(name, port) => targets(name.find(&self.services)?, port),
            To::Node(name, port) => {
                self.ensure_here(name)?;
                let number = port.number().with_context(|| {
                    format!("node/{name} needs the number of a port: node/{name}:30080")
                })?;
                let proto = port.proto.unwrap_or(Proto::TCP);
                let targets = self.node_addresses.iter().map(|addr| Target {
                    addr: SocketAddr::new(*addr, number),
                    proto,
                });
                Ok(targets.collect())
            }
            To::Pod(pod, port) => {
                let (name, endpoints) = self.pod(pod)?;
                pod_targets(&name, &endpoints, port)
            }
        }
    }

    fn ensure_here(&self, node: &str) -> Result<()> {
        ensure!(
            node == self.node_name,
            "this instance of kpx serves node {}: trace on node {node}",
            self.node_name
        );
        Ok(())
    }

    /// Returns the full name of a pod, with its ports and endpoints in Services. A workload's pod
    /// on this node is preferred.
    fn pod(&self, pod: &Pod) -> Result<(String, Vec<(&PortView, &BackendView)>)> {
        let ports = self.services.iter().flat_map(|service| &service.ports);
        let endpoints =
            ports.flat_map(|port| port.backends.iter().map(move |backend| (port, backend)));
        let named: Vec<_> = endpoints
            .filter_map(|(port, backend)| Some((backend.pod.as_deref()?, port, backend)))
            .collect();
        let mut names: Vec<_> = named
            .iter()
            .filter(|(name, ..)| pod.is(name))
            .map(|(name, _, backend)| (!backend.local, *name))
            .collect();
        names.sort_unstable();
        names.dedup();
        let Some(&(_, first)) = names.first() else {
            let kind = pod.of.unwrap_or("pod");
            let similar = if pod.of.is_none() {
                suggestion(
                    &pod.object,
                    named.iter().map(|(name, ..)| (*name).to_owned()),
                )
            } else {
                String::new()
            };
            bail!(
                "give the IP of {kind}/{}: no Service has an endpoint with that name{similar}",
                pod.object
            );
        };
        let namespaces: BTreeSet<_> = names
            .iter()
            .filter_map(|(_, name)| name.split('/').next())
            .collect();
        ensure!(
            namespaces.len() == 1,
            "{} is in several namespaces: {}",
            pod.object,
            namespaces.into_iter().collect::<Vec<_>>().join(", ")
        );
        let endpoints = named
            .iter()
            .filter(|(name, ..)| *name == first)
            .map(|(_, port, backend)| (*port, *backend));
        Ok((first.to_owned(), endpoints.collect()))
    }
}

impl Pod {
    /// Returns true if `name` (`NAMESPACE/NAME`) is this pod, or a pod of this workload. A
    /// Deployment's pod has a template hash in its name.
    fn is(&self, name: &str) -> bool {
        let Some((namespace, name)) = name.split_once('/') else {
            return false;
        };
        if self
            .object
            .namespace
            .as_ref()
            .is_some_and(|wanted| wanted != namespace)
        {
            return false;
        }
        let rest = name
            .strip_prefix(&self.object.name)
            .and_then(|rest| rest.strip_prefix('-'));
        match self.of {
            None => name == self.object.name,
            Some("deploy") => rest.is_some_and(|rest| rest.matches('-').count() == 1),
            Some(_) => rest.is_some_and(|rest| !rest.contains('-')),
        }
    }
}

impl Port {
    fn number(&self) -> Option<u16> {
        self.port.as_ref()?.parse().ok()
    }

    /// Returns true if the argument may mean this port of a Service.
    fn may_be(&self, port: &PortView) -> bool {
        let is_named = self
            .port
            .as_ref()
            .is_none_or(|wanted| *wanted == port.port.to_string() || *wanted == port.name);
        is_named
            && self
                .proto
                .is_none_or(|proto| proto.to_string().eq_ignore_ascii_case(&port.protocol))
    }
}

/// Returns the addresses of a Service at the given port, in both address families.
fn targets(service: &ServiceView, wanted: &Port) -> Result<Vec<Target>> {
    let name = format!("{}/{}", service.namespace, service.name);
    ensure!(
        !service.cluster_ips.is_empty(),
        "Service {name} is headless, so its clients dial pods themselves: --to pod/{}/POD:PORT",
        service.namespace
    );
    let found: Vec<_> = service
        .ports
        .iter()
        .filter(|port| wanted.may_be(port))
        .collect();
    let numbers: BTreeSet<u16> = found.iter().map(|port| port.port).collect();
    let (number, proto) = match (&found[..], numbers.first(), wanted.number()) {
        ([port], ..) => (port.port, proto(port)?),
        // Several protocols have this number.
        (_, Some(number), _) if numbers.len() == 1 => (*number, Proto::TCP),
        // The programs show the verdict for a port that the Service does not have.
        ([], _, Some(number)) => (number, wanted.proto.unwrap_or(Proto::TCP)),
        _ => {
            bail!(
                "Service {name} has the ports {}: choose one, as in svc/{name}:{}",
                port_list(service),
                example(service)
            )
        }
    };
    let mut addrs = service.cluster_ips.clone();
    addrs.sort_unstable();
    Ok(addrs
        .into_iter()
        .map(|addr| Target {
            addr: SocketAddr::new(addr, number),
            proto,
        })
        .collect())
}

fn port_list(service: &ServiceView) -> String {
    let port = |port: &PortView| {
        format!(
            "{}{}{}/{}",
            port.name,
            if port.name.is_empty() { "" } else { " " },
            port.port,
            port.protocol
        )
    };
    service
        .ports
        .iter()
        .map(port)
        .collect::<Vec<_>>()
        .join(", ")
}

fn example(service: &ServiceView) -> String {
    service
        .ports
        .first()
        .map(|port| port.port.to_string())
        .unwrap_or_default()
}

fn proto(port: &PortView) -> Result<Proto> {
    crate::target::protocol(&port.protocol).map_err(anyhow::Error::msg)
}

/// Returns the addresses and ports of a pod, in both address families.
fn pod_targets(
    name: &str,
    endpoints: &[(&PortView, &BackendView)],
    wanted: &Port,
) -> Result<Vec<Target>> {
    if let Some(number) = wanted.number() {
        let addrs: BTreeSet<IpAddr> = endpoints
            .iter()
            .map(|(_, backend)| backend.address.ip())
            .collect();
        let proto = wanted.proto.unwrap_or(Proto::TCP);
        return Ok(addrs
            .into_iter()
            .map(|addr| Target {
                addr: SocketAddr::new(addr, number),
                proto,
            })
            .collect());
    }
    let mut targets = Vec::new();
    for (port, backend) in endpoints.iter().filter(|(port, _)| wanted.may_be(port)) {
        targets.push((backend.address, proto(port)?));
    }
    let ports: BTreeSet<_> = targets
        .iter()
        .map(|(addr, proto)| (addr.port(), proto.0))
        .collect();
    ensure!(
        ports.len() == 1,
        "pod {name} needs the number of a port, as in pod/{name}:8080"
    );
    targets.sort_unstable_by_key(|(addr, _)| *addr);
    targets.dedup();
    Ok(targets
        .into_iter()
        .map(|(addr, proto)| Target { addr, proto })
        .collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn backend(address: &str, pod: &str, node: &str) -> serde_json::Value {
        json!({
            "address": address, "pod": pod, "node": node, "zone": null, "ready": true, "serving": true, "terminating": false,
            "local": node == "n1", "inClusterSet": true, "inLocalSet": true, "flows": 0,
        })
    }

    fn port(
        name: &str,
        protocol: &str,
        port: u16,
        backends: &[serde_json::Value],
    ) -> serde_json::Value {
        json!({
            "name": name, "protocol": protocol, "port": port, "nodePort": null, "frontends": [], "backends": backends,
            "counts": {
                "flowsOpened": 0, "flows": 0, "packets": 0, "bytes": 0, "packetsReturned": 0, "bytesReturned": 0, "refused": 0,
            },
        })
    }

    fn service(
        namespace: &str,
        name: &str,
        cluster_ips: &[&str],
        ports: &[serde_json::Value],
    ) -> ServiceView {
        let service = json!({
            "namespace": namespace, "name": name, "type": "ClusterIP", "created": null, "clusterIps": cluster_ips,
            "externalIps": [], "loadBalancerIps": [], "internalTrafficPolicy": "Cluster", "externalTrafficPolicy": "Cluster",
            "affinitySecs": null, "healthCheckNodePort": null, "algorithm": "random", "ports": ports,
        });
        serde_json::from_value(service).unwrap()
    }

    fn known() -> Known {
        let web = |port: u16| {
            [
                backend(&format!("10.244.1.10:{port}"), "shop/web-5d4f-x1", "n1"),
                backend(&format!("[fd00::10]:{port}"), "shop/web-5d4f-x1", "n1"),
                backend(&format!("10.244.2.10:{port}"), "shop/web-5d4f-x2", "n2"),
            ]
        };
        let db = [backend("10.244.1.11:5432", "shop/db-0", "n1")];
        let dns = [backend("10.244.1.12:53", "kube-system/dns-0", "n1")];
        Known {
            services: vec![
                service(
                    "shop",
                    "web",
                    &["fd00:1::1", "10.96.0.1"],
                    &[
                        port("http", "TCP", 80, &web(8080)),
                        port("tls", "TCP", 443, &web(8443)),
                    ],
                ),
                service("shop", "db", &["10.96.0.2"], &[port("", "TCP", 5432, &db)]),
                service("shop", "headless", &[], &[port("", "TCP", 5432, &db)]),
                service(
                    "kube-system",
                    "dns",
                    &["10.96.0.10"],
                    &[
                        port("dns", "UDP", 53, &dns),
                        port("dns-tcp", "TCP", 53, &dns),
                    ],
                ),
                service("other", "web", &["10.96.0.3"], &[port("", "TCP", 80, &[])]),
            ],
            node_name: "n1".to_owned(),
            node_addresses: vec!["192.0.2.1".parse().unwrap()],
        }
    }

    fn resolve(from: Option<&str>, to: &str) -> Result<String, String> {
        let from = from.map(|from| from.parse::<From>().unwrap());
        let ends = known()
            .resolve(from.as_ref(), &to.parse().unwrap())
            .map_err(|error| error.to_string())?;
        let from = ends
            .from
            .map_or_else(|| "node".to_owned(), |from| from.to_string());
        Ok(format!("{from} > {}", ends.to))
    }

    #[test]
    fn names_lead_to_addresses() {
        let cases = [
            (None, "shop/db", "node > 10.96.0.2:5432/tcp"),
            (Some("node/n1"), "svc/db", "node > 10.96.0.2:5432/tcp"),
            (
                Some("pod/shop/db-0"),
                "svc/shop/web:http",
                "10.244.1.11:32768 > 10.96.0.1:80/tcp",
            ),
            (
                Some("pod/db-0"),
                "web.shop.svc.cluster.local:443",
                "10.244.1.11:32768 > 10.96.0.1:443/tcp",
            ),
            (
                Some("sts/shop/db"),
                "shop/web:81",
                "10.244.1.11:32768 > 10.96.0.1:81/tcp",
            ),
            (
                Some("deploy/web"),
                "shop/db",
                "10.244.1.10:32768 > 10.96.0.2:5432/tcp",
            ),
            (
                Some("fd00::10"),
                "shop/web:80",
                "[fd00::10]:32768 > [fd00:1::1]:80/tcp",
            ),
            (
                Some("10.0.0.1:4000"),
                "node/n1:30080/udp",
                "10.0.0.1:4000 > 192.0.2.1:30080/udp",
            ),
            (None, "kube-system/dns", "node > 10.96.0.10:53/tcp"),
            (None, "kube-system/dns:53", "node > 10.96.0.10:53/tcp"),
            (None, "kube-system/dns:53/udp", "node > 10.96.0.10:53/udp"),
            (None, "kube-system/dns:dns", "node > 10.96.0.10:53/udp"),
            (None, "pod/shop/db-0", "node > 10.244.1.11:5432/tcp"),
            (None, "deploy/shop/web:tls", "node > 10.244.1.10:8443/tcp"),
            (None, "pod/shop/web-5d4f-x2:22", "node > 10.244.2.10:22/tcp"),
            (
                Some("10.0.0.1"),
                "10.96.0.1:80",
                "10.0.0.1:32768 > 10.96.0.1:80/tcp",
            ),
        ];
        for (from, to, want) in cases {
            assert_eq!(resolve(from, to).as_deref(), Ok(want), "{from:?} {to}");
        }
    }

    #[test]
    fn names_that_lead_nowhere_are_explained() {
        let cases = [
            (
                None,
                "shop/wbe",
                "kpx serves no Service shop/wbe; did you mean shop/web?",
            ),
            (None, "shop/zzz", "kpx serves no Service shop/zzz"),
            (
                None,
                "web",
                "several Services are called web: shop/web, other/web",
            ),
            (
                None,
                "shop/web",
                "Service shop/web has the ports http 80/TCP, tls 443/TCP: choose one, as in svc/shop/web:80",
            ),
            (
                None,
                "shop/web:grpc",
                "Service shop/web has the ports http 80/TCP, tls 443/TCP: choose one, as in svc/shop/web:80",
            ),
            (
                None,
                "shop/headless",
                "Service shop/headless is headless, so its clients dial pods themselves: --to pod/shop/POD:PORT",
            ),
            (
                Some("pod/shop/web-5d4f-x2"),
                "shop/db",
                "pod shop/web-5d4f-x2 is on node n2: trace on that node",
            ),
            (
                Some("pod/shop/db-1"),
                "shop/db",
                "give the IP of pod/shop/db-1: no Service has an endpoint with that name; did you mean shop/db-0?",
            ),
            (
                Some("node/n2"),
                "shop/db",
                "this instance of kpx serves node n1: trace on node n2",
            ),
            (
                None,
                "node/n1",
                "node/n1 needs the number of a port: node/n1:30080",
            ),
            (
                None,
                "pod/shop/web-5d4f-x1",
                "pod shop/web-5d4f-x1 needs the number of a port, as in pod/shop/web-5d4f-x1:8080",
            ),
            (
                Some("fd00::10"),
                "shop/db",
                "fd00::10 and 10.96.0.2 are of different families",
            ),
        ];
        for (from, to, want) in cases {
            assert_eq!(resolve(from, to), Err(want.to_owned()), "{from:?} {to}");
        }
    }
}
