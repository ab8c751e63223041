//! The settings of a lab that can change while it runs.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::address::{CLUSTER_PODS, EXTERNAL, Family, NODES, OUTSIDE, SECOND};
use super::build::add_addr;
use super::{Dual, Host, Lab, Layout, Node, pods, tunnel};

/// The link between the nodes' pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodRoute {
    /// The fabric, like all other traffic.
    Eth0,
    /// The second link, like an overlay: its addresses are not the nodes' primary addresses.
    Eth1,
}

/// The links of n1 for packets from and to outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ways {
    /// Both through the fabric's link.
    Eth0,
    /// Outgoing packets through the second link.
    OutByEth1,
    /// Incoming packets through the second link.
    InByEth1,
}

const FIREWALL: &str = "table inet firewall";

impl Lab {
    /// Sets `rp_filter` on every current and future device of both nodes: 0 off, 1 strict, 2 loose.
    pub fn set_rp_filter(&self, value: u8) -> Result<()> {
        for node in self.nodes() {
            for device in node.host.ns.run(|| conf_names("/proc/sys/net/ipv4/conf"))? {
                node.host
                    .ns
                    .sysctl(&format!("ipv4/conf/{device}/rp_filter"), &value.to_string())?;
            }
        }
        Ok(())
    }

    /// Adds or removes the nodes' default route.
    pub fn set_default_route(&self, exists: bool) -> Result<()> {
        let gateway = NODES.host(1);
        for node in self.nodes() {
            for family in Family::ALL {
                let route = format!("default via {}", gateway.ip(family));
                node.host.ns.ip(&format!("route replace {route}"))?; // There must be a route to delete.
                if !exists {
                    node.host.ns.ip(&format!("route del {route}"))?;
                }
            }
        }
        Ok(())
    }

    pub fn set_pod_route(&self, route: PodRoute) -> Result<()> {
        for (node, other) in [(&self.n1, &self.n2), (&self.n2, &self.n1)] {
            let gateway = node_addrs(other, route);
            if matches!(self.layout, Layout::Tunnel(_)) {
                continue; // The tunnel has its own ends.
            }
            if self.layout == Layout::Vxlan {
                pods::lead_to(&node.host.ns, other.pod_net, gateway.v4)?;
                continue;
            }
            let lines = Family::ALL.map(|family| {
                format!(
                    "route replace {} via {}",
                    other.pod_net.cidr(family),
                    gateway.ip(family)
                )
            });
            node.host.ns.ip(&lines.join("\n"))?;
        }
        Ok(())
    }

    /// Sets the links between n1 and the outside, even without a default route. n1's strict
    /// `rp_filter` drops packets that arrive on one link if the reverse route uses the other.
    pub fn set_ways(&self, ways: Ways) -> Result<()> {
        let fabric = &self.fabric.ns;
        let n1 = &self.n1;
        if ways != Ways::Eth0 {
            // The fabric also receives packets with a reverse route on another link.
            fabric.sysctl("ipv4/conf/all/rp_filter", "0")?;
            fabric.sysctl("ipv4/conf/sec0/rp_filter", "0")?;
            fabric.ip(&add_addr("sec0", SECOND, 1).replace("addr add", "addr replace"))?;
        }
        let router = if ways == Ways::OutByEth1 {
            SECOND.host(1)
        } else {
            NODES.host(1)
        };
        for family in Family::ALL {
            let own = n1.host.addrs.ip(family);
            let second = n1.second.ip(family);
            let router = router.ip(family);
            let (to, at) = match ways {
                Ways::InByEth1 => (format!("via {second}"), second),
                Ways::Eth0 | Ways::OutByEth1 => ("dev fab0".to_owned(), own),
            };
            fabric.ip(&format!(
                "route replace {own} {to}\nroute replace {} via {at}",
                EXTERNAL.cidr(family)
            ))?;
            n1.host.ns.ip(&format!(
                "route replace {} via {router}",
                OUTSIDE.cidr(family)
            ))?;
            if ways != Ways::Eth0 {
                n1.host
                    .ns
                    .ip(&format!("route replace default via {router}"))?;
            }
        }
        Ok(())
    }

