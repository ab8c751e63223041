//! Protects addresses that no Service may claim (CVE-2020-8554): a user with write access to
//! Services can write any address into them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use proxy_common::addr::{Addr, Port, Proto};
use proxy_common::frontend::{FrontendKey, FrontendKind};

use super::node::{ModelOptions, node_addresses, pod_cidrs};
use super::read::{Reader, ip_of, not_on_a_network, port_number, protocol};
use super::{cluster_ips, service_cidrs};
use crate::compact::{EndpointSlice, Service};
use crate::input::ObjectName;
use crate::store::Store;

/// The addresses and ranges that Services may not claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guard {
    /// The API server's sockets: the agent's connection and the endpoints of `default/kubernetes`.
    api_servers: BTreeSet<SocketAddr>,
    /// The node's addresses, which serve node ports.
    own: BTreeSet<IpAddr>,
    /// The permitted ExternalIPs. `None` permits any.
    external_ip_cidrs: Option<Vec<IpNet>>,
    /// Set in host mode, where these ranges also apply to load balancer addresses.
    is_outside: bool,
    ignores_external_ips: bool,
    /// The ClusterIP ranges from the operator or the cluster.
    service_cidrs: Vec<IpNet>,
    /// The networks in these ranges that pods or routes also use.
    shared_networks: Vec<IpNet>,
    /// The ClusterIPs that other proxies serve.
    of_other_proxies: BTreeSet<IpAddr>,
    /// The Node object's pod CIDRs.
    pod_cidrs: Vec<IpNet>,
}

/// The pods of other namespaces that serve at the ExternalIPs of one Service.
///
/// A Service's author may write any ExternalIP, but must not capture another pod's socket. Load
/// balancer addresses are exempt because controllers write them.
#[derive(Clone, Debug, Default)]
pub struct PodsOfOthers(BTreeMap<(IpAddr, Port, Proto), ObjectName>);

impl PodsOfOthers {
    pub(super) fn of(store: &Store, name: &ObjectName, service: &Service) -> Self {
        let slices = store.slices_at_external_ips(name, service);
        let sockets = slices.flat_map(|(ip, slice)| {
            let of = slice.service.as_ref().unwrap_or(&slice.name);
            slice.ports.iter().filter_map(move |port| {
                let number = port_number(port.port?).ok()?;
                Some((
                    (ip, number, protocol(port.protocol.as_deref()).ok()?),
                    of.clone(),
                ))
            })
        });
        Self(sockets.collect())
    }

    /// Checks that the Service may use this ExternalIP and port.
    pub(super) fn admit(&self, ip: IpAddr, port: Port, proto: Proto) -> Result<(), String> {
        match self.0.get(&(ip, port, proto)) {
            Some(of) => Err(format!(
                "{}/{proto:?} is an endpoint of {of}",
                SocketAddr::new(ip, port.get())
            )),
            None => Ok(()),
        }
    }
}

/// The Service `default/kubernetes`, whose endpoints the API server maintains.
const KUBERNETES: (&str, &str) = ("default", "kubernetes");

impl Guard {
    pub(super) fn of(store: &Store, options: &ModelOptions) -> Self {
        let (namespace, name) = KUBERNETES;
        let kubernetes = ObjectName::new(namespace, name);
        let reported = store
            .slices_of(&kubernetes)
            .flat_map(|slice| socket_addresses(slice));
        let known = store.node().map(node_addresses).unwrap_or_default();
        Self {
            api_servers: store.api_server().iter().copied().chain(reported).collect(),
            own: options.node_ips.iter().copied().chain(known).collect(),
            external_ip_cidrs: options.external_ip_cidrs.clone(),
            is_outside: options.host_routes.is_some(),
            ignores_external_ips: options.ignores_external_ips,
            service_cidrs: match options.service_cidrs.as_slice() {
                [] => service_cidrs(store.service_cidrs()).0,
                given => given.to_vec(),
            },
            shared_networks: options.shared_networks.clone(),
            of_other_proxies: store
                .of_other_proxies()
                .flat_map(addresses_of_other_proxy)
                .collect(),
            pod_cidrs: store.node().map(pod_cidrs).unwrap_or_default(),
        }
    }

    pub(super) fn is_own(&self, ip: IpAddr) -> bool {
        self.own.contains(&ip)
    }

    pub fn of_other_proxies(&self) -> &BTreeSet<IpAddr> {
        &self.of_other_proxies
    }

    /// Checks that a Service may have this endpoint. A ClusterIP as endpoint would be translated
    /// again, and bypass the NetworkPolicy of its Service's pods.
    pub(super) fn admit_endpoint(&self, ip: IpAddr) -> Result<(), String> {
        if let Some(cidr) = self.range_of(ip) {
            return Err(format!(
                "{ip} is in {cidr}, from which ClusterIPs are taken: no endpoint is there"
            ));
        }
        if self.of_other_proxies.contains(&ip) {
            return Err(format!("{ip} is the ClusterIP of another proxy's Service"));
        }
        Ok(())
    }

    /// Returns the ClusterIP range of an address, unless pods or routes also use its network.
    fn range_of(&self, ip: IpAddr) -> Option<&IpNet> {
        let range = self.service_cidrs.iter().find(|cidr| cidr.contains(&ip));
        range.filter(|_| !self.shared_networks.iter().any(|net| net.contains(&ip)))
    }

