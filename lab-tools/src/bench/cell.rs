//! The combinations that are measured: a mode, a path, a variant, a number of Services.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The action that a client repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Connects, sends a byte, reads one, closes.
    TcpCrr,
    /// Sends a byte, reads one, over one connection.
    TcpRr,
    /// Sends as much as it can over one connection.
    TcpStream,
    /// Sends a datagram of a byte, waits for one.
    UdpRr,
    /// Sends datagrams of 1,400 bytes as fast as it can.
    UdpStream,
    /// Sends datagrams of 64 bytes as fast as it can.
    UdpPps,
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
    /// The path of [`Path::Local`], on nodes that do not masquerade what their pods send. Nothing needs connection tracking there, unless
    /// it is who serves the Services.
    Routable,
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
    /// Only where clocks count instructions: the virtual machine's kernel has it, the developer's may not.
    #[value(skip)]
    Ipvs,
    /// kube-proxy itself, in mode iptables.
    KubeProxyIptables,
    /// kube-proxy itself, in mode nftables.
    KubeProxyNftables,
    Kpx,
    /// kpx with `--fast-path on`.
    KpxFast,
    /// kpx with `--socket-lb host`.
    KpxSocket,
}

/// One row of the table of cells.
struct Plan {
    paths: &'static [Path],
    services: &'static [usize],
    modes: &'static [Mode],
    variants: &'static [Variant],
}

const KUBE_PROXY: [Variant; 2] = [Variant::KubeProxyIptables, Variant::KubeProxyNftables];
const NEAR: [Mode; 3] = [Mode::TcpCrr, Mode::TcpRr, Mode::TcpStream];

use Variant::{Control, Direct, IptablesLegacy, IptablesNft, Kpx, KpxFast, KpxSocket, Nftables};

/// All cells. Every variant is compared with [`Variant::Direct`] of the same row, round by round.
const PLANS: [Plan; 5] = [
    Plan {
        paths: &[Path::Local],
        services: &[1, 10_000],
        modes: &[Mode::TcpCrr, Mode::TcpRr, Mode::TcpStream, Mode::UdpRr, Mode::UdpStream, Mode::UdpPps],
        variants: &[Direct, Control, IptablesLegacy, IptablesNft, Nftables, KUBE_PROXY[0], KUBE_PROXY[1], Kpx, KpxFast],
    },
    Plan {
        paths: &[Path::Local, Path::Routable],
        services: &[1_000],
        modes: &NEAR,
        variants: &[Direct, Control, IptablesLegacy, IptablesNft, Nftables, Kpx, KpxFast],
    },
    Plan {
        paths: &[Path::Local, Path::Routable],
        services: &[50_000],
        modes: &NEAR,
        variants: &[Direct, Control, Nftables, Kpx, KpxFast],
    },
    Plan {
        paths: &[Path::Remote, Path::Host, Path::Outside],
        services: &[1, 10_000],
        modes: &NEAR,
        variants: &[Direct, Control, IptablesLegacy, IptablesNft, Nftables, Kpx, KpxFast, KpxSocket],
    },
    Plan {
        paths: &[Path::Routable],
        services: &[1, 10_000],
        modes: &NEAR,
        variants: &[Direct, Control, IptablesLegacy, IptablesNft, Nftables, KUBE_PROXY[0], KUBE_PROXY[1], Kpx, KpxFast],
    },
];

/// The wanted combinations; an empty list wants all.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    pub services: Vec<usize>,
    pub paths: Vec<Path>,
    pub modes: Vec<Mode>,
    pub variants: Vec<Variant>,
}

impl Selection {
    pub fn services(&self) -> Vec<usize> {
        let mut services: Vec<_> = PLANS.iter().flat_map(|plan| plan.services).copied().collect();
        services.retain(|count| wanted(&self.services, count));
        services.sort_unstable();
        services.dedup();
        services
    }

    pub fn paths(&self, services: usize) -> impl Iterator<Item = Path> {
        Path::ALL.into_iter().filter(move |path| !self.modes(services, *path).is_empty())
    }

    pub fn modes(&self, services: usize, path: Path) -> Vec<Mode> {
        let modes = plans(services, path).flat_map(|plan| plan.modes).copied();
        modes.filter(|mode| wanted(&self.paths, &path) && wanted(&self.modes, mode)).collect()
    }

    /// Direct is always among them: nothing means anything without it.
    pub fn variants(&self, services: usize, path: Path) -> Vec<Variant> {
        let variants = plans(services, path).flat_map(|plan| plan.variants).copied();
        // Socket load balancing for the node's own sockets changes nothing for others.
        let sensible = |variant: &Variant| *variant != KpxSocket || path == Path::Host;
        variants
            .filter(|variant| sensible(variant) && (*variant == Direct || wanted(&self.variants, variant)))
            .collect()
    }
}

fn plans(services: usize, path: Path) -> impl Iterator<Item = &'static Plan> {
    PLANS.iter().filter(move |plan| plan.services.contains(&services) && plan.paths.contains(&path))
}

fn wanted<T: PartialEq>(list: &[T], value: &T) -> bool {
    list.is_empty() || list.contains(value)
}

impl Path {
    /// All paths. The last one changes the nodes for good.
    pub const ALL: [Self; 5] = [Self::Local, Self::Remote, Self::Host, Self::Outside, Self::Routable];
}

impl Mode {
    pub fn is_udp(self) -> bool {
        matches!(self, Self::UdpRr | Self::UdpStream | Self::UdpPps)
    }

    /// Returns the unit of [`super::Sample::amount`].
    pub fn unit(self) -> &'static str {
        match self {
            Self::TcpStream | Self::UdpStream => "bytes",
            Self::UdpPps => "packets",
            Self::TcpCrr | Self::TcpRr | Self::UdpRr => "transactions",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::TcpCrr => "TCP connect/request/response",
            Self::TcpRr => "TCP request/response",
            Self::TcpStream => "TCP stream",
            Self::UdpRr => "UDP request/response",
            Self::UdpStream => "UDP stream",
            Self::UdpPps => "UDP packets",
        })
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Local => "pod → pod of the same node",
            Self::Remote => "pod → pod of another node",
            Self::Host => "node → its own pod",
            Self::Outside => "outside → node port",
            Self::Routable => "pod → pod of the same node, routable pods",
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
            Self::KpxFast => "kpx, fast path",
            Self::KpxSocket => "kpx, socket LB",
        })
    }
}
