//! Pairs of netkit devices, which are for containers what veth pairs are. Linux 6.7 is the first
//! with them.

use anyhow::{Context, Result};
use rtnetlink::LinkNetkit;
use rtnetlink::packet_route::link::NetkitMode;

use super::Host;
use crate::netns::NetNs;

/// The layer at which a pair hands packets on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetkitLayer {
    /// Ethernet: the ends have addresses, and ask for each other's.
    L2,
    /// IP: the ends have no address and ask for none. It is the kernel's default, and Cilium's.
    L3,
}

/// Makes a pod's eth0. The command `ip` of Debian 12 does not know the modes, so the kernel is
/// asked without it.
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