    /// Checks that a Service may use an external address. The error names the reason.
    pub(super) fn admit_address<A: Addr>(&self, addr: A, kind: FrontendKind) -> Result<(), String> {
        let ip = addr.ip();
        if let Some(what) = not_on_a_network(ip) {
            return Err(format!("{ip} is {what}"));
        }
        if self.of_other_proxies.contains(&ip) {
            return Err(format!("{ip} is the ClusterIP of another proxy's Service"));
        }
        if self.ignores_external_ips && kind == FrontendKind::EXTERNAL_IP {
            return Err(format!(
                "{ip} is an ExternalIP, and the feature gate AllowServiceExternalIPs is off"
            ));
        }
        let of_pods = self
            .pod_cidrs
            .iter()
            .find(|cidr| kind == FrontendKind::EXTERNAL_IP && cidr.contains(&ip));
        if let Some(cidr) = of_pods {
            return Err(format!(
                "{ip} is in {cidr}, from which pods of this node have their addresses"
            ));
        }
        let is_restricted = kind == FrontendKind::EXTERNAL_IP && !self.is_outside;
        let nets = self.external_ip_cidrs.as_deref().filter(|_| is_restricted);
        if nets.is_some_and(|nets| !nets.iter().any(|net| net.contains(&ip))) {
            return Err(format!(
                "{ip} is not among the operator's external-ip-cidrs"
            ));
        }
        Ok(())
    }

    /// Checks that kpx translates packets to an external address. In host mode only the permitted
    /// ranges count: the address may be anywhere on the internet, and the host's owner trusts the
    /// cluster only with these ranges.
    pub(super) fn takes(&self, ip: IpAddr) -> Result<(), String> {
        let mut nets = self.external_ip_cidrs.iter().flatten();
        if !self.is_outside || nets.any(|net| net.contains(&ip)) {
            return Ok(());
        }
        Err(format!(
            "{ip} is left to the network: it is not among the external-ip-cidrs, which host mode takes alone"
        ))
    }

    /// Returns true if the Service may have this address. Only local redirects of addresses can be
    /// refused.
    pub(super) fn leaves_address(
        &self,
        reader: &mut Reader<'_>,
        service: &Service,
        ip: IpAddr,
    ) -> bool {
        !service.is_redirected_address
            || reader.admit(format_args!("spec.clusterIP"), self.admit_redirect(ip))
    }

    fn admit_redirect(&self, ip: IpAddr) -> Result<(), String> {
        if self.own.contains(&ip) {
            return Err(format!("{ip} is an address of this node"));
        }
        match self.range_of(ip) {
            Some(cidr) => Err(format!(
                "{ip} is in {cidr}, from which ClusterIPs are taken: a serviceMatcher is for these"
            )),
            None => self.admit_endpoint(ip),
        }
    }

    /// Returns true if the Service may have this port of the address.
    pub(super) fn leaves_port<A: Addr>(
        &self,
        reader: &mut Reader<'_>,
        service: &Service,
        index: usize,
        key: FrontendKey<A>,
    ) -> bool {
        let admitted = || self.admit_port(key.addr, key.port, key.proto);
        !service.is_redirected_address
            || reader.admit(format_args!("spec.ports[{index}]"), admitted())
    }

    pub(super) fn admit_port<A: Addr>(
        &self,
        addr: A,
        port: Port,
        proto: Proto,
    ) -> Result<(), String> {
        let at = SocketAddr::new(addr.ip(), port.get());
        if proto == Proto::TCP && self.api_servers.contains(&at) {
            return Err(format!("{at}/{proto:?} is the API server's"));
        }
        Ok(())
    }

    /// Checks that a Service may use this port at the node's own addresses.
    pub(super) fn admit_node_port(&self, port: Port, proto: Proto) -> Result<(), String> {
        let taken = |at: &&SocketAddr| at.port() == port.get() && self.own.contains(&at.ip());
        match self.api_servers.iter().find(taken) {
            Some(at) if proto == Proto::TCP => Err(format!("{at}/{proto:?} is the API server's")),
            _ => Ok(()),
        }
    }
}

/// Returns true if a change of these Services changes the protected addresses.
pub fn concerns<'a>(mut services: impl Iterator<Item = &'a ObjectName>) -> bool {
    services.any(|service| (&*service.namespace, &*service.name) == KUBERNETES)
}

fn addresses_of_other_proxy(service: &Service) -> impl Iterator<Item = IpAddr> {
    let has_some = service.type_.as_deref() != Some("ExternalName");
    cluster_ips(service).filter(move |_| has_some)
}

fn socket_addresses(slice: &EndpointSlice) -> impl Iterator<Item = SocketAddr> {
    let ports = slice
        .ports
        .iter()
        .filter_map(|port| u16::try_from(port.port?).ok());
    let addresses: Vec<IpAddr> = slice
        .endpoints
        .iter()
        .filter_map(|endpoint| ip_of(&endpoint.address).ok())
        .collect();
    ports.flat_map(move |port| {
        addresses
            .clone()
            .into_iter()
            .map(move |ip| SocketAddr::new(ip, port))
    })
}
