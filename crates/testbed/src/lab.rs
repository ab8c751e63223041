//! Two nodes, their pods and an outside world, in network namespaces.
//!
//! ```text
//!   x ──┐                         ┌── p1a, p1b, p1c
//!       out0 ─ fabric ─ fab0 ─┬─ n1
//!   ext ┘                     │   │ eth1
//!                             │   ├──────── xl
//!                             │   │ eth1
//!                             ├─ n2
//!                             │   └── p2a, p2b
//!                             └─ xl
//! ```
//!
//! The fabric routes the service network and the external addresses to n1, or those to n2, see
//! [`Lab::set_external_route`].
//!
//! Everything is an ordinary `ip netns` namespace, called `kpx-<lab>-<host>`, so a running lab can
//! be entered by hand.

mod address;
mod build;
mod macvlan;
mod netkit;
mod pods;
mod remove;
mod switch;
mod tunnel;
mod uplink;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};

pub use self::address::{CLUSTER_PODS, Dual, DualNet, EXTERNAL, Family, SERVICE_CIDR};
pub use self::netkit::NetkitLayer;
pub use self::pods::VXLAN_PORT;
pub use self::remove::{keep_until_signal, remove_labs_of};
pub use self::switch::{PodRoute, Ways};
use self::tunnel::TunnelEnd;
pub use self::tunnel::TunnelKind;
pub use self::uplink::Uplink;
use crate::netns::NetNs;

/// How pods hang on their node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// One address-less veth and one host route per pod, as Calico and the AWS CNI do.
    Routed,
    /// One host route per pod, and the gateway's address on every node's end of a veth. The plugin
    /// `ptp` does so, which is kindnet's, and containerd's by default.
    Ptp,
    /// All pods on one bridge that has the gateway's address, as flannel and docker do, and routes
    /// between the nodes.
    Bridge,
    /// The same, and VXLAN between the nodes, as flannel does by default.
    Vxlan,
    /// As routed, and a tunnel between the nodes whose packets have no Ethernet header, as Calico's
    /// and k3s's may have.
    Tunnel(TunnelKind),
    /// On macvlan devices above the second link, with one host route per pod, as the plugin macvlan
    /// does.
    Macvlan,
    /// On ipvlan devices in the mode L2, else as macvlan. Few kernels of build machines have them.
    Ipvlan,
    /// As ptp, on pairs of netkit devices, which Cilium may use. Few kernels of build machines have
    /// them.
    Netkit(NetkitLayer),
}

impl Layout {
    /// The layouts that every kernel with the needs of tests has.
    pub const ALL: [Self; 6] = [
        Self::Routed,
        Self::Ptp,
        Self::Bridge,
        Self::Vxlan,
        Self::Tunnel(TunnelKind::Tun),
        Self::Macvlan,
    ];

    /// Returns the MTU of pods' devices, in bytes.
    pub fn mtu(self) -> u32 {
        match self {
            Self::Routed
            | Self::Ptp
            | Self::Bridge
            | Self::Macvlan
            | Self::Ipvlan
            | Self::Netkit(_) => LINK_MTU,
            Self::Vxlan => LINK_MTU - pods::OVERHEAD,
            Self::Tunnel(kind) => kind.mtu(),
        }
    }
}

/// The MTU of nodes' devices, in bytes.
pub(crate) const LINK_MTU: u32 = 1500;

/// A namespace with an address: a pod, a node, or a machine outside.
#[derive(Debug)]
pub struct Host {
    pub name: &'static str,
    pub ns: NetNs,
    /// The addresses of its `eth0`.
    pub addrs: Dual,
}

#[derive(Debug)]
pub struct Node {
    pub host: Host,
    /// The addresses of `eth1`, on the segment beside the fabric.
    pub second: Dual,
    pub pod_net: DualNet,
    pub pods: Vec<Host>,
}

/// The whole. Its namespaces and its directory are removed with this value.
#[derive(Debug)]
pub struct Lab {
    pub layout: Layout,
    pub n1: Node,
    pub n2: Node,
    /// A client outside the cluster.
    pub x: Host,
    /// A client on the nodes' segments: on the fabric's by `eth0`, on the one beside it by `eth1`.
    pub xl: Host,
    /// A server outside the cluster.
    pub ext: Host,
    /// The router between all of them; the nodes reach it at its address.
    pub fabric: Host,
    _tunnel: Vec<TunnelEnd>,
    dir: PathBuf,
}

impl Lab {
    /// Builds a lab; first removes what dead processes left of theirs.
    pub fn start(layout: Layout) -> Result<Self> {
        Self::start_with(layout, Uplink::Card)
    }

    /// Builds a lab whose nodes reach the fabric by such devices.
    pub fn start_with(layout: Layout, uplink: Uplink) -> Result<Self> {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        remove::remove_on_signals();
        remove::remove_stale_labs()?;
        let id = remove::lab_id(std::process::id(), STARTED.fetch_add(1, Ordering::Relaxed));
        let dir = remove::lab_dir(&id);
        fs::create_dir(&dir).with_context(|| format!("create {}", dir.display()))?;
        build::build(&id, layout, uplink, dir.clone()).inspect_err(|_| {
            let _ = fs::remove_dir_all(&dir); // The reason why there is no lab says more.
        })
    }

    /// A directory of this lab's own, for manifests, logs and run directories.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn nodes(&self) -> [&Node; 2] {
        [&self.n1, &self.n2]
    }

    /// Pods, nodes and the server outside: all that may be a backend.
    pub fn backends(&self) -> impl Iterator<Item = &Host> {
        let nodes = self
            .nodes()
            .into_iter()
            .flat_map(|node| node.pods.iter().chain([&node.host]));
        nodes.chain([&self.ext])
    }

    /// The host of that name: `p1a`, `n1`, `ext`, `x`.
    pub fn host(&self, name: &str) -> &Host {
        self.hosts()
            .find(|host| host.name == name)
            .unwrap_or_else(|| panic!("the lab has no host {name}"))
    }

    /// The node that a host is, or on which it is a pod.
    pub fn node_of(&self, host: &Host) -> Option<&Node> {
        let is = |node: &&Node| {
            node.pods
                .iter()
                .chain([&node.host])
                .any(|candidate| candidate.name == host.name)
        };
        self.nodes().into_iter().find(is)
    }

    /// A node's or `xl`'s address on the segment beside the fabric.
    pub fn second(&self, host: &Host) -> Dual {
        address::SECOND.host(host.addrs.v4.octets()[3])
    }

    fn hosts(&self) -> impl Iterator<Item = &Host> {
        self.backends().chain([&self.x, &self.xl, &self.fabric])
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.dir) {
            tracing::warn!(%error, dir = %self.dir.display(), "directory is left over");
        }
    }
}
