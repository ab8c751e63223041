//! Builds a network namespace with a node's routes, because the programs look up routes in the
//! kernel.

use std::net::IpAddr;

use anyhow::{Context, Result};
use ipnet::IpNet;
use netlink_packet_route::route::{RouteMessage, RouteScope, RouteType};
use nix::net::if_::if_nametoindex;
use nix::sched::{CloneFlags, unshare};
use rtnetlink::{Handle, LinkUnspec, LinkVeth, RouteMessageBuilder};

use crate::programs::LO;
use proxy_net::anchor::{self, Anchor};
use proxy_net::sysctl;

/// The interface indices of the devices that stand for a node's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeDevices {
    /// The device to other nodes and the rest of the network.
    pub(crate) uplink: u32,
    /// The device to the pods of this node.
    pub(crate) pods: u32,
    pub(crate) anchor: Anchor,
}

pub(crate) const UPLINK: &str = "eth0";
pub(crate) const PODS: &str = "pods";

/// The MTU in bytes; no packet leaves the namespace.
const MTU: u32 = 1500;

/// `RT_TABLE_LOCAL`, the kernel's table of the host's own addresses.
const LOCAL: u32 = 255;

/// Moves this thread into a new network namespace, which ends with the thread.
pub(crate) fn leave() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNET).context("make a network namespace")
}

/// Creates devices and routes in this thread's namespace: `addrs` are the host's addresses, `pods`
/// are routed to the pods' device, everything else to the uplink.
pub(crate) async fn make(handle: &Handle, addrs: &[IpAddr], pods: &[IpNet]) -> Result<NodeDevices> {
    // Sysctls come first, because new devices copy their values.
    sysctl::write("ipv4/ip_forward", "1")?;
    if sysctl::has_ipv6() {
        for (key, value) in [
            ("all/disable_ipv6", "0"),
            ("default/disable_ipv6", "0"),
            ("all/forwarding", "1"),
        ] {
            sysctl::write(&format!("ipv6/conf/{key}"), value)?;
        }
    }
    let node_devices = devices(handle).await?;
    // IPv6 addresses on a device would wait for duplicate address detection. Local routes suffice
    // to make the addresses the host's.
    let own = addrs
        .iter()
        .map(|addr| (IpNet::from(*addr), LO, RouteType::Local));
    let pods = pods
        .iter()
        .map(|net| (*net, node_devices.pods, RouteType::Unicast));
    let everywhere = ["0.0.0.0/0", "::/0"].map(|net| net.parse().expect("a network"));
    let everywhere = everywhere.map(|net| (net, node_devices.uplink, RouteType::Unicast));
    for (net, device, kind) in own.chain(pods).chain(everywhere) {
        if sysctl::has_ipv6() || net.addr().is_ipv4() {
            let add = handle.route().add(route(net, device, kind)?).replace();
            add.execute()
                .await
                .with_context(|| format!("add a route to {net}"))?;
        }
    }
    Ok(node_devices)
}

/// Creates a veth pair as uplink and pods' device. Both devices have carrier, and no packet is
/// sent.
async fn devices(handle: &Handle) -> Result<NodeDevices> {
    let add = handle.link().add(LinkVeth::new(UPLINK, PODS).build());
    add.execute()
        .await
        .with_context(|| format!("make the pair {UPLINK}/{PODS}"))?;
    let find = |name| if_nametoindex(name).with_context(|| format!("find {name}"));
    let uplink = find(UPLINK)?;
    let pods = find(PODS)?;
    for index in [LO, uplink, pods] {
        let up = handle
            .link()
            .set(LinkUnspec::new_with_index(index).up().build());
        up.execute()
            .await
            .with_context(|| format!("set device {index} up"))?;
    }
    Ok(NodeDevices {
        uplink,
        pods,
        anchor: anchor::ensure(handle, MTU).await?.anchor,
    })
}

fn route(net: IpNet, device: u32, kind: RouteType) -> Result<RouteMessage> {
    let route =
        RouteMessageBuilder::<IpAddr>::new().destination_prefix(net.addr(), net.prefix_len())?;
    let route = if kind == RouteType::Local {
        route.table_id(LOCAL)
    } else {
        route
    };
    let scope = match (net, kind) {
        (IpNet::V4(_), RouteType::Local) => RouteScope::Host,
        (IpNet::V4(_), _) => RouteScope::Link,
        // IPv6 routes have no scope.
        (IpNet::V6(_), _) => RouteScope::Universe,
    };
    Ok(route
        .output_interface(device)
        .kind(kind)
        .scope(scope)
        .build())
}
