//! The cluster's addresses. The control plane, the nodes and their pods have both families.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub(crate) const CONTROL4: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 1);
pub(crate) const CONTROL6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x172, 0x30, 0, 0, 0, 0, 1);
pub(crate) const API_PORT: u16 = 6443;
pub(crate) const SERVICES: &str = "10.96.0.0/16,fd00:10:96::/112";
pub(crate) const PODS: &str = "10.244.0.0/16,fd00:10:244::/48";
pub(crate) const DNS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);

/// The client outside.
pub(crate) const OUTSIDE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(172, 31, 0, 2)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0x172, 0x31, 0, 0, 0, 0, 2)),
];

/// A node's name, addresses and networks of pods.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) number: u8,
    pub(crate) name: String,
    pub(crate) ipv4: Ipv4Addr,
    pub(crate) ipv6: Ipv6Addr,
    pub(crate) pods4: String,
    pub(crate) pods6: String,
    /// The networks of Services' addresses that packets from outside reach by way of this node.
    pub(crate) virtual4: String,
    pub(crate) virtual6: String,
}

impl Node {
    fn new(number: u8) -> Self {
        let host = 10 + number;
        Self {
            number,
            name: format!("n{number}"),
            ipv4: Ipv4Addr::new(172, 30, 0, host),
            // Both addresses end in the same digits.
            ipv6: Ipv6Addr::new(0xfd00, 0x172, 0x30, 0, 0, 0, 0, 0x10 + u16::from(number)),
            pods4: format!("10.244.{number}.0/24"),
            pods6: format!("fd00:10:244:{number}::/64"),
            virtual4: format!("172.29.{number}.0/24"),
            virtual6: format!("fd00:172:29:{number}::/64"),
        }
    }

    /// Returns the node's addresses in its networks of pods.
    pub(crate) fn gateways(&self) -> [IpAddr; 2] {
        let ipv6 = [0xfd00, 0x10, 0x244, self.number.into(), 0, 0, 0, 1];
        [
            Ipv4Addr::new(10, 244, self.number, 1).into(),
            Ipv6Addr::from(ipv6).into(),
        ]
    }
}

pub(crate) fn nodes(count: u8) -> Vec<Node> {
    (1..=count).map(Node::new).collect()
}

/// Returns a line `NAME IPV4 IPV6 PODS4 PODS6 VIRTUAL4 VIRTUAL6` for each node, for the scripts.
pub(crate) fn table(nodes: &[Node]) -> String {
    let mut table = String::new();
    for node in nodes {
        let Node {
            number: _,
            name,
            ipv4,
            ipv6,
            pods4,
            pods6,
            virtual4,
            virtual6,
        } = node;
        let _ = writeln!(
            table,
            "{name} {ipv4} {ipv6} {pods4} {pods6} {virtual4} {virtual6}"
        );
    }
    table.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_a_line_for_each_node() {
        assert_eq!(
            table(&nodes(2)),
            "n1 172.30.0.11 fd00:172:30::11 10.244.1.0/24 fd00:10:244:1::/64 172.29.1.0/24 fd00:172:29:1::/64\n\
             n2 172.30.0.12 fd00:172:30::12 10.244.2.0/24 fd00:10:244:2::/64 172.29.2.0/24 fd00:172:29:2::/64"
        );
    }
}
