//! The tunnel devices of this node and their preconditions, for `--external-forwarding dsr`: see
//! "Handing clients over" in the README.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::Result;
use proxy_common::device::Device;
use proxy_core::model::AbleNodes;
use proxy_net::{fib, link, tunnel};
use proxy_source::health::{Health, Problem};
use proxy_source::peers::{Offer, PeerSource, Peering, Peers};
use tracing::info;

use super::{Node, all};

/// The state of the hand-over.
#[derive(Debug, Default)]
pub(super) struct Handover {
    /// The interface indexes of the devices, for IPv4 and IPv6. `None` while a precondition fails.
    devices: Option<[u32; 2]>,
    /// The reason why this node has no devices, or the failure that leaves them as they are.
    obstacle: Option<String>,
    /// What an earlier agent has left to the programs, until devices and rules are read.
    inherited: Option<Inherited>,
    /// Set once devices and rules are read.
    is_read: bool,
    /// `None` until the nodes are read.
    peers: Option<Peers>,
    /// The tunnel addresses of the nodes that packets are handed over to. `None` until they are
    /// found.
    targets: Option<BTreeMap<String, Vec<IpAddr>>>,
    /// A node that accepts packets, and gets none because they would have another source.
    misrouted: Option<String>,
    /// The mode is off, and an earlier agent has left its devices.
    are_left: bool,
}

/// The rows of an earlier agent.
#[derive(Debug, Default)]
pub(super) struct Inherited {
    pub(super) tunnels: Option<Device>,
    /// The addresses of the Node object.
    pub(super) own: BTreeSet<IpAddr>,
}

impl Handover {
    pub(super) fn new(inherited: Inherited) -> Self {
        Self {
            inherited: Some(inherited),
            ..Self::default()
        }
    }

    /// Returns the state without the mode, whose tunnel devices may be left.
    pub(super) fn off(are_left: bool) -> Self {
        Self {
            are_left,
            ..Self::default()
        }
    }

    /// Returns true for an address of this node's Node object.
    pub(super) fn is_own(&self, addr: IpAddr) -> bool {
        match (&self.peers, &self.inherited) {
            (Some(peers), _) => peers.own.contains(&addr),
            (None, Some(inherited)) => inherited.own.contains(&addr),
            (None, None) => false,
        }
    }
}

impl Node {
    /// Returns the source's part in the hand-over of clients.
    pub fn peering(&self, link: PeerSource) -> Peering {
        match self.options.hands_over {
            true => Peering::On(link),
            false if self.handover.are_left => Peering::Withdraw(link),
            false => Peering::Off,
        }
    }

    /// Makes or restores the tunnel devices if the host permits them, else removes them. After another
    /// failure they stay. Call this with a complete list of devices.
    pub(super) async fn fit_tunnels(&mut self) -> Result<()> {
        if !self.options.hands_over {
            return Ok(());
        }
        let before = self.handover.devices;
        let obstacle = self.tunnel_obstacle();
        let is_forbidden = obstacle.is_some();
        let made = match obstacle {
            Some(obstacle) => (None, Some(obstacle)),
            None => match tunnel::ensure(&self.handle).await {
                Ok(devices) => (Some(devices), None),
                // The kernel or another program refuses for now. The next full list tries again.
                Err(error) => (
                    before.or_else(|| tunnel::known(self.devices.links().values())),
                    Some(format!("{error:#}")),
                ),
            },
        };
        (self.handover.devices, self.handover.obstacle) = made;
        self.programs.takes_over = self.handover.devices.is_some();
        if before != self.handover.devices {
            info!(devices = ?self.handover.devices, "external forwarding");
        }
        if is_forbidden {
            tunnel::remove(&self.handle).await?;
        }
        self.find_targets().await
    }

    /// Returns the reason why this host must not have the devices: its kernel, or the use of tunnels
    /// by another program, which kpx's would disturb.
    fn tunnel_obstacle(&self) -> Option<String> {
        if !link::tunnels_hide_outer_headers() {
            return Some("the kernel is older than Linux 5.14, where programs see the outer headers of tunnels".to_owned());
        }
        tunnel::obstacle(self.devices.links().values())
    }

    /// Returns true if the tunnel devices must be made or removed before the next full list.
    pub(super) fn misfits_tunnels(&self) -> bool {
        self.options.hands_over
            && self.handover.devices.is_some()
            && self.tunnel_obstacle().is_some()
    }

    /// Brings the tunnel devices with a program up, and those without down. Call this after programs
    /// were attached.
    pub(super) async fn settle_tunnels(&mut self) -> Result<()> {
        let carried = self.programs.attachments.devices();
        let links = self.devices.links();
        let devices = self.handover.devices.into_iter().flatten();
        let mut result = Ok(());
        for ifindex in devices {
            let is_carried = carried.contains_key(&ifindex);
            if links
                .get(&ifindex)
                .is_some_and(|link| link.up != is_carried)
            {
                let set = tunnel::set_up(&self.handle, ifindex, is_carried).await;
                result = all([result, set]);
            }
        }
        result
    }

