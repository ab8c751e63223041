//! The address plan: few addresses, so that collisions are frequent, with the same places in both
//! families.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    pub fn of(addr: IpAddr) -> Self {
        if addr.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// Returns the API's name of the family.
    pub fn name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }

    pub fn addr_bits(self) -> u8 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }
}

/// The devices of the node under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Device {
    /// Has an additional address, from the range of load balancers.
    Lo,
    Anchor,
    /// To pods, without an address of the node.
    Pod,
    /// To pods, with the gateway's address.
    Bridge,
    /// To other nodes and the rest of the cluster.
    Uplink,
    /// To some other nodes.
    SecondUplink,
}

impl Device {
    pub const ALL: [Self; 6] = [
        Self::Lo,
        Self::Anchor,
        Self::Pod,
        Self::Bridge,
        Self::Uplink,
        Self::SecondUplink,
    ];
    /// The devices where packets arrive.
    pub const OUTER: [Self; 4] = [Self::Pod, Self::Bridge, Self::Uplink, Self::SecondUplink];

    pub fn name(self) -> &'static str {
        match self {
            Self::Lo => "lo",
            Self::Anchor => "kpx0",
            Self::Pod => "pod0",
            Self::Bridge => "br0",
            Self::Uplink => "eth0",
            Self::SecondUplink => "eth1",
        }
    }

    pub fn leads_to_pods(self) -> bool {
        matches!(self, Self::Pod | Self::Bridge)
    }

    /// Returns true if packets arrive here from another namespace without passing another hook of
    /// the node.
    pub fn is_edge(self) -> bool {
        matches!(self, Self::Pod | Self::Uplink)
    }

    /// Returns true if another program's filter there may overwrite a hook's packet mark.
    pub fn is_filtered(self) -> bool {
        self == Self::SecondUplink
    }

    /// Returns the node's address on this device.
    pub fn addr(self, family: Family) -> Option<IpAddr> {
        OWN.iter()
            .find(|(_, _, device)| *device == self)
            .map(|(net, host, _)| net.addr(family, *host))
    }
}

/// A network of 256 addresses in each family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Net {
    v4: [u8; 3],
    v6: [u16; 7],
    /// The device of the node's route to the network.
    pub device: Device,
}

const fn net(v4: [u8; 3], device: Device) -> Net {
    Net {
        v4,
        v6: [0xfd00, v4[0] as u16, v4[1] as u16, v4[2] as u16, 0, 0, 0],
        device,
    }
}

/// ClusterIPs in the range that a ServiceCIDR may declare.
pub const CLUSTER_IPS: Net = net([10, 96, 0], Device::Anchor);
/// ClusterIPs in a range without a declaration.
pub const UNDECLARED: Net = net([10, 97, 0], Device::Anchor);
pub const PODS: Net = net([10, 244, 1], Device::Pod);
pub const BRIDGED: Net = net([10, 244, 2], Device::Bridge);
/// Pods of other nodes.
pub const FAR: Net = net([10, 244, 3], Device::Uplink);
pub const FARTHER: Net = net([10, 244, 4], Device::SecondUplink);
pub const NODES: Net = net([172, 18, 0], Device::Uplink);
pub const STORAGE: Net = net([172, 19, 0], Device::SecondUplink);
/// Clients outside the cluster.
pub const OUTSIDE: Net = net([198, 51, 100], Device::Uplink);
/// External IPs and load balancer addresses.
pub const PUBLIC: Net = net([203, 0, 113], Device::Uplink);

const NETS: [Net; 10] = [
    CLUSTER_IPS,
    UNDECLARED,
    PODS,
    BRIDGED,
    FAR,
    FARTHER,
    NODES,
    STORAGE,
    OUTSIDE,
    PUBLIC,
];

/// The node's own addresses, the primary address first.
pub const OWN: [(Net, u8, Device); 4] = [
    (NODES, 11, Device::Uplink),
    (STORAGE, 11, Device::SecondUplink),
    (BRIDGED, 1, Device::Bridge),
    (PUBLIC, 9, Device::Lo),
];

impl Net {
    pub fn addr(self, family: Family, host: u8) -> IpAddr {
        match family {
            Family::V4 => {
                let [a, b, c] = self.v4;
                Ipv4Addr::new(a, b, c, host).into()
            }
            Family::V6 => {
                let [a, b, c, d, e, f, g] = self.v6;
                Ipv6Addr::new(a, b, c, d, e, f, g, host.into()).into()
            }
        }
    }

    pub fn cidr(self, family: Family) -> IpNet {
        self.part(family, 0, 8)
    }

    /// Returns the block around an address with `bits` variable bits.
    pub fn part(self, family: Family, host: u8, bits: u8) -> IpNet {
        let net = IpNet::new(self.addr(family, host), family.addr_bits() - bits)
            .expect("a prefix within the address");
        net.trunc()
    }
}

/// All pods of the cluster.
pub fn cluster_cidr(family: Family) -> IpNet {
    let text = match family {
        Family::V4 => "10.244.0.0/16",
        Family::V6 => "fd00:a:f4::/48",
    };
    text.parse().expect("a network")
}

pub fn own(family: Family) -> impl Iterator<Item = (IpAddr, Device)> {
    OWN.iter()
        .map(move |(net, host, device)| (net.addr(family, *host), *device))
}

pub fn is_own(addr: IpAddr) -> bool {
    own(Family::of(addr)).any(|(own, _)| own == addr)
}

pub fn primary(family: Family) -> IpAddr {
    Device::Uplink
        .addr(family)
        .expect("the uplink has the primary address")
}

/// Returns the node's device for packets to an address. The node has no default route and no route
/// into the anchor.
pub fn route(addr: IpAddr) -> Option<Device> {
    let net = NETS
        .iter()
        .find(|net| net.cidr(Family::of(addr)).contains(&addr));
    net.map(|net| net.device)
        .filter(|device| *device != Device::Anchor)
}

/// Returns the node's routes: to pods and nodes through their devices, the rest through the uplink.
pub fn routes(family: Family) -> impl Iterator<Item = (IpNet, Device)> {
    let nets = NETS.iter().filter(|net| net.device != Device::Anchor);
    nets.map(move |net| (net.cidr(family), net.device))
}

/// Returns the node's neighbours.
pub fn neighbours(family: Family) -> impl Iterator<Item = (IpAddr, Device)> {
    const HOSTS: u8 = 40;
    let nets = NETS.iter().filter(|net| net.device != Device::Anchor);
    let all =
        nets.flat_map(move |net| (1..HOSTS).map(move |host| (net.addr(family, host), net.device)));
    all.filter(|(addr, _)| !is_own(*addr))
}
