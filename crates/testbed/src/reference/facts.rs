//! The facts about the node that the agent writes for the programs: addresses, devices, networks.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::test_run::Bench;
use anyhow::Result;
use ipnet::IpNet;
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::device;

use crate::reference::cluster::{Detector, NodeFacts};
use crate::reference::place::{self, Device, Family};

pub const MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
/// The MAC address of all devices of the node except lo.
pub const NODE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// The agent's controls of the fast path, which do not affect the choice of a backend.
#[derive(Clone, Debug, Default)]
pub struct FastFacts {
    /// Flags of the node, ...
    pub node: u32,
    /// ... and additional flags of devices.
    pub devices: BTreeMap<Device, u32>,
    /// The networks within which the stack leaves packets unchanged.
    pub unchanged: Vec<IpNet>,
}

pub fn write(
    bench: &mut Bench,
    facts: &NodeFacts,
    fast: &FastFacts,
    service_cidrs: &[IpNet],
    ifindexes: &BTreeMap<Device, u32>,
) -> Result<()> {
    let maps = &mut bench.datapath.node;
    let v4 = Some(place::primary(Family::V4));
    let v6 = Some(place::primary(Family::V6));
    maps.set_node(device::Node::new(
        addr(v4),
        addr(v6),
        ifindexes[&Device::Anchor],
        MAC,
        flags(facts) | fast.node,
    ))?;
    let more = |device| fast.devices.get(&device).copied().unwrap_or_default();
    let devices = ifindexes
        .iter()
        .map(|(device, ifindex)| (*ifindex, on_device(*device, facts, more(*device))));
    maps.set_devices(&devices.collect())?;
    let own = Family::ALL
        .into_iter()
        .flat_map(place::own)
        .map(|(addr, device)| {
            let takes_node_ports = facts.node_port_addrs.contains(&addr);
            let flags = if takes_node_ports {
                device::OwnAddr::NODE_PORTS
            } else {
                0
            };
            (addr, device::OwnAddr::new(ifindexes[&device], flags))
        });
    maps.set_addrs(&own.collect())?;
    let pods: &[IpNet] = match &facts.detector {
        Detector::Cidrs(cidrs) => cidrs,
        Detector::Device(_) => &[],
    };
    maps.set_pods(pods, &[], &fast.unchanged)?;
    maps.set_service_cidrs(service_cidrs)
}

fn addr<A: Addr>(addr: Option<IpAddr>) -> A {
    addr.and_then(A::from_ip).unwrap_or(A::UNSPECIFIED)
}

fn flags(facts: &NodeFacts) -> u32 {
    let detects = |family: Family| match &facts.detector {
        Detector::Cidrs(cidrs) => cidrs.iter().any(|cidr| Family::of(cidr.addr()) == family),
        Detector::Device(_) => true,
    };
    let flags = [
        (facts.compat, device::Node::COMPAT),
        (facts.masquerade_all, device::Node::MASQUERADE_ALL),
        (facts.cluster_ip_external, device::Node::CLUSTER_IP_EXTERNAL),
        (detects(Family::V4), device::Node::DETECTS4),
        (detects(Family::V6), device::Node::DETECTS6),
        (
            Device::ALL.into_iter().any(Device::is_filtered),
            device::Node::FILTERED,
        ),
    ];
    flags
        .iter()
        .filter(|(set, _)| *set)
        .fold(0, |flags, (_, flag)| flags | flag)
}

fn on_device(device: Device, facts: &NodeFacts, more: u32) -> device::Device {
    let mut flags = more;
    if device.leads_to_pods() {
        flags |= device::Device::POD;
    }
    if device == Device::Pod {
        flags |= device::Device::PEER;
    }
    if device.is_edge() {
        flags |= device::Device::EDGE;
    }
    if device.is_filtered() {
        flags |= device::Device::FILTERED;
    }
    if matches!(facts.detector, Detector::Device(pods) if pods == device) {
        flags |= device::Device::DETECTED;
    }
    let addr4 = addr::<Addr4>(device.addr(Family::V4));
    let addr6 = addr::<Addr6>(device.addr(Family::V6));
    device::Device::new(flags, addr4, addr6).with_link(0, 9_000, NODE_MAC)
}
