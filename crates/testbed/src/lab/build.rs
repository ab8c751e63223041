//! Builds a lab by `ip` commands that also work in a shell.

use std::path::PathBuf;

use anyhow::{Context, Result};

use super::address::{
    CLUSTER_PODS, Dual, DualNet, Family, NODES, OUTSIDE, PODS, SECOND, SERVICE_CIDR,
};
use super::remove::ns_name;
use super::{Host, Lab, Layout, Node, Uplink, pods, tunnel, uplink};
use crate::netns::NetNs;

/// The number of `xl` on the nodes' segments.
const NEIGHBOUR: u8 = 30;

pub(super) fn build(id: &str, layout: Layout, uplink: Uplink, dir: PathBuf) -> Result<Lab> {
    let fabric = fabric(id)?;
    let x = outsider(id, &fabric, "x", OUTSIDE.host(10))?;
    let ext = outsider(id, &fabric, "ext", OUTSIDE.host(20))?;
    let n1 = node(id, &fabric, layout, uplink, "n1", 0, &["p1a", "p1b", "p1c"])?;
    let n2 = node(id, &fabric, layout, uplink, "n2", 1, &["p2a", "p2b"])?;
    let xl = neighbour(id, &fabric)?;
    let _tunnel = match layout {
        Layout::Tunnel(kind) => {
            tunnel::make(kind, [&n1, &n2], &fabric, &dir).context("make the tunnel")?
        }
        Layout::Routed
        | Layout::Ptp
        | Layout::Bridge
        | Layout::Vxlan
        | Layout::Macvlan
        | Layout::Ipvlan
        | Layout::Netkit(_) => Vec::new(),
    };
    let lab = Lab {
        layout,
        n1,
        n2,
        x,
        xl,
        ext,
        fabric,
        _tunnel,
        dir,
    };
    lab.set_external_route(&lab.n1)?;
    // An outside packet to a ClusterIP must reach a node, which decides about it.
    let routes = Family::ALL.map(|family| {
        format!(
            "route add {} via {}",
            SERVICE_CIDR.cidr(family),
            lab.n1.host.addrs.ip(family)
        )
    });
    lab.fabric.ns.ip(&routes.join("\n"))?;
    lab.set_pod_route(super::PodRoute::Eth0)?;
    lab.set_default_route(true)?;
    lab.set_rp_filter(1)?;
    Ok(lab)
}

/// Creates the router between nodes and outside. It has no routes to pods, like many real networks.
fn fabric(id: &str) -> Result<Host> {
    let ns = NetNs::create(ns_name(id, "fabric"))?;
    forward(&ns)?;
    // A node that does not serve a packet returns it, which must not cause a redirect.
    ns.sysctl("ipv4/conf/default/send_redirects", "0")?;
    ns.sysctl("ipv4/conf/all/send_redirects", "0")?;
    ns.ip(&format!(
        "link add fab0 type bridge mcast_snooping 0
         link add out0 type bridge mcast_snooping 0
         link add sec0 type bridge mcast_snooping 0
         link set fab0 up
         link set out0 up
         link set sec0 up
         {}
         {}",
        add_addr("fab0", NODES, 1),
        add_addr("out0", OUTSIDE, 1),
    ))?;
    Ok(Host {
        name: "fabric",
        ns,
        addrs: NODES.host(1),
    })
}

fn outsider(id: &str, fabric: &Host, name: &'static str, addrs: Dual) -> Result<Host> {
    let ns = NetNs::create(ns_name(id, name))?;
    plug(&fabric.ns, "out0", name, &ns, "eth0")?;
    let gateway = OUTSIDE.host(1);
    ns.ip(&format!(
        "link set eth0 up
         addr add {}/{} dev eth0
         addr add {}/{} dev eth0 nodad
         route add default via {}
         route add default via {}",
        addrs.v4,
        OUTSIDE.len(Family::V4),
        addrs.v6,
        OUTSIDE.len(Family::V6),
        gateway.v4,
        gateway.v6,
    ))?;
    Ok(Host { name, ns, addrs })
}

