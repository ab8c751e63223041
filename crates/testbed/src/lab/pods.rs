//! The connections of pods to their node and between nodes, as CNI plugins set them up.

use anyhow::{Context, Result};

use super::address::{DualNet, Family};
use super::build::{add_addr, plug};
use super::{Host, Layout, macvlan, netkit};
use crate::netns::NetNs;

/// The MAC address of the node's end of every routed pod's veth. It is constant, so pods keep their
/// neighbour entries.
const GATEWAY_MAC: &str = "ee:ee:ee:ee:ee:ee";

/// The node's device to the other node's pods in the overlay layout, with flannel's name.
pub(super) const OVERLAY: &str = "flannel.1";
/// The nodes' UDP port for the overlay: Linux's default, which flannel keeps.
pub const VXLAN_PORT: u16 = 8472;
/// The bytes that VXLAN, UDP and IPv4 add to an Ethernet frame.
pub(super) const OVERHEAD: u32 = 50;

/// Creates the devices that a node's pods share.
pub(super) fn prepare(node: &NetNs, layout: Layout, pod_net: DualNet) -> Result<()> {
    match layout {
        Layout::Routed | Layout::Ptp | Layout::Tunnel(_) | Layout::Netkit(_) => Ok(()),
        Layout::Macvlan => macvlan::prepare(node, pod_net, macvlan::MACVLAN),
        Layout::Ipvlan => macvlan::prepare(node, pod_net, macvlan::IPVLAN),
        Layout::Bridge => bridge(node, layout, pod_net),
        Layout::Vxlan => {
            bridge(node, layout, pod_net).and_then(|()| overlay(node, layout, pod_net))
        }
    }
}

pub(super) fn connect(node: &NetNs, layout: Layout, pod: &Host, pod_net: DualNet) -> Result<()> {
    match layout {
        Layout::Routed | Layout::Tunnel(_) => routed(node, layout, pod),
        Layout::Ptp => {
            node.ip(&format!(
                "link add {} type veth peer name eth0 netns {}",
                pod.name,
                pod.ns.name()
            ))?;
            ptp(node, pod, pod_net)
        }
        Layout::Netkit(mode) => {
            netkit::make(node, pod, mode).and_then(|()| ptp(node, pod, pod_net))
        }
        Layout::Macvlan => macvlan::connect(node, pod, pod_net, macvlan::MACVLAN),
        Layout::Ipvlan => macvlan::connect(node, pod, pod_net, macvlan::IPVLAN),
        Layout::Bridge | Layout::Vxlan => bridged(node, layout, pod, pod_net),
    }
}

fn bridge(node: &NetNs, layout: Layout, pod_net: DualNet) -> Result<()> {
    // Kubernetes requires these on bridges of pods: netfilter must see both directions of a flow.
    for key in ["bridge-nf-call-iptables", "bridge-nf-call-ip6tables"] {
        node.sysctl(&format!("bridge/{key}"), "1")
            .context("load the module br_netfilter")?;
    }
    node.ip(&format!(
        "link add cni0 mtu {} type bridge mcast_snooping 0
         link set cni0 up
         {}",
        layout.mtu(),
        add_addr("cni0", pod_net, 1)
    ))
}

/// Creates a VXLAN device with the first address of the node's pods; [`lead_to`] configures the
/// remote node.
fn overlay(node: &NetNs, layout: Layout, pod_net: DualNet) -> Result<()> {
    let addrs = pod_net.host(0);
    node.ip(&format!(
        "link add {OVERLAY} address {} mtu {} type vxlan id 1 dstport {VXLAN_PORT} nolearning noudpcsum
         link set {OVERLAY} up
         addr add {}/32 dev {OVERLAY}
         addr add {}/128 dev {OVERLAY} nodad",
        overlay_mac(pod_net),
        layout.mtu(),
        addrs.v4,
        addrs.v6,
    ))
}

