//! A row of the matrix: a client, its destination, and the expected outcome.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use testbed::agent::SERVICE_PORT;
use testbed::lab::{Dual, EXTERNAL, Family, Host, Lab, Node};

use super::services::{self, PORT, SECOND_PORT};
use super::setting::Setting;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) id: &'static str,
    pub(crate) client: &'static str,
    pub(crate) to: To,
    pub(crate) service: &'static str,
    /// The outcome in the default mode.
    pub(crate) default: Expect,
    /// The outcome with `--masquerade compat`, as with kube-proxy.
    pub(crate) compat: Expect,
}

/// The address at which the client dials a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum To {
    ClusterIp,
    /// The ClusterIP, at a port that the Service does not have.
    ClusterIpOtherPort,
    /// A node's primary address.
    NodePort(&'static str),
    /// n1's address on the segment beside the fabric.
    NodePortSecond,
    /// 127.0.0.1 or ::1.
    NodePortLoopback,
    /// An address of n1 outside `--nodeport-addresses`.
    NodePortElsewhere,
    ExternalIp,
    LoadBalancer,
    /// The load balancer's address, at a port that the Service does not have.
    LoadBalancerOtherPort,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expect {
    /// The Service's only backend answers, and sees this source.
    Seen(Seen),
    /// Another server answers, because kpx leaves the packet alone.
    Other(&'static str, Seen),
    /// An RST or an ICMP error at once.
    Refused,
    /// No answer.
    Silence,
}

/// The source address that a backend sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// The client's own.
    Client,
    /// The dialled address, which is the client's own too.
    Dialled,
    /// The primary address of this node.
    Node(&'static str),
    /// The address of the device through which this node reaches the backend.
    Egress(&'static str),
    /// The source from which the client dials the backend directly.
    Routed,
}

/// The same outcome in both modes.
pub(crate) const fn same(
    id: &'static str,
    client: &'static str,
    to: To,
    service: &'static str,
    expect: Expect,
) -> Case {
    Case {
        id,
        client,
        to,
        service,
        default: expect,
        compat: expect,
    }
}

/// One source in the default mode, another in kube-proxy's.
pub(crate) const fn modes(
    id: &'static str,
    client: &'static str,
    to: To,
    service: &'static str,
    default: Seen,
    compat: Seen,
) -> Case {
    Case {
        id,
        client,
        to,
        service,
        default: Expect::Seen(default),
        compat: Expect::Seen(compat),
    }
}

impl Case {
    pub(crate) fn is_clusterip(&self) -> bool {
        self.id.starts_with('C')
    }

    /// Returns true if a node dials its own address and another host answers.
    pub(crate) fn starts_on_lo(&self) -> bool {
        let is_own = match self.to {
            To::NodePort(node) => node == self.client,
            To::NodePortLoopback => true,
            To::LoadBalancer | To::ExternalIp => {
                self.client == "n1" && services::HERE.contains(&self.service)
            }
            _ => false,
        };
        is_own && services::backend(self.service) != self.client
    }

    /// Returns true if a process of a node reaches a backend in the network of the same node.
    pub(crate) fn is_answered_on_lo(&self) -> bool {
        services::backend(self.service) == self.client
    }

    /// Returns true if a node's socket gets a backend at connect. Source ranges and other nodes'
    /// NodePorts need packets.
    pub(crate) fn is_by_socket(&self) -> bool {
        let is_for_sockets =
            !matches!(self.to, To::NodePort(node) if node != self.client) && self.id != "L08";
        matches!(self.client, "n1" | "n2") && is_for_sockets
    }

    pub(crate) fn expect(&self, compat: bool) -> Expect {
        if compat { self.compat } else { self.default }
    }

    /// Returns the address that the client dials.
    pub(crate) fn addr(&self, lab: &Lab, family: Family) -> SocketAddr {
        let service = services::index(self.service);
        let at = |addrs: Dual, port| SocketAddr::new(addrs.ip(family), port);
        let node_port = services::node_port(service);
        match self.to {
            To::ClusterIp => services::frontend(self.service, family),
            To::ClusterIpOtherPort => at(testbed::lab::SERVICE_CIDR.host(service), SECOND_PORT),
            To::NodePort(node) => at(lab.host(node).addrs, node_port),
            To::NodePortSecond => at(lab.n1.second, node_port),
            To::NodePortLoopback => match family {
                Family::V4 => (Ipv4Addr::LOCALHOST, node_port).into(),
                Family::V6 => (Ipv6Addr::LOCALHOST, node_port).into(),
            },
            To::NodePortElsewhere => at(services::left_out(), node_port),
            To::ExternalIp => at(services::external_ip(service), SERVICE_PORT),
            To::LoadBalancer => at(services::vip(service), SERVICE_PORT),
            To::LoadBalancerOtherPort => at(services::vip(service), SECOND_PORT),
        }
    }

    /// Returns the client's own address in this case.
    fn client_addr(&self, lab: &Lab, family: Family) -> IpAddr {
        let host = lab.host(self.client);
        match self.to {
            To::NodePortSecond => lab.second(host).ip(family),
            _ => host.addrs.ip(family),
        }
    }

    /// Returns the source address with which `backend` must see the client.
    pub(crate) fn source(
        &self,
        seen: Seen,
        backend: &str,
        lab: &Lab,
        setting: &Setting,
        family: Family,
    ) -> IpAddr {
        match seen {
            Seen::Client => self.client_addr(lab, family),
            Seen::Dialled => self.addr(lab, family).ip(),
            Seen::Node(name) => lab.host(name).addrs.ip(family),
            Seen::Egress(name) => {
                egress(lab, setting, lab.node_of(lab.host(name)), backend).ip(family)
            }
            Seen::Routed => routed(lab.host(self.client), lab.host(backend).addrs.ip(family)),
        }
    }
}

fn routed(client: &Host, backend: IpAddr) -> IpAddr {
    let any: IpAddr = if backend.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let source = client.ns.run(|| {
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect((backend, PORT))?;
        socket.local_addr()
    });
    source
        .expect("a socket that sends nothing has a route")
        .ip()
}

fn egress(lab: &Lab, setting: &Setting, node: Option<&Node>, backend: &str) -> Dual {
    let node = node.expect("a case names a node");
    let is_pod = |node: &Node| node.pods.iter().any(|pod| pod.name == backend);
    if is_pod(node) {
        node.towards_own_pods(lab.layout)
    } else if lab.nodes().into_iter().any(is_pod) {
        node.towards_pods(lab.layout, setting.pod_route)
    } else {
        node.host.addrs
    }
}

/// Returns an address that only tests give to hosts, far from the Services' own.
pub(crate) fn spare(nth: u8) -> Dual {
    EXTERNAL.host(200 + nth)
}
