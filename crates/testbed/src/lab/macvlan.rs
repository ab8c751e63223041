//! Pods whose devices lie on an uplink of their node, as the plugins macvlan and ipvlan make them,
//! and the node's own device beside them.
//!
//! The uplink and what lies on it do not see each other. So a node reaches its pods by a device of
//! its own there. The pods send everything through that one, because a packet straight to another
//! pod would pass no stack that knows Services.
//!
//! All ipvlan devices of an uplink have its link address. The kernel hands a packet between them
//! wherever its destination is one of their addresses, and else to the uplink.

use anyhow::Result;

use super::Host;
use super::address::{DualNet, Family};
use crate::netns::NetNs;

const UPLINK: &str = "eth1";
const OWN: &str = "pods0";

/// The kinds of such devices, as `ip` names them.
pub(super) const MACVLAN: &str = "macvlan mode bridge";
pub(super) const IPVLAN: &str = "ipvlan mode l2";

pub(super) fn prepare(node: &NetNs, pod_net: DualNet, kind: &str) -> Result<()> {
    let gateway = pod_net.host(1);
    node.ip(&format!(
        "link add {OWN} link {UPLINK} type {kind}
         link set {OWN} up
         addr add {}/32 dev {OWN}
         addr add {}/128 dev {OWN} nodad",
        gateway.v4, gateway.v6,
    ))
}

pub(super) fn connect(node: &NetNs, pod: &Host, pod_net: DualNet, kind: &str) -> Result<()> {
    let Host { name, ns, addrs } = pod;
    let gateway = pod_net.host(1);
    // The node says that the other pods of this uplink need no router.
    for key in ["ipv4/conf/all", "ipv4/conf/default", "ipv6/conf/default"] {
        ns.sysctl(&format!("{key}/accept_redirects"), "0")?;
    }
    // Older kernels do not make it under its last name, which the node's own eth0 has.
    node.ip(&format!(
        "link add {name} link {UPLINK} type {kind}
         link set {name} netns {} name eth0
         route add {}/32 dev {OWN}
         route add {}/128 dev {OWN}",
        ns.name(),
        addrs.v4,
        addrs.v6,
    ))?;
    let routes = Family::ALL.map(|family| {
        let via = gateway.ip(family);
        format!("route add {via} dev eth0\nroute add default via {via} dev eth0")
    });
    ns.ip(&format!(
        "link set eth0 up
         addr add {}/32 dev eth0
         addr add {}/128 dev eth0 nodad
         {}",
        addrs.v4,
        addrs.v6,
        routes.join("\n"),
    ))
}
