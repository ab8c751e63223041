//! The objects by which nodes that hand clients over find each other: see "Handing clients over" in
//! proxy-agent's README.

use std::net::IpAddr;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;

use super::{Compact, Needed, needed};
use crate::input::ObjectName;
use crate::model::node_addresses;

/// Any node's Node object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerNode {
    pub name: ObjectName,
    pub uid: String,
    /// The resource version. `None` if it is no number.
    pub version: Option<u64>,
    /// Internal addresses first.
    pub addresses: Vec<IpAddr>,
}

impl Compact for PeerNode {
    type Object = Node;

    const NEEDED: Needed = needed::PEER_NODE;
    const WATCH: Option<&'static str> = Some("AllNodes");

    fn compact(node: Node) -> Self {
        Self {
            name: ObjectName::from(&node.metadata),
            addresses: node_addresses(&node),
            uid: node.metadata.uid.unwrap_or_default(),
            version: number(node.metadata.resource_version.as_deref()),
        }
    }

    fn name(&self) -> ObjectName {
        self.name.clone()
    }

    fn uid(&self) -> &str {
        &self.uid
    }
}

/// The version of the Node objects that a node accepts packets from.
pub const ACCEPTS: &str = "kpx.dev/handover-accepts";
/// The version of a Node object in which its addresses were first read.
pub const SINCE: &str = "kpx.dev/handover-since";
/// The addresses at [`SINCE`].
pub const ADDRESSES: &str = "kpx.dev/handover-addresses";

/// The Lease of a node that takes clients over. It has the name of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HandoverLease {
    pub name: ObjectName,
    pub uid: String,
    /// The uid of the Node object that owns the Lease.
    pub node_uid: String,
    pub accepts: Option<u64>,
    pub since: Option<u64>,
    pub addresses: String,
}

impl Compact for HandoverLease {
    type Object = Lease;

    const NEEDED: Needed = needed::HANDOVER_LEASE;

    fn compact(lease: Lease) -> Self {
        let name = ObjectName::from(&lease.metadata);
        let annotations = lease.metadata.annotations.unwrap_or_default();
        let owner = lease.metadata.owner_references.into_iter().flatten().next();
        let text = |key: &str| annotations.get(key).map(String::as_str);
        Self {
            name,
            uid: lease.metadata.uid.unwrap_or_default(),
            node_uid: owner.map(|owner| owner.uid).unwrap_or_default(),
            accepts: number(text(ACCEPTS)),
            since: number(text(SINCE)),
            addresses: text(ADDRESSES).unwrap_or_default().to_owned(),
        }
    }

    fn name(&self) -> ObjectName {
        self.name.clone()
    }

    fn uid(&self) -> &str {
        &self.uid
    }
}

fn number(text: Option<&str>) -> Option<u64> {
    text?.parse().ok()
}
