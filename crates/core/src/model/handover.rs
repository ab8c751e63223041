//! The hand-over of external clients to the nodes of their backends: see "Handing clients over" in
//! proxy-ebpf's README.

use std::collections::BTreeMap;
use std::net::IpAddr;

use proxy_common::addr::Addr;

/// The way of external clients to backends on other nodes, under `externalTrafficPolicy: Cluster`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExternalForwarding {
    /// With the address of the node that they reached.
    #[default]
    Masquerade,
    /// Unchanged to the backend's node, which answers directly.
    Dsr,
}

impl ExternalForwarding {
    pub const ALL: [Self; 2] = [Self::Masquerade, Self::Dsr];

    /// Returns the name in `externalForwarding` and in the annotation.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Masquerade => "masquerade",
            Self::Dsr => "dsr",
        }
    }

    pub(super) fn from_name(name: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|known| known.name() == name)
            .ok_or_else(|| {
                format!(
                    "{name:?} is not one of {}",
                    Self::ALL.map(Self::name).join(", ")
                )
            })
    }
}

/// The nodes that take over packets of external clients, if this node can hand packets over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AbleNodes(Option<BTreeMap<String, Vec<IpAddr>>>);

impl AbleNodes {
    /// This node hands nothing over.
    pub const NONE: Self = Self(None);

    /// Other nodes by name, with the addresses of their tunnels, at most one for each family.
    pub fn new(others: BTreeMap<String, Vec<IpAddr>>) -> Self {
        Self(Some(others))
    }

    pub fn is_able(&self) -> bool {
        self.0.is_some()
    }

    /// Returns the address of a node's tunnel.
    pub(super) fn address<A: Addr>(&self, node: &str) -> Option<A> {
        let addresses = self.0.as_ref()?.get(node)?;
        addresses.iter().find_map(|ip| A::from_ip(*ip))
    }
}
