//! The tunnel devices of this node and their preconditions, for `--external-forwarding dsr`: see
//! "Handing clients over" in the README.

use std::net::IpAddr;

use anyhow::Result;
use proxy_common::device::Device;
use proxy_net::{link, tunnel};
use proxy_source::health::{Health, Problem};
use proxy_source::peers::Peers;
use tracing::info;

use super::Node;

/// The state of the hand-over.
#[derive(Debug, Default)]
pub(super) struct Handover {
    /// The interface indexes of the devices, for IPv4 and IPv6. `None` while a precondition fails.
    devices: Option<[u32; 2]>,
    /// The reason why this node neither hands packets over nor takes packets over.
    obstacle: Option<String>,
    peers: Peers,
}

impl Node {
    /// Makes or restores the tunnel devices. Call this with a complete list of devices.
    pub(super) async fn fit_tunnels(&mut self, health: &Health) {
        if !self.options.hands_over {
            return;
        }
        let before = self.handover.devices;
        match self.tunnels().await {
            Ok(devices) => {
                self.handover.devices = Some(devices);
                self.handover.obstacle = None;
            }
            Err(error) => {
                self.handover.devices = None;
                self.handover.obstacle = Some(format!("{error:#}"));
            }
        }
        self.programs.takes_over = self.handover.devices.is_some();
        if before != self.handover.devices {
            info!(devices = ?self.handover.devices, "external forwarding");
        }
        self.report_handover(health);
    }

    async fn tunnels(&self) -> Result<[u32; 2]> {
        anyhow::ensure!(
            link::tunnels_hide_outer_headers(),
            "the kernel is older than Linux 5.14, where programs see the outer headers of tunnels"
        );
        if let Some(obstacle) = tunnel::obstacle(self.devices.links().values()) {
            anyhow::bail!("{obstacle}");
        }
        tunnel::ensure(&self.handle).await
    }

    /// Reports why external clients are masqueraded although the mode is on.
    pub(super) fn report_handover(&self, health: &Health) {
        let why = match &self.handover.obstacle {
            Some(obstacle) => Some(format!(
                "clients outside are masqueraded, and other nodes masquerade those of this node's backends: {obstacle}"
            )),
            None => self.rules_of_packets().map(|rules| {
                format!(
                    "clients outside are masqueraded at this node, because rules of netfilter could judge packets that are handed over past them: {rules}"
                )
            }),
        };
        match why.filter(|_| self.options.hands_over) {
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
        let [v4, v6] = self.handover.devices?;
        let row = match self.rules_of_packets() {
            None => Device::tunnels(v4, v6),
            Some(_) => Device::tunnels(0, 0),
        };
        Some((Device::TUNNELS, row))
    }

    /// Returns true if this node takes over packets: every tunnel device carries its program.
    pub fn takes_over(&self) -> bool {
        let carried = self.programs.attachments.devices();
        let devices = self.handover.devices.into_iter().flatten();
        let mut devices = devices.filter(|ifindex| *ifindex != 0).peekable();
        devices.peek().is_some() && devices.all(|ifindex| carried.contains_key(&ifindex))
    }

    /// Sets the other nodes that hand packets over. Their packets are accepted from now on.
    pub fn set_peers(&mut self, peers: Peers) -> Result<()> {
        self.rows.write_peers(&peers)?;
        self.handover.peers = peers;
        Ok(())
    }

    /// Returns the tunnel addresses of the other nodes, one for each family.
    pub fn tunnel_addresses(&self) -> impl Iterator<Item = (String, Vec<IpAddr>)> {
        self.handover.peers.iter().map(|(node, addresses)| {
            let first = |is_of: fn(&IpAddr) -> bool| addresses.iter().copied().find(is_of);
            let tunnels = [first(IpAddr::is_ipv4), first(IpAddr::is_ipv6)];
            (node.clone(), tunnels.into_iter().flatten().collect())
        })
    }
}
