//! The hand-over of external clients: see [`crate::model::AbleNodes`].

use std::sync::Arc;

use proxy_common::addr::Addr;

use super::Desired;
use crate::model::AbleNodes;
use crate::tables::FamilyTables;
use proxy_common::frontend::Set;

impl Desired {
    /// Replaces the nodes that take over packets of external clients.
    pub fn set_able_nodes(&mut self, able: AbleNodes) {
        if *self.options.able != able {
            self.options.able = Arc::new(able);
            self.rebuild_node();
        }
    }

    /// Returns a digest of the backends of all Services that hand clients over, which two nodes with
    /// the same objects share. `None` if this node hands nothing over.
    pub fn handover_digest(&self) -> Option<u64> {
        if !self.options.able.is_able() {
            return None;
        }
        let mut digest = Digest::default();
        add(&self.tables.v4, &mut digest);
        add(&self.tables.v6, &mut digest);
        Some(digest.0)
    }
}

/// FNV-1a. All nodes must agree on the result, so this function may never change.
struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    fn add(&mut self, text: &str) {
        for byte in text.bytes().chain([b'\n']) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

/// Adds the backends with their weights: the look-up tables follow from them.
fn add<A: Addr>(tables: &FamilyTables<A>, digest: &mut Digest) {
    let slots = tables
        .slots
        .iter()
        .filter(|(key, _)| key.set == Set::DIRECT);
    for (key, backend) in slots {
        let (ip, port) = (backend.addr.ip(), backend.port.get());
        digest.add(&format!(
            "{:?} {ip} {port} {}",
            key.service,
            backend.weight()
        ));
    }
}
