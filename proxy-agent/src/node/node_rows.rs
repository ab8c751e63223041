//! The maps about this node: its own row, its addresses, the networks of pods and of Services.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::Result;
use ipnet::IpNet;
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::device::{self, Device, OwnAddr};
use proxy_core::desired::Desired;
use proxy_datapath::NodeMaps;
use proxy_net::anchor::Anchor;

use super::detect::Detection;
use super::handover::Inherited;

/// The maps about this node, and their last written content.
pub(super) struct NodeRows {
    maps: NodeMaps,
    /// A predecessor's row about this node, in use until the first sync.
    inherited: Option<device::Node>,
    /// The Node object's pod networks, as written.
    pod_cidrs: Vec<IpNet>,
    /// The networks between which the stack leaves packets unchanged, as written.
    unchanged: Vec<IpNet>,
    /// The ranges of ClusterIPs, as written. `None` before the first write.
    service_nets: Option<ServiceNets>,
    /// The flags that depend on the rows of devices.
    of_rows: u32,
    /// The addresses in use.
    pub(super) addrs: (Addr4, Addr6),
}

/// The ranges of ClusterIPs, the shared networks in them, and the ClusterIPs of other proxies.
#[derive(PartialEq, Eq)]
struct ServiceNets {
    cidrs: Vec<IpNet>,
    shared: Vec<IpNet>,
    others: BTreeSet<IpAddr>,
}

/// The flags that depend on all devices together.
const OF_DEVICES: u32 = device::Node::STACKED
    | device::Node::FILTERED
    | device::Node::MACVLANS
    | device::Node::BARE_PODS;

pub(super) struct NodeFlags {
    /// The operator's settings, and whether local pods can be detected.
    pub(super) options: u32,
    /// The properties of the host, found by this or an earlier agent.
    pub(super) host: u32,
}

impl NodeRows {
    pub(super) fn new(maps: NodeMaps) -> Result<Self> {
        // The start of an agent ends draining.
        let inherited = maps
            .node()?
            .map(|node| node.without(device::Node::DRAINING));
        let unknown = (Addr4::UNSPECIFIED, Addr6::UNSPECIFIED);
        let addrs = inherited.map_or(unknown, |node| (node.addr4, node.addr6));
        Ok(Self {
            maps,
            inherited,
            pod_cidrs: Vec::new(),
            unchanged: Vec::new(),
            service_nets: None,
            of_rows: 0,
            addrs,
        })
    }

    /// Returns the rows of a predecessor that hand packets over.
    pub(super) fn inherited_handover(&self) -> Result<Inherited> {
        Ok(Inherited {
            tunnels: self.maps.tunnels()?,
            own: self.maps.addrs_of_node_object()?,
        })
    }

    /// Returns true while a predecessor's row is in use.
    pub(super) fn is_inherited(&self) -> bool {
        self.inherited.is_some()
    }

    /// Replaces a predecessor's row by this agent's facts from now on.
    pub(super) fn disinherit(&mut self) {
        self.inherited = None;
    }

    pub(super) fn addresses(&self) -> Vec<IpAddr> {
        let (v4, v6) = self.addrs;
        let known = [
            (!v4.is_unspecified()).then(|| v4.ip()),
            (!v6.is_unspecified()).then(|| v6.ip()),
        ];
        known.into_iter().flatten().collect()
    }

    pub(super) fn write_node(&mut self, anchor: Anchor, flags: NodeFlags) -> Result<()> {
        let NodeFlags { options, host } = flags;
        let host = host | self.of_rows;
        if let Some(inherited) = self.inherited {
            let inherited = inherited
                .without(device::Node::OF_FAST_PATH | OF_DEVICES)
                .with(host);
            return self
                .maps
                .set_node(inherited.with_anchor(anchor.ifindex, anchor.mac));
        }
        let (addr4, addr6) = self.addrs;
        self.maps.set_node(device::Node::new(
            addr4,
            addr6,
            anchor.ifindex,
            anchor.mac,
            options | host,
        ))
    }

