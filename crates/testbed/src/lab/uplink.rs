//! The device between a node and the fabric, always called eth0.

use anyhow::Result;

use super::build::plug;
use crate::netns::NetNs;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uplink {
    /// An end of a veth pair, as a network card.
    Card,
    /// A VLAN on a card. Frames between card and fabric are tagged.
    Vlan,
    /// A bond of two cards: active and backup.
    Bond,
}

/// The VLAN id.
const VLAN: u16 = 5;

/// Creates a node's eth0. Its other ends are on the fabric's bridge for nodes.
pub(super) fn make(uplink: Uplink, fabric: &NetNs, name: &str, node: &NetNs) -> Result<()> {
    match uplink {
        Uplink::Card => plug(fabric, "fab0", name, node, "eth0"),
        Uplink::Vlan => {
            fabric.ip(&format!(
                "link add {name} type veth peer name card0 netns {}
                 link set {name} up
                 link add {name}.{VLAN} link {name} type vlan id {VLAN}
                 link set {name}.{VLAN} master fab0 up",
                node.name()
            ))?;
            node.ip(&format!(
                "link set card0 up\nlink add eth0 link card0 type vlan id {VLAN}"
            ))
        }
        Uplink::Bond => {
            plug(fabric, "fab0", name, node, "card0")?;
            plug(fabric, "fab0", &format!("{name}-2"), node, "card1")?;
            node.ip("link add eth0 type bond mode active-backup miimon 100
                     link set card0 master eth0
                     link set card1 master eth0")
        }
    }
}
