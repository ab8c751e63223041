//! Netkit pairs (Linux 6.7), the container counterpart of veth.

use anyhow::{Context, Result};
use rtnetlink::LinkNetkit;
use rtnetlink::packet_route::link::NetkitMode;

use super::Host;
use crate::netns::NetNs;

/// The layer at which a pair passes packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetkitLayer {
    /// Ethernet: the ends have link addresses and resolve neighbours.
    L2,
    /// IP, without link addresses: the default of the kernel and of Cilium.
    L3,
}

/// Creates a pod's eth0. Debian 12's `ip` does not support the modes, so this uses netlink.
pub(super) fn make(node: &NetNs, pod: &Host, layer: NetkitLayer) -> Result<()> {
    let name = pod.name;
    let far = format!("{}-far", pod.name);
    let mode = match layer {
        NetkitLayer::L2 => NetkitMode::L2,
        NetkitLayer::L3 => NetkitMode::L3,
    };
    let add = async || {
        let (connection, handle, _) = rtnetlink::new_connection()?;
        let connection = tokio::spawn(connection);
        let added = handle
            .link()
            .add(LinkNetkit::new(name, &far, mode).build())
            .execute()
            .await;
        connection.abort();
        added.with_context(|| format!("add the netkit pair {name}"))
    };
    node.run(|| {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?
            .block_on(add())
    })?;
    node.ip(&format!("link set {far} netns {} name eth0", pod.ns.name()))
}
