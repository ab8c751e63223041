//! Detects local pods among all clients (`--detect-local-mode`).

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, bail};
use ipnet::IpNet;
use proxy_common::device::Node;

use proxy_net::link::{Link, LinkKind};

/// The property that makes a client a local pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detector {
    /// An address in these networks, at most one per family. A family without a network has no
    /// detection.
    ClusterCidr(Vec<IpNet>),
    /// An address in `spec.podCIDRs` of the Node object.
    NodeCidr,
    /// A packet through this bridge.
    Bridge(String),
    /// A packet through a device with this name prefix.
    Prefix(String),
}

impl Default for Detector {
    fn default() -> Self {
        Self::ClusterCidr(Vec::new())
    }
}

impl fmt::Display for Detector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ClusterCidr(nets) if nets.is_empty() => f.write_str("none"),
            Self::ClusterCidr(nets) => {
                let nets: Vec<_> = nets.iter().map(IpNet::to_string).collect();
                write!(f, "ClusterCIDR {}", nets.join(","))
            }
            Self::NodeCidr => f.write_str("NodeCIDR"),
            Self::Bridge(name) => write!(f, "BridgeInterface {name}"),
            Self::Prefix(prefix) => write!(f, "InterfaceNamePrefix {prefix}"),
        }
    }
}

/// A detector, with its facts from the cluster.
#[derive(Clone, Debug, Default)]
pub struct Detection {
    detector: Detector,
    /// The Node object's `spec.podCIDRs`, once present.
    pod_cidrs: Vec<IpNet>,
}

impl Detection {
    pub fn new(detector: Detector) -> Self {
        Self {
            detector,
            pod_cidrs: Vec::new(),
        }
    }

    /// Takes over the Node object's `spec.podCIDRs`. Returns an error if the detector has used
    /// other networks: open flows keep their classification, so the agent must restart.
    pub fn learn(&mut self, pod_cidrs: &[IpNet]) -> Result<()> {
        if self.detector != Detector::NodeCidr || self.pod_cidrs == pod_cidrs {
            return Ok(());
        }
        if !self.pod_cidrs.is_empty() {
            bail!(
                "the Node object's podCIDRs have changed from {:?} to {pod_cidrs:?}",
                self.pod_cidrs
            );
        }
        self.pod_cidrs = pod_cidrs.to_vec();
        Ok(())
    }

    /// Returns false while the detector needs podCIDRs and the Node object has none.
    pub fn is_known(&self) -> bool {
        self.detector != Detector::NodeCidr || !self.pod_cidrs.is_empty()
    }

    /// Returns the networks of local pods' addresses: the first of each family.
    pub fn nets(&self) -> Vec<IpNet> {
        let nets = match &self.detector {
            Detector::ClusterCidr(nets) => nets,
            Detector::NodeCidr => &self.pod_cidrs,
            Detector::Bridge(_) | Detector::Prefix(_) => return Vec::new(),
        };
        let first = |ipv4| nets.iter().find(|net| net.addr().is_ipv4() == ipv4);
        [first(true), first(false)]
            .into_iter()
            .flatten()
            .copied()
            .collect()
    }

    /// Returns true if a client behind `link` is a local pod. `links` are all devices, by interface
    /// index.
    pub fn finds(&self, link: &Link, links: &BTreeMap<u32, Link>) -> bool {
        // For packets from a bridge's ports, the IP layer sees the bridge as the input device.
        let bridge = link
            .master
            .and_then(|master| links.get(&master))
            .filter(|master| master.kind == LinkKind::Bridge);
        let name = &bridge.unwrap_or(link).name;
        match &self.detector {
            Detector::Bridge(bridge) => name == bridge,
            Detector::Prefix(prefix) => name.starts_with(prefix.as_str()),
            Detector::ClusterCidr(_) | Detector::NodeCidr => false,
        }
    }

