//! Pods with devices on an uplink of their node, like the plugins macvlan and ipvlan, and the
//! node's own device there.
//!
//! An uplink does not exchange packets with its macvlan devices, so a node reaches its pods by its
//! own device on the uplink. The pods send everything through that device, because a direct packet
//! to another pod would bypass the node's stack and its Services.
//!
//! All ipvlan devices of an uplink share its link address. The kernel passes a packet between them
//! if its destination is an address of theirs, and otherwise to the uplink.

use anyhow::Result;

use super::Host;
use super::address::{DualNet, Family};
use crate::netns::NetNs;

const UPLINK: &str = "eth1";
const OWN: &str = "pods0";

/// The device types, in the syntax of `ip`.
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
    // The node redirects packets for other pods of this uplink.
    for key in ["ipv4/conf/all", "ipv4/conf/default", "ipv6/conf/default"] {
        ns.sysctl(&format!("{key}/accept_redirects"), "0")?;
    }
    // Older kernels refuse the final name here, because the node has its own eth0.
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
