//! The dimensions of a measurement: mode, path, variant.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use testbed::lab::Layout;

/// [`Mode::TcpMany`] is measured in one of this many rounds, ...
const MANY_ROUNDS: usize = 10;
/// ... for this many times as long.
const MANY_LONGER: u32 = 5;

/// The action that a client repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Connects, sends a byte, reads one, closes.
    TcpCrr,
    /// Sends a byte, reads one, over one connection that stays open through all rounds.
    TcpRr,
    /// The same, over a connection that is opened for the slice: so a connection's first second is
    /// measured.
    TcpRrYoung,
    /// Sends as much as it can over one connection that stays open.
    TcpStream,
    /// Sends a datagram of a byte, waits for one, by a socket that stays open.
    UdpRr,
    /// The same, by a socket that is opened for the slice.
    UdpRrYoung,
    /// Sends datagrams of 1,400 bytes as fast as it can.
    UdpStream,
    /// Sends datagrams of 64 bytes as fast as it can.
    UdpPps,
    /// Asks as a resolver does: a socket of its own for each question, a short datagram there and a
    /// longer one back.
    UdpDns,
    /// Does as [`Mode::TcpRr`], over one of 10,000 open connections after the other.
    TcpMany,
}

/// From where to where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Path {
    /// From a pod to one of the same node, by ClusterIP.
    Local,
    /// From a pod to one of another node, by ClusterIP.
    Remote,
    /// From the node itself to a pod of it, by ClusterIP.
    Host,
    /// From outside the cluster to a pod, by the node port of that pod's node.
    Outside,
    /// The path of [`Path::Local`], on nodes that do not masquerade what their pods send. Nothing
    /// needs connection tracking there, unless it is who serves the Services.
    Routable,
    /// The path of [`Path::Local`], through chains for forwarded packets as Calico writes them for
    /// NetworkPolicies.
    Calico,
    /// Like `calico`, with the chains that kube-router writes.
    KubeRouter,
    /// The path of [`Path::Remote`], from a bridge and through VXLAN.
    Overlay,
    /// From outside the cluster to a pod, by the node port of another node.
    OutsideRemote,
}

/// By whose means a client's packets come to their backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Variant {
    /// No proxy: the client dials the backend itself.
    Direct,
    /// The same once more, in a lab of its own: what differs between these two is noise.
    Control,
    IptablesLegacy,
    IptablesNft,
    Nftables,
    /// Only where clocks count instructions: the virtual machine's kernel has it, the developer's
    /// may not.
    #[value(skip)]
    Ipvs,
    /// kube-proxy itself, in mode iptables.
    KubeProxyIptables,
    /// kube-proxy itself, in mode nftables.
    KubeProxyNftables,
    /// kpx without a flag that changes how packets go.
    Kpx,
    /// Another build of kpx, which `KPX_BIN_B` names: to compare two.
    #[value(hide = true)]
    KpxB,
    /// kpx with every shortcut off, see [`Variant::flags`].
    KpxOff,
    /// kpx with `--socket-lb all`.
    KpxSocketAll,
    /// The client dials the backend itself, on a node where kpx runs: what kpx costs packets that
    /// are none of its.
    Beside,
}

impl Path {
    /// All paths. [`Path::Routable`] changes its nodes permanently, so it is the last path of its
    /// layout.
    pub const ALL: [Self; 9] = [
        Self::Local,
        Self::Remote,
        Self::Host,
        Self::Outside,
        Self::OutsideRemote,
        Self::Calico,
        Self::KubeRouter,
        Self::Routable,
        Self::Overlay,
    ];

    /// Returns how pods are attached to their nodes.
    pub fn layout(self) -> Layout {
        if self == Self::Overlay {
            Layout::Vxlan
        } else {
            Layout::Routed
        }
    }
}

impl Variant {
    /// Returns kpx's flags for this variant; empty for the default and for other proxies.
    pub fn flags(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::KpxOff => &[("--fast-path", "off"), ("--socket-lb", "off")],
            Self::KpxSocketAll => &[("--socket-lb", "all")],
            _ => &[],
        }
    }

    /// Returns true if kpx translates the sockets of pods. It then needs its own cgroup, because
    /// pods of another lab have the same addresses.
    pub fn leads_pods(self) -> bool {
        self == Self::KpxSocketAll
    }

    /// Returns true if clients dial the backend itself.
    pub fn is_direct(self) -> bool {
        matches!(self, Self::Direct | Self::Control | Self::Beside)
    }

    pub fn is_kpx(self) -> bool {
        matches!(
            self,
            Self::Kpx | Self::KpxB | Self::KpxOff | Self::KpxSocketAll | Self::Beside
        )
    }
}

impl Mode {
    /// Returns true in rounds that measure this mode, whose connections take longer to open than
    /// other modes take to measure.
    pub fn is_due(self, round: usize) -> bool {
        self != Self::TcpMany || round.is_multiple_of(MANY_ROUNDS)
    }

    /// Returns true if one connection serves all slices of a path.
    pub fn stays_open(self) -> bool {
        matches!(self, Self::TcpRr | Self::TcpStream | Self::UdpRr)
    }

    /// Returns the length of a slice of this mode, in usual slices.
    pub fn longer(self) -> u32 {
        if self == Self::TcpMany {
            MANY_LONGER
        } else {
            1
        }
    }

    /// Returns the unit of [`super::Sample::amount`].
    pub fn unit(self) -> &'static str {
        match self {
            Self::TcpStream | Self::UdpStream => "bytes",
            Self::UdpPps => "packets",
            _ => "transactions",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::TcpCrr => "TCP connect/request/response",
            Self::TcpRr => "TCP request/response",
            Self::TcpRrYoung => "TCP request/response, young",
            Self::TcpStream => "TCP stream",
            Self::UdpRr => "UDP request/response",
            Self::UdpRrYoung => "UDP request/response, young",
            Self::UdpStream => "UDP stream",
            Self::UdpPps => "UDP packets",
            Self::UdpDns => "UDP question/answer, a socket each",
            Self::TcpMany => "TCP request/response, 10,000 open",
        })
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Local => "pod → pod of the same node, tracked",
            Self::Remote => "pod → pod of another node",
            Self::Host => "node → its own pod",
            Self::Outside => "outside → node port",
            Self::Routable => "pod → pod of the same node, untracked",
            Self::Calico => "pod → pod of the same node, Calico's chains",
            Self::KubeRouter => "pod → pod of the same node, kube-router's chains",
            Self::Overlay => "pod → pod of another node, bridge and VXLAN",
            Self::OutsideRemote => "outside → node port, backend on another node",
        })
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Direct => "direct",
            Self::Control => "direct, again",
            Self::IptablesLegacy => "iptables (legacy)",
            Self::IptablesNft => "iptables (nft)",
            Self::Nftables => "nftables",
            Self::Ipvs => "IPVS",
            Self::KubeProxyIptables => "kube-proxy, iptables",
            Self::KubeProxyNftables => "kube-proxy, nftables",
            Self::Kpx => "kpx",
            Self::KpxB => "kpx, other build",
            Self::KpxOff => "kpx, shortcuts off",
            Self::KpxSocketAll => "kpx, socket LB for pods",
            Self::Beside => "direct, beside kpx",
        })
    }
}