    /// Ends the use of an earlier agent's rows. Call this once devices and rules are read.
    pub(super) fn end_inheritance(&mut self) -> Result<()> {
        let is_first = !self.handover.is_read && self.fast_path.rules().is_some();
        if !self.options.hands_over || !is_first {
            return Ok(());
        }
        self.handover.is_read = true;
        self.write_devices()
    }

    /// Returns true once devices, rules and peers are read: until then, this node keeps an earlier
    /// agent's offer, rows and tables.
    pub fn knows_handover(&self) -> bool {
        !self.options.hands_over || self.handover.is_read && self.handover.peers.is_some()
    }

    /// Reports why external clients are masqueraded although the mode is on.
    pub fn report_handover(&self, health: &Health) {
        if !self.options.hands_over {
            return;
        }
        let why = match (&self.handover.obstacle, &self.handover.misrouted) {
            (Some(failure), _) if self.handover.devices.is_some() => Some(format!(
                "the tunnel devices stay as they are until kpx can correct them: {failure}"
            )),
            (Some(obstacle), _) => Some(format!(
                "clients outside are masqueraded, and other nodes masquerade those of this node's backends: {obstacle}"
            )),
            (None, misrouted) => self
                .rules_of_packets()
                .map(|rules| {
                    format!(
                        "clients outside are masqueraded at this node, because rules of netfilter could judge packets that are handed over past them: {rules}"
                    )
                })
                .or_else(|| misrouted.clone()),
        };
        match why {
            Some(why) => health.begin(&Problem::Handover, why),
            None => health.end(&Problem::Handover),
        }
    }

    /// Returns the rules that packets which are handed over would miss; `None` if there are none.
    fn rules_of_packets(&self) -> Option<String> {
        match self.fast_path.rules() {
            None => Some("they are not read yet".to_owned()),
            Some([]) => None,
            Some(rules) => Some(rules.join("; ")),
        }
    }

    /// Returns the row with the tunnel devices: empty while packets must take the stack here.
    pub(super) fn tunnel_row(&self) -> Option<(u32, Device)> {
        if !self.options.hands_over {
            return None;
        }
        let row = if !self.handover.is_read {
            self.handover.inherited.as_ref()?.tunnels?
        } else if self.rules_of_packets().is_none() && self.takes_over() {
            let [v4, v6] = self.handover.devices?;
            Device::tunnels(v4, v6)
        } else {
            return None;
        };
        Some((Device::TUNNELS, row))
    }

    /// Returns true if this node takes over packets: every tunnel device carries its program and is
    /// up.
    fn takes_over(&self) -> bool {
        let carried = self.programs.attachments.devices();
        let links = self.devices.links();
        let devices = self.handover.devices.into_iter().flatten();
        let mut devices = devices.filter(|ifindex| *ifindex != 0).peekable();
        let is_used = |ifindex: &u32| links.get(ifindex).is_some_and(|link| link.up);
        devices.peek().is_some()
            && devices.all(|ifindex| carried.contains_key(&ifindex) && is_used(&ifindex))
    }

    /// Returns what this node offers to the other nodes.
    pub fn offer(&self) -> Offer {
        match &self.handover.peers {
            Some(peers) if self.takes_over() => Offer::Accepts(peers.version),
            _ => Offer::Nothing,
        }
    }

    /// Accepts packets from the other nodes, and finds those to which this node hands packets over.
    pub async fn take_peers(&mut self, peers: Peers) -> Result<()> {
        self.rows.write_peers(&peers.nodes)?;
        self.handover.peers = Some(peers);
        all([self.write_addrs(), self.find_targets().await])
    }

    /// Finds the nodes to which packets go with an address of this node's Node object: the others
    /// know no other address.
    async fn find_targets(&mut self) -> Result<()> {
        let Some(peers) = &self.handover.peers else {
            return Ok(());
        };
        let mut targets = BTreeMap::new();
        let mut misrouted = None;
        for (node, addresses) in &peers.nodes {
            if !peers.accepting.contains(node) {
                continue;
            }
            let first = |is_of: fn(&IpAddr) -> bool| addresses.iter().copied().find(is_of);
            let mut tunnels = Vec::new();
            for to in [first(IpAddr::is_ipv4), first(IpAddr::is_ipv6)]
                .into_iter()
                .flatten()
            {
                let source = fib::tunnel_source(&self.handle, to).await?;
                if source.is_some_and(|source| peers.own.contains(&source)) {
                    tunnels.push(to);
                } else {
                    misrouted.get_or_insert_with(|| {
                        let source = source.map_or_else(|| "unknown".to_owned(), |source| source.to_string());
                        format!("clients outside of backends at node {node} are masqueraded, because the source of packets to {to} is {source}, which is no address of this node's Node object")
                    });
                }
            }
            targets.insert(node.clone(), tunnels);
        }
        self.handover.misrouted = misrouted;
        if self.handover.targets.as_ref() != Some(&targets) {
            let addresses = targets.values().flatten().copied().collect();
            self.handover.targets = Some(targets);
            self.rows.keep_handed_over(&addresses)?;
        }
        Ok(())
    }

    /// Returns the nodes that this node hands packets over to.
    pub fn able_nodes(&self) -> AbleNodes {
        if self.options.hands_over && self.takes_over() {
            AbleNodes::new(self.handover.targets.clone().unwrap_or_default())
        } else {
            AbleNodes::NONE
        }
    }
}