    /// Routes ExternalIPs and load balancer addresses in the fabric to this node.
    pub fn set_external_route(&self, node: &Node) -> Result<()> {
        let routes = Family::ALL.map(|family| {
            format!(
                "route replace {} via {}",
                EXTERNAL.cidr(family),
                node.host.addrs.ip(family)
            )
        });
        self.fabric.ns.ip(&routes.join("\n"))
    }

    /// Routes ExternalIPs and load balancer addresses in the fabric to both nodes, by the hash of each
    /// connection.
    pub fn spread_external_routes(&self) -> Result<()> {
        let fabric = &self.fabric.ns;
        for family in Family::ALL {
            let policy = format!("{family}/fib_multipath_hash_policy").to_lowercase();
            fabric.sysctl(&policy, "1")?;
            let ways: String = self
                .nodes()
                .into_iter()
                .map(|node| format!(" nexthop via {}", node.host.addrs.ip(family)))
                .collect();
            fabric.ip(&format!("route replace {}{ways}", EXTERNAL.cidr(family)))?;
        }
        Ok(())
    }

    /// Limits packets from the fabric to outside to 1400 bytes, or removes the limit. Hosts detect
    /// the limit only by ICMP errors.
    pub fn set_narrow(&self, on: bool) -> Result<()> {
        self.fabric.ns.ip(&format!(
            "link set out0 mtu {}",
            if on { 1400 } else { 1500 }
        ))?;
        for host in self.hosts() {
            // Remove the path MTUs that the hosts have cached.
            host.ns.sysctl("ipv4/route/flush", "1")?;
            host.ns
                .exec(Command::new("ip").args(["-6", "route", "flush", "cache"]))?;
        }
        Ok(())
    }

    /// Enables checksum offload on every veth of the lab, or makes senders complete checksums.
    ///
    /// kpx's own pair is excluded. If a UDP burst starts at a device without offload, the kernel
    /// cannot detect that its checksum is unfinished, and each rewrite of an address corrupts it,
    /// including netfilter's.
    pub fn set_offload(&self, on: bool) -> Result<()> {
        let state = if on { "on" } else { "off" };
        for host in self.hosts() {
            for device in host.ns.run(|| conf_names("/proc/sys/net/ipv4/conf"))? {
                if ["all", "default", "lo"].contains(&device.as_str())
                    || device.starts_with("kpx")
                    || device == tunnel::DEVICE
                {
                    continue;
                }
                let mut ethtool = Command::new("ethtool");
                ethtool.args(["-K", &device, "tx", state, "rx", state]);
                if device == pods::OVERLAY {
                    ethtool.args(["gro", state]); // GRO produces packets with incomplete checksums.
                }
                host.ns.exec(&mut ethtool)?;
            }
        }
        Ok(())
    }

    /// Enables checksum offload on the nodes' own links only. Some network cards offload TCP and
    /// UDP but not SCTP, or nothing.
    pub fn set_uplink_offload(&self, on: bool) -> Result<()> {
        for node in self.nodes() {
            for device in ["eth0", "eth1"] {
                let state = if on { "on" } else { "off" };
                node.host
                    .ns
                    .exec(Command::new("ethtool").args(["-K", device, "tx", state]))?;
            }
        }
        Ok(())
    }