    /// Returns the flags of the families with detection: `DETECTS4` and `DETECTS6` of [`Node`].
    pub fn flags(&self) -> u32 {
        if matches!(self.detector, Detector::Bridge(_) | Detector::Prefix(_)) {
            return Node::DETECTS4 | Node::DETECTS6;
        }
        let nets = self.nets();
        nets.iter().fold(0, |flags, net| {
            flags
                | if net.addr().is_ipv4() {
                    Node::DETECTS4
                } else {
                    Node::DETECTS6
                }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proxy_net::link::LinkHeader;
    use proxy_net::role::FarEnd;

    #[test]
    fn a_detector_yields_networks_and_families() {
        let both = Node::DETECTS4 | Node::DETECTS6;
        let pod_cidrs = ["10.244.1.0/24", "10.244.9.0/24", "fd00:1::/64"];
        let cases: [(&str, Detector, &[&str], u32); 6] = [
            ("nothing is said", Detector::default(), &[], 0),
            (
                "one family",
                Detector::ClusterCidr(nets(&["10.244.0.0/16"])),
                &["10.244.0.0/16"],
                Node::DETECTS4,
            ),
            (
                "the other first",
                Detector::ClusterCidr(nets(&["fd00::/48", "10.244.0.0/16"])),
                &["10.244.0.0/16", "fd00::/48"],
                both,
            ),
            (
                "the first podCIDR of each family",
                Detector::NodeCidr,
                &["10.244.1.0/24", "fd00:1::/64"],
                both,
            ),
            ("a bridge", Detector::Bridge("cni0".into()), &[], both),
            ("a prefix", Detector::Prefix("cali".into()), &[], both),
        ];
        for (name, detector, want, flags) in cases {
            let mut detection = Detection::new(detector);
            detection.learn(&nets(&pod_cidrs)).unwrap();
            assert_eq!(detection.nets(), nets(want), "{name}");
            assert_eq!(detection.flags(), flags, "{name}");
        }
    }

    #[test]
    fn detection_waits_for_pod_cidrs_that_must_not_change() {
        let mut detection = Detection::new(Detector::NodeCidr);
        assert!(!detection.is_known());
        detection.learn(&[]).unwrap();
        assert!(!detection.is_known());
        detection.learn(&nets(&["10.244.1.0/24"])).unwrap();
        assert!(detection.is_known());
        detection.learn(&nets(&["10.244.1.0/24"])).unwrap();
        let error = detection
            .learn(&nets(&["10.244.2.0/24"]))
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "the Node object's podCIDRs have changed from [10.244.1.0/24] to [10.244.2.0/24]"
        );
        assert!(detection.learn(&[]).is_err(), "and must not go");

        let mut other = Detection::new(Detector::default());
        assert!(other.is_known());
        other.learn(&nets(&["10.244.1.0/24"])).unwrap();
        other.learn(&nets(&["10.244.2.0/24"])).unwrap();
    }

    #[test]
    fn a_detector_finds_devices_of_local_pods() {
        let cni0 = link(1, "cni0", LinkKind::Bridge, None);
        let port = link(2, "veth1234", LinkKind::Veth, Some(1));
        let routed = link(3, "cali5678", LinkKind::Veth, None);
        let eth0 = link(4, "eth0", LinkKind::Physical, None);
        let slave = link(5, "eth1", LinkKind::Physical, Some(6));
        let bond = link(6, "cni-bond", LinkKind::Bond, None);
        let links: BTreeMap<u32, Link> = [cni0, port, routed, eth0, slave, bond]
            .map(|link| (link.index, link))
            .into();
        let cases: [(&str, Detector, &[&str]); 6] = [
            (
                "a bridge and its ports",
                Detector::Bridge("cni0".into()),
                &["cni0", "veth1234"],
            ),
            (
                "a bridge that is not there",
                Detector::Bridge("cni1".into()),
                &[],
            ),
            (
                "devices by name",
                Detector::Prefix("cali".into()),
                &["cali5678"],
            ),
            (
                "ports by their bridge's name",
                Detector::Prefix("cni".into()),
                &["cni0", "veth1234", "cni-bond"],
            ),
            ("and not by their own", Detector::Prefix("veth".into()), &[]),
            (
                "by address, not by device",
                Detector::ClusterCidr(nets(&["10.0.0.0/8"])),
                &[],
            ),
        ];
        for (name, detector, want) in cases {
            let detection = Detection::new(detector);
            let found = links
                .values()
                .filter(|link| detection.finds(link, &links))
                .map(|link| link.name.as_str());
            assert_eq!(found.collect::<Vec<_>>(), want, "{name}");
        }
    }

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn link(index: u32, name: &str, kind: LinkKind, master: Option<u32>) -> Link {
        Link {
            index,
            name: name.to_owned(),
            mac: None,
            mtu: 1500,
            kind,
            header: LinkHeader::Ethernet,
            master,
            peer_netns: false,
            queues: false,
            up: true,
            addrs: [].into(),
            far_end: FarEnd::Nothing,
            filtered: false,
            filtered_out: false,
            lacks_egress: false,
        }
    }
}