    /// Returns true if the written row and `flags` differ in the flags that depend on all devices.
    pub(super) fn misses(&self, flags: u32) -> Result<bool> {
        Ok(self
            .maps
            .node()?
            .is_some_and(|known| known != known.without(OF_DEVICES).with(flags | self.of_rows)))
    }

    pub(super) fn write_devices(&mut self, devices: &BTreeMap<u32, Device>) -> Result<()> {
        let is_bare = |device: &Device| device.is_pod() && device.flags() & Device::BARE != 0;
        self.of_rows = if devices.values().any(is_bare) {
            device::Node::BARE_PODS
        } else {
            0
        };
        self.maps.set_devices(devices)
    }

    /// Returns true if bypass connections can use some pod's device.
    pub(super) fn has_bare_pods(&self) -> bool {
        self.of_rows & device::Node::BARE_PODS != 0
    }

    pub(super) fn write_peers(&mut self, peers: &BTreeMap<String, Vec<IpAddr>>) -> Result<()> {
        self.maps.set_peers(peers)
    }

    pub(super) fn keep_handed_over(&mut self, nodes: &BTreeSet<IpAddr>) -> Result<()> {
        self.maps.keep_handed_over(nodes)
    }

    pub(super) fn write_addrs(&mut self, addrs: &BTreeMap<IpAddr, OwnAddr>) -> Result<()> {
        self.maps.set_addrs(addrs)
    }

    /// Returns true if the predecessor may have opened bypass flows.
    pub(super) fn inherits_bypass_flows(&self) -> bool {
        self.inherited.is_some_and(|node| {
            node.has(device::Node::FAST_OPEN | device::Node::FAST_OPENED | device::Node::FAST_KEEP)
        })
    }

    pub(super) fn pod_cidrs(&self) -> &[IpNet] {
        &self.pod_cidrs
    }

    /// Returns true if these pod networks are written already.
    pub(super) fn knows_pods(&self, pod_cidrs: &[IpNet]) -> bool {
        self.pod_cidrs == pod_cidrs
    }

    pub(super) fn write_pods(
        &mut self,
        detection: &Detection,
        pod_cidrs: Vec<IpNet>,
    ) -> Result<()> {
        self.maps
            .set_pods(&detection.nets(), &pod_cidrs, &self.unchanged)?;
        self.pod_cidrs = pod_cidrs;
        Ok(())
    }

    /// Writes the networks between which the stack leaves packets unchanged.
    pub(super) fn write_unchanged(
        &mut self,
        detection: &Detection,
        unchanged: Vec<IpNet>,
    ) -> Result<()> {
        if self.unchanged != unchanged {
            self.maps
                .set_pods(&detection.nets(), &self.pod_cidrs, &unchanged)?;
            self.unchanged = unchanged;
        }
        Ok(())
    }

    /// Makes the programs pass packets to Services that another proxy takes over. Such Services may
    /// still have kpx's frontends: packets must pass as soon as these are removed.
    pub(super) fn spare_other_proxies(&mut self, desired: &Desired) {
        let others = desired.of_other_proxies();
        let Some(known) = self
            .service_nets
            .take_if(|known| !others.is_subset(&known.others))
        else {
            return;
        };
        let all = ServiceNets {
            others: &known.others | others,
            ..known
        };
        // A failed write fails again after the sync, and is reported then.
        if self
            .maps
            .set_service_nets(&all.cidrs, &all.shared, &all.others)
            .is_ok()
        {
            self.service_nets = Some(all);
        }
    }

    /// Writes the ranges of ClusterIPs, the shared networks in them, and the ClusterIPs of other
    /// proxies.
    pub(super) fn write_service_nets(
        &mut self,
        cidrs: &[IpNet],
        shared: &[IpNet],
        desired: &Desired,
    ) -> Result<()> {
        let others = desired.of_other_proxies();
        let wanted = ServiceNets {
            cidrs: cidrs.to_vec(),
            shared: shared.to_vec(),
            others: others.clone(),
        };
        if self.service_nets.as_ref() != Some(&wanted) {
            self.maps.set_service_nets(cidrs, shared, others)?;
            self.service_nets = Some(wanted);
        }
        Ok(())
    }
}
