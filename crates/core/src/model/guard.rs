//! Guards addresses that no Service may take by naming them as its own (CVE-2020-8554). A user with
//! the right to write a Service may write any address into it.

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

/// The addresses and ranges that Services may not take.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guard {
    /// The sockets at which the API server is reached, by this agent and by the cluster's own
    /// record.
    api_servers: BTreeSet<SocketAddr>,
    /// The node's addresses, at which node ports are served.
    own: BTreeSet<IpAddr>,
    /// The ranges of permitted ExternalIPs; None: any.
    external_ip_cidrs: Option<Vec<IpNet>>,
    /// Set in mode host, where these ranges are for load balancer addresses too.
    is_outside: bool,
    ignores_external_ips: bool,
    /// The ranges of ClusterIPs, as far as the operator or the cluster has named them.
    service_cidrs: Vec<IpNet>,
    /// The networks in these ranges that are not for Services alone.
    shared_networks: Vec<IpNet>,
    /// The ClusterIPs of Services that other proxies serve.
    of_other_proxies: BTreeSet<IpAddr>,
    /// The Node object's ranges of pod addresses.
    pod_cidrs: Vec<IpNet>,
}

/// The pods that serve Services of other namespaces at the ExternalIPs of one Service.
///
/// Who may write a Service may name any address there, but no pod's socket may so become another's.
/// Load balancers' addresses are written by controllers.
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

    /// Checks whether the Service may be dialled at this ExternalIP and port.
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

/// The Service `default/kubernetes`, whose endpoints the API server maintains itself.
const KUBERNETES: (&str, &str) = ("default", "kubernetes");

impl Guard {
    pub(super) fn of(store: &Store, options: &ModelOptions) -> Self {
        let (namespace, name) = KUBERNETES;
        let kubernetes = ObjectName::new(namespace, name);
        let told = store
            .slices_of(&kubernetes)
            .flat_map(|slice| socket_addresses(slice));
        let known = store.node().map(node_addresses).unwrap_or_default();
        Self {
            api_servers: store.api_server().iter().copied().chain(told).collect(),
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

    /// Returns true for an address of this node.
    pub(super) fn is_own(&self, ip: IpAddr) -> bool {
        self.own.contains(&ip)
    }

    pub fn of_other_proxies(&self) -> &BTreeSet<IpAddr> {
        &self.of_other_proxies
    }

    /// Checks whether a Service may send to an address. A ClusterIP would be dialled once more on
    /// its way, past the NetworkPolicy for the Service behind it.
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

    /// Returns the range of ClusterIPs that has an address for Services alone.
    fn range_of(&self, ip: IpAddr) -> Option<&IpNet> {
        let range = self.service_cidrs.iter().find(|cidr| cidr.contains(&ip));
        range.filter(|_| !self.shared_networks.iter().any(|net| net.contains(&ip)))
    }

    /// Checks whether a Service may be dialled at an external address at all. The error names the
    /// reason.
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

    /// Checks whether this machine sends its packets for an external address to a Service. In mode
    /// host that may be any address of the internet, and the machine's owner trusts the cluster
    /// with those in the ranges alone.
    pub(super) fn takes(&self, ip: IpAddr) -> Result<(), String> {
        let mut nets = self.external_ip_cidrs.iter().flatten();
        if !self.is_outside || nets.any(|net| net.contains(&ip)) {
            return Ok(());
        }
        Err(format!(
            "{ip} is left to the network: it is not among the external-ip-cidrs, which mode host takes alone"
        ))
    }

    /// Returns true if this node leaves its address to a Service. Only that of a local redirect can
    /// be refused.
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

    /// Returns the same for one of its ports.
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

    /// Checks whether a Service may be dialled at this address and port.
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

    /// Checks whether a Service may take this port of the node's own addresses.
    pub(super) fn admit_node_port(&self, port: Port, proto: Proto) -> Result<(), String> {
        let taken = |at: &&SocketAddr| at.port() == port.get() && self.own.contains(&at.ip());
        match self.api_servers.iter().find(taken) {
            Some(at) if proto == Proto::TCP => Err(format!("{at}/{proto:?} is the API server's")),
            _ => Ok(()),
        }
    }
}

/// Returns true if an input about these Services changes the guarded addresses.
pub fn concerns<'a>(mut services: impl Iterator<Item = &'a ObjectName>) -> bool {
    services.any(|service| (&*service.namespace, &*service.name) == KUBERNETES)
}

/// Returns the ClusterIPs of a Service that another proxy serves.
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
