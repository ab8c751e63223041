//! The lab's address plan for both families.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    pub fn of(ip: IpAddr) -> Self {
        if ip.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// An address of each family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dual {
    pub v4: Ipv4Addr,
    pub v6: Ipv6Addr,
}

impl Dual {
    pub fn ip(&self, family: Family) -> IpAddr {
        match family {
            Family::V4 => self.v4.into(),
            Family::V6 => self.v6.into(),
        }
    }
}

impl fmt::Display for Dual {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.v4, self.v6)
    }
}

/// A network of each family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DualNet {
    net: Dual,
    len4: u8,
    len6: u8,
}

impl DualNet {
    const fn new(v4: [u8; 4], len4: u8, v6: [u16; 4], len6: u8) -> Self {
        let [a, b, c, d] = v6;
        let [e, f, g, h] = v4;
        Self {
            net: Dual {
                v4: Ipv4Addr::new(e, f, g, h),
                v6: Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0),
            },
            len4,
            len6,
        }
    }

    /// Returns the network's `n`-th address; IPv6 uses the same decimal digits (`::11` is the
    /// 11th).
    pub fn host(&self, n: u8) -> Dual {
        let [a, b, c, _] = self.net.v4.octets();
        let [s0, s1, s2, s3, ..] = self.net.v6.segments();
        let digits = u16::from(n / 100) << 8 | u16::from(n / 10 % 10) << 4 | u16::from(n % 10);
        Dual {
            v4: Ipv4Addr::new(a, b, c, n),
            v6: Ipv6Addr::new(s0, s1, s2, s3, 0, 0, 0, digits),
        }
    }

    /// Returns the network in the form `address/length`.
    pub fn cidr(&self, family: Family) -> String {
        let len = match family {
            Family::V4 => self.len4,
            Family::V6 => self.len6,
        };
        format!("{}/{len}", self.net.ip(family))
    }

    /// Returns the prefix length.
    pub fn len(&self, family: Family) -> u8 {
        match family {
            Family::V4 => self.len4,
            Family::V6 => self.len6,
        }
    }
}

pub const SERVICE_CIDR: DualNet = DualNet::new([10, 96, 0, 0], 16, [0xfd00, 0x10, 0x96, 0], 112);
/// All pods of the cluster.
pub const CLUSTER_PODS: DualNet = DualNet::new([10, 244, 0, 0], 16, [0xfd00, 0x10, 0x244, 0], 48);
pub(super) const PODS: [DualNet; 2] = [
    DualNet::new([10, 244, 1, 0], 24, [0xfd00, 0x10, 0x244, 1], 64),
    DualNet::new([10, 244, 2, 0], 24, [0xfd00, 0x10, 0x244, 2], 64),
];
/// The segment between nodes and fabric.
pub(super) const NODES: DualNet = DualNet::new([172, 18, 0, 0], 24, [0xfd00, 0x172, 0x18, 0], 64);
/// The second segment, directly between nodes.
pub(super) const SECOND: DualNet = DualNet::new([172, 19, 0, 0], 24, [0xfd00, 0x172, 0x19, 0], 64);
/// The outside, behind the fabric.
pub(super) const OUTSIDE: DualNet =
    DualNet::new([198, 51, 100, 0], 24, [0xfd00, 0x198, 0x51, 0], 64);
/// The network of ExternalIPs and load balancers: no host has such an address; the fabric routes
/// them to a node.
pub const EXTERNAL: DualNet = DualNet::new([203, 0, 113, 0], 24, [0xfd00, 0x203, 0x113, 0], 64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_families_read_alike() {
        assert_eq!(NODES.host(11).to_string(), "172.18.0.11 fd00:172:18::11");
        assert_eq!(PODS[1].host(3).to_string(), "10.244.2.3 fd00:10:244:2::3");
        assert_eq!(
            SERVICE_CIDR.host(110).to_string(),
            "10.96.0.110 fd00:10:96::110"
        );
        assert_eq!(CLUSTER_PODS.cidr(Family::V6), "fd00:10:244::/48");
    }
}
