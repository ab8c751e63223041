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
//! The fabric routes the service network and the external addresses to n1;
//! [`Lab::set_external_route`] moves the external addresses to n2.
//!
//! Every host is an ordinary `ip netns` namespace, called `kpx-<lab>-<host>`, so a running lab can
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

/// The connection of pods to their node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// A veth without address and a host route per pod, like Calico and the AWS CNI.
    Routed,
    /// A host route per pod, and the gateway's address on the node's end of every veth, like the
    /// plugin `ptp`, which kindnet uses and containerd has by default.
    Ptp,
    /// All pods on a bridge with the gateway's address, like flannel and docker, and routes between
    /// the nodes.
    Bridge,
    /// Like `Bridge`, with VXLAN between the nodes, flannel's default.
    Vxlan,
    /// Like `Routed`, with a tunnel without Ethernet headers between the nodes, as Calico and k3s
    /// may use.
    Tunnel(TunnelKind),
    /// Macvlan devices on the second link, with a host route per pod, like the plugin macvlan.
    Macvlan,
    /// Like `Macvlan`, with ipvlan devices in mode L2. Kernels of build machines often lack ipvlan.
    Ipvlan,
    /// Like `Ptp`, with netkit pairs, which Cilium may use. Kernels of build machines often lack
    /// netkit.
    Netkit(NetkitLayer),
}

impl Layout {
    /// The layouts that every test machine's kernel supports.
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

/// A namespace with addresses: a pod, a node, or an outside machine.
#[derive(Debug)]
pub struct Host {
    pub name: &'static str,
    pub ns: NetNs,
    /// The addresses of `eth0`.
    pub addrs: Dual,
}

#[derive(Debug)]
pub struct Node {
    pub host: Host,
    /// The addresses of `eth1`, on the second segment.
    pub second: Dual,
    pub pod_net: DualNet,
    pub pods: Vec<Host>,
}

/// A lab. A drop removes its namespaces and its directory.
#[derive(Debug)]
pub struct Lab {
    pub layout: Layout,
    pub n1: Node,
    pub n2: Node,
    /// A client outside the cluster.
    pub x: Host,
    /// A client on the nodes' segments: `eth0` on the fabric's, `eth1` on the second.
    pub xl: Host,
    /// A server outside the cluster.
    pub ext: Host,
    /// The router between all hosts, with its address on the nodes' segment.
    pub fabric: Host,
    _tunnel: Vec<TunnelEnd>,
    dir: PathBuf,
}

impl Lab {
    /// Builds a lab, after removing the labs of dead processes.
    pub fn start(layout: Layout) -> Result<Self> {
        Self::start_with(layout, Uplink::Card)
    }

    /// Builds a lab with this uplink between nodes and fabric.
    pub fn start_with(layout: Layout, uplink: Uplink) -> Result<Self> {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        remove::remove_on_signals();
        remove::remove_stale_labs()?;
        let id = remove::lab_id(std::process::id(), STARTED.fetch_add(1, Ordering::Relaxed));
        let dir = remove::lab_dir(&id);
        fs::create_dir(&dir).with_context(|| format!("create {}", dir.display()))?;
        build::build(&id, layout, uplink, dir.clone()).inspect_err(|_| {
            let _ = fs::remove_dir_all(&dir); // The error of the build matters more.
        })
    }

    /// Returns this lab's directory, for manifests, logs and run directories.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn nodes(&self) -> [&Node; 2] {
        [&self.n1, &self.n2]
    }

    /// Returns all possible backends: pods, nodes and the outside server.
    pub fn backends(&self) -> impl Iterator<Item = &Host> {
        let nodes = self
            .nodes()
            .into_iter()
            .flat_map(|node| node.pods.iter().chain([&node.host]));
        nodes.chain([&self.ext])
    }

    /// Returns the host with this name: `p1a`, `n1`, `ext`, `x`.
    pub fn host(&self, name: &str) -> &Host {
        self.hosts()
            .find(|host| host.name == name)
            .unwrap_or_else(|| panic!("the lab has no host {name}"))
    }

    /// Returns the node that is this host, or runs it as a pod.
    pub fn node_of(&self, host: &Host) -> Option<&Node> {
        let is = |node: &&Node| {
            node.pods
                .iter()
                .chain([&node.host])
                .any(|candidate| candidate.name == host.name)
        };
        self.nodes().into_iter().find(is)
    }

    /// Returns the address of a node or of `xl` on the second segment.
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