    /// Enables a firewall on the nodes, as docker and careful administrators configure it: new
    /// flows only from and to pods and nodes, and no packets that conntrack considers invalid.
    pub fn set_firewall(&self, on: bool) -> Result<()> {
        let [pods4, pods6] = Family::ALL.map(|family| CLUSTER_PODS.cidr(family));
        let [nodes4, nodes6] = Family::ALL.map(|family| NODES.cidr(family));
        let rules = format!(
            "{FIREWALL} {{
                counter input {{ }}
                counter forward {{ }}
                counter output {{ }}
                chain forward {{
                    type filter hook forward priority filter; policy drop
                    ct state invalid counter name forward drop
                    ct state established,related accept
                    ip saddr {{ {pods4}, {nodes4} }} accept
                    ip6 saddr {{ {pods6}, {nodes6} }} accept
                    ip daddr {{ {pods4}, {nodes4} }} accept
                    ip6 daddr {{ {pods6}, {nodes6} }} accept
                }}
                chain input {{
                    type filter hook input priority filter; policy accept
                    icmp type redirect accept # From a node that is about to send a packet back: it names the backend.
                    ct state invalid counter name input drop
                }}
                chain output {{
                    type filter hook output priority filter; policy accept
                    icmpv6 type nd-redirect accept # Which connection tracking does not know.
                    ct state invalid counter name output
                }}
            }}"
        );
        for node in self.nodes() {
            // Declaring the table first makes the deletion succeed even if it is missing.
            node.host.ns.nft(&format!(
                "{FIREWALL}\ndelete {FIREWALL}\n{}",
                if on { &rules } else { "" }
            ))?;
        }
        Ok(())
    }

    /// Returns the places where conntrack considered packets invalid since the firewall was
    /// enabled.
    pub fn invalid_packets(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for node in self.nodes() {
            let text = node
                .host
                .ns
                .exec(Command::new("nft").args(["-j", "list", "counters", FIREWALL]))?;
            let list: Value =
                serde_json::from_str(&text).with_context(|| format!("parse counters {text}"))?;
            let counters = list["nftables"]
                .as_array()
                .context("no list of counters")?
                .iter();
            let counters: Vec<&Value> = counters.filter_map(|item| item.get("counter")).collect();
            ensure!(counters.len() == 3, "counters of the firewall: {text}");
            for counter in counters {
                let packets = counter["packets"]
                    .as_u64()
                    .context("a counter without packets")?;
                if packets > 0 {
                    found.push(format!(
                        "{packets} in {} of {}",
                        counter["name"], node.host.name
                    ));
                }
            }
        }
        Ok(found)
    }
}

impl Host {
    /// Adds an address of each family to a device of this host, which does not use it by itself.
    pub fn add_addrs(&self, device: &str, addrs: Dual) -> Result<()> {
        self.ns.ip(&format!(
            "addr add {}/32 dev {device}\naddr add {}/128 dev {device} nodad preferred_lft 0",
            addrs.v4, addrs.v6
        ))
    }

    /// Removes the addresses from [`Host::add_addrs`].
    pub fn del_addrs(&self, device: &str, addrs: Dual) -> Result<()> {
        self.ns.ip(&format!(
            "addr del {}/32 dev {device}\naddr del {}/128 dev {device}",
            addrs.v4, addrs.v6
        ))
    }
}

impl Node {
    /// Returns the address of this node's device to its own pods, or the node's address if the
    /// device has none.
    pub fn towards_own_pods(&self, layout: Layout) -> Dual {
        match layout {
            Layout::Routed | Layout::Tunnel(_) => self.host.addrs,
            Layout::Ptp
            | Layout::Bridge
            | Layout::Vxlan
            | Layout::Macvlan
            | Layout::Ipvlan
            | Layout::Netkit(_) => self.pod_net.host(1),
        }
    }

    /// Returns the source address of this node towards the other node's pods.
    pub fn towards_pods(&self, layout: Layout, route: PodRoute) -> Dual {
        match layout {
            Layout::Vxlan | Layout::Tunnel(_) => self.pod_net.host(0),
            Layout::Routed
            | Layout::Ptp
            | Layout::Bridge
            | Layout::Macvlan
            | Layout::Ipvlan
            | Layout::Netkit(_) => node_addrs(self, route),
        }
    }
}

fn node_addrs(node: &Node, route: PodRoute) -> Dual {
    match route {
        PodRoute::Eth0 => node.host.addrs,
        PodRoute::Eth1 => node.second,
    }
}

/// Returns the devices of the calling thread's namespace, with `all` and `default`.
fn conf_names(path: &str) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(path).with_context(|| format!("read {path}"))?;
    entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}
