//! The node under test: the agent's pure core and the loaded programs, in a namespace with the
//! cluster's routes.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use proxy_core::desired::Desired;
use proxy_core::input::{Input, Update};
use proxy_datapath::{Maps, Options};

use crate::netns::NetNs;
use crate::reference::cluster::Cluster;
use crate::reference::facts::{self, FastFacts};
use crate::reference::place::{self, Device, Family};
use crate::test_run::Bench;

pub struct Node {
    pub bench: Bench,
    desired: Desired,
    pub ifindexes: BTreeMap<Device, u32>,
    /// Applied with the next cluster.
    pub fast: FastFacts,
}

/// The MAC address of all devices of the node except lo.
const MAC: &str = "02:00:00:00:00:02";

/// Creates a namespace with the node's devices, addresses, routes and neighbours.
pub fn namespace(name: &str) -> Result<NetNs> {
    let netns = NetNs::create(format!("kpx-{}-{name}", std::process::id()))?;
    let mut lines = String::new();
    for device in Device::ALL
        .into_iter()
        .filter(|device| *device != Device::Lo)
    {
        let name = device.name();
        // Every frame fits: with known neighbours, the kernel's look-up fails for frames above the
        // MTU.
        lines +=
            &format!("link add {name} address {MAC} mtu 9000 type veth peer name {name}-far\n");
        lines += &format!("link set {name} up\nlink set {name}-far up\n");
    }
    for family in Family::ALL {
        let host_len = family.addr_bits();
        for (addr, device) in place::own(family) {
            lines += &format!("addr add {addr}/{host_len} dev {}\n", device.name());
        }
        for (cidr, device) in place::routes(family) {
            lines += &format!("route add {cidr} dev {}\n", device.name());
        }
        for (addr, device) in place::neighbours(family) {
            lines += &format!(
                "neigh add {addr} dev {} lladdr 02:00:00:00:00:01 nud permanent\n",
                device.name()
            );
        }
    }
    netns.ip(&lines)?;
    netns.settle()?;
    netns.sysctl("ipv4/conf/all/forwarding", "1")?;
    netns.sysctl("ipv6/conf/all/forwarding", "1")?;
    Ok(netns)
}

impl Node {
    /// Loads the programs on a thread that stays in `namespace`. `name` is the node's name in the
    /// agent.
    pub fn new(name: &str, options: Options) -> Result<Self> {
        let bench = Bench::load(options)?;
        let index = |device: Device| {
            let ifindex = nix::net::if_::if_nametoindex(device.name());
            Ok((
                device,
                ifindex.with_context(|| format!("index of {}", device.name()))?,
            ))
        };
        let ifindexes = Device::ALL.into_iter().map(index).collect::<Result<_>>()?;
        Ok(Self {
            bench,
            desired: Desired::new(name),
            ifindexes,
            fast: FastFacts::default(),
        })
    }

    /// Applies the objects and the node of `cluster`.
    pub fn enter(&mut self, cluster: &Cluster) -> Result<()> {
        facts::write(
            &mut self.bench,
            &cluster.node,
            &self.fast,
            &cluster.service_cidrs,
            &self.ifindexes,
        )?;
        self.desired
            .apply(Input::Node(Update::All(vec![cluster.node_object()])));
        self.desired.apply(Input::ServiceCidr(Update::All(
            cluster.service_cidr_objects(),
        )));
        self.desired
            .apply(Update::All(cluster.slices.clone()).into());
        self.desired
            .apply(Update::All(cluster.services.clone()).into());
        self.bench.datapath.node.set_service_nets(
            &cluster.service_cidrs,
            &[],
            self.desired.of_other_proxies(),
        )?;
        for change in self.desired.sync().changes {
            self.bench.datapath.tables.apply(&change)?;
        }
        Ok(())
    }

    /// Returns the skipped objects and parts, with reasons.
    pub fn skipped(&self) -> Vec<String> {
        self.desired.skipped().map(ToString::to_string).collect()
    }
}