/// Routes packets for another node's pods into the overlay, to that node at `underlay`.
pub(super) fn lead_to(node: &NetNs, other: DualNet, underlay: std::net::Ipv4Addr) -> Result<()> {
    let mac = overlay_mac(other);
    let gateway = other.host(0);
    let lines = Family::ALL.map(|family| {
        let net = other.cidr(family);
        let gateway = gateway.ip(family);
        format!(
            "neigh replace {gateway} lladdr {mac} dev {OVERLAY} nud permanent
             route replace {net} via {gateway} dev {OVERLAY} onlink"
        )
    });
    node.ip(&lines.join("\n"))?;
    let mut bridge = std::process::Command::new("bridge");
    let entry = format!("fdb replace {mac} dev {OVERLAY} dst {underlay} self permanent");
    node.exec(bridge.args(entry.split(' '))).map(drop)
}

/// Returns the MAC address of the overlay device on the node with these pods.
fn overlay_mac(pod_net: DualNet) -> String {
    let [_, _, third, _] = pod_net.host(0).v4.octets();
    format!("02:00:00:00:00:{third:02x}")
}

fn bridged(node: &NetNs, layout: Layout, pod: &Host, pod_net: DualNet) -> Result<()> {
    let gateway = pod_net.host(1);
    plug(node, "cni0", pod.name, &pod.ns, "eth0")?;
    node.ip(&format!("link set {} mtu {}", pod.name, layout.mtu()))?;
    pod.ns.ip(&format!(
        "link set eth0 mtu {} up
         addr add {}/{} dev eth0
         addr add {}/{} dev eth0 nodad
         route add default via {}
         route add default via {}",
        layout.mtu(),
        pod.addrs.v4,
        pod_net.len(Family::V4),
        pod.addrs.v6,
        pod_net.len(Family::V6),
        gateway.v4,
        gateway.v6,
    ))
}

fn routed(node: &NetNs, layout: Layout, pod: &Host) -> Result<()> {
    let Host { name, ns, addrs } = pod;
    let mtu = layout.mtu();
    node.ip(&format!(
        "link add {name} address {GATEWAY_MAC} type veth peer name eth0 netns {}
         link set {name} mtu {mtu} up
         route add {}/32 dev {name}
         route add {}/128 dev {name}",
        ns.name(),
        addrs.v4,
        addrs.v6,
    ))?;
    ns.ip(&format!(
        "link set eth0 mtu {mtu} up
         addr add {}/32 dev eth0
         addr add {}/128 dev eth0 nodad
         neigh add 169.254.1.1 lladdr {GATEWAY_MAC} dev eth0 nud permanent
         neigh add fe80::1 lladdr {GATEWAY_MAC} dev eth0 nud permanent
         route add 169.254.1.1 dev eth0 scope link
         route add default via 169.254.1.1
         route add default via fe80::1 dev eth0",
        addrs.v4, addrs.v6,
    ))
}

/// Configures a pair's ends, the pod's side first, like the plugin.
fn ptp(node: &NetNs, pod: &Host, pod_net: DualNet) -> Result<()> {
    let Host { name, ns, addrs } = pod;
    let gateway = pod_net.host(1);
    // Packets to other pods of the node go through the gateway too.
    let routes = Family::ALL.map(|family| {
        let net = pod_net.cidr(family);
        let via = gateway.ip(family);
        format!(
            "route del {net} dev eth0
             route add {via} dev eth0
             route add {net} via {via} dev eth0
             route add default via {via} dev eth0"
        )
    });
    ns.ip(&format!(
        "link set eth0 up
         addr add {}/{} dev eth0
         addr add {}/{} dev eth0 nodad
         {}",
        addrs.v4,
        pod_net.len(Family::V4),
        addrs.v6,
        pod_net.len(Family::V6),
        routes.join("\n"),
    ))?;
    node.ip(&format!(
        "link set {name} up
         addr add {}/32 dev {name}
         addr add {}/128 dev {name} nodad
         route add {}/32 dev {name}
         route add {}/128 dev {name}",
        gateway.v4, gateway.v6, addrs.v4, addrs.v6,
    ))
}
