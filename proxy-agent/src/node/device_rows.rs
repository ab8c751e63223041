//! Writes the programs' rows about devices and their addresses.

use anyhow::Result;
use proxy_common::device::{Device, OwnAddr};

use super::{LO, Node, all};

impl Node {
    pub(super) fn write_devices(&mut self) -> Result<()> {
        let mut rows = self.devices.rows(&self.detection);
        let bare = rows
            .iter()
            .filter(|(_, row)| row.flags() & Device::BARE != 0)
            .map(|(ifindex, _)| *ifindex);
        let met = self.programs.attachments.with_others(bare);
        let meets_ways = met
            .iter()
            .any(|ifindex| rows.get(ifindex).is_some_and(|row| !row.is_pod()));
        for (ifindex, row) in &mut rows {
            if met.contains(ifindex) || meets_ways && !row.is_pod() {
                *row = row.without(Device::BARE);
            }
        }
        rows.extend(self.tunnel_row());
        let written = self.rows.write_devices(&rows);
        all([written, self.write_addrs(), self.note_properties()])
    }

    /// Writes the node flags that depend on all devices together, after a change.
    pub(super) fn note_properties(&mut self) -> Result<()> {
        if self.rows.misses(self.devices.flags())? {
            self.write_node()
        } else {
            Ok(())
        }
    }

    pub(super) fn write_addrs(&mut self) -> Result<()> {
        let primary = self.addresses();
        let links = self.devices.links().values();
        let own = links.flat_map(|link| link.addrs.iter().map(|net| (link.index, net.addr())));
        let addrs = own.map(|(ifindex, addr)| {
            let mut flags = 0;
            if self.options.node_ports.accepts(addr, &primary) {
                flags |= OwnAddr::NODE_PORTS;
            }
            if self.handover.is_own(addr) {
                flags |= OwnAddr::OF_NODE_OBJECT;
            }
            (addr, OwnAddr::new(ifindex, flags))
        });
        let localhosts = self.options.localhosts();
        let localhosts = localhosts
            .into_iter()
            .map(|addr| (addr, OwnAddr::new(LO, OwnAddr::NODE_PORTS)));
        let addrs = addrs.chain(localhosts).collect();
        self.rows.write_addrs(&addrs)
    }
}