/// Creates a client on the nodes' own segments, which reaches them without a router.
fn neighbour(id: &str, fabric: &Host) -> Result<Host> {
    let ns = NetNs::create(ns_name(id, "xl"))?;
    plug(&fabric.ns, "fab0", "xl", &ns, "eth0")?;
    ns.ip(&format!(
        "link set eth0 up\n{}",
        add_addr("eth0", NODES, NEIGHBOUR)
    ))?;
    second_link(fabric, "xl", &ns, NEIGHBOUR)?;
    Ok(Host {
        name: "xl",
        ns,
        addrs: NODES.host(NEIGHBOUR),
    })
}

/// Creates a node with its pods. `nth`, from 0, determines its addresses.
fn node(
    id: &str,
    fabric: &Host,
    layout: Layout,
    uplink: Uplink,
    name: &'static str,
    nth: u8,
    pods: &[&'static str],
) -> Result<Node> {
    let ns = NetNs::create(ns_name(id, name))?;
    forward(&ns)?;
    uplink::make(uplink, &fabric.ns, name, &ns)?;
    let gateway = NODES.host(1);
    ns.ip(&format!(
        "link set eth0 up
         {}
         route add {} via {}
         route add {} via {}",
        add_addr("eth0", NODES, 11 + nth),
        OUTSIDE.cidr(Family::V4),
        gateway.v4,
        OUTSIDE.cidr(Family::V6),
        gateway.v6,
    ))?;
    second_link(fabric, name, &ns, 11 + nth)?;
    let pod_net = PODS[usize::from(nth)];
    masquerade(&ns, &pod_net)?;
    pods::prepare(&ns, layout, pod_net)?;
    let pods = pods.iter().zip(2..).map(|(pod_name, host)| {
        let pod = Host {
            name: pod_name,
            ns: NetNs::create(ns_name(id, pod_name))?,
            addrs: pod_net.host(host),
        };
        pods::connect(&ns, layout, &pod, pod_net)?;
        anyhow::Ok(pod)
    });
    let pods = pods
        .collect::<Result<_>>()
        .with_context(|| format!("make the pods of {name}"))?;
    Ok(Node {
        host: Host {
            name,
            ns,
            addrs: NODES.host(11 + nth),
        },
        second: SECOND.host(11 + nth),
        pod_net,
        pods,
    })
}

fn masquerade(node: &NetNs, pods: &DualNet) -> Result<()> {
    node.nft(&format!(
        "table inet cni {{
            chain postrouting {{
                type nat hook postrouting priority srcnat
                oifname eth0 ip saddr {} ip daddr != {} masquerade
                oifname eth0 ip6 saddr {} ip6 daddr != {} masquerade
            }}
        }}",
        pods.cidr(Family::V4),
        CLUSTER_PODS.cidr(Family::V4),
        pods.cidr(Family::V6),
        CLUSTER_PODS.cidr(Family::V6),
    ))
}

/// Gives `ns` a device with its other end, `port`, on a bridge of `owner`.
pub(super) fn plug(
    owner: &NetNs,
    bridge: &str,
    port: &str,
    ns: &NetNs,
    device: &str,
) -> Result<()> {
    owner.ip(&format!(
        "link add {port} type veth peer name {device} netns {}
         link set {port} master {bridge} up",
        ns.name()
    ))
}

/// Gives a host an `eth1` on the second segment, with its number on the first.
fn second_link(fabric: &Host, name: &str, ns: &NetNs, number: u8) -> Result<()> {
    plug(&fabric.ns, "sec0", &format!("{name}-1"), ns, "eth1")?;
    ns.ip(&format!(
        "link set eth1 up\n{}",
        add_addr("eth1", SECOND, number)
    ))
}

fn forward(ns: &NetNs) -> Result<()> {
    ns.sysctl("ipv4/ip_forward", "1")?;
    ns.sysctl("ipv6/conf/all/forwarding", "1")?;
    ns.sysctl("ipv6/conf/default/forwarding", "1")
}

pub(super) fn add_addr(device: &str, net: DualNet, host: u8) -> String {
    let addrs = net.host(host);
    format!(
        "addr add {}/{} dev {device}\naddr add {}/{} dev {device} nodad",
        addrs.v4,
        net.len(Family::V4),
        addrs.v6,
        net.len(Family::V6),
    )
}
