//! Names of programs and maps in the BPF object. The kernel keeps 15 characters of each.

/// Attached to every device's ingress and egress, to the anchor's egress, to lo's egress.
pub const INGRESS: &str = "kpx_ingress";
pub const EGRESS: &str = "kpx_egress";
pub const ANCHOR: &str = "kpx_anchor";

/// Does nothing; for benchmarks.
pub const EMPTY: &str = "kpx_empty";

pub const COUNTERS: &str = "COUNTERS";
pub const DEVICES: &str = "DEVICES";
pub const NODE: &str = "NODE";

/// The maps that exist once per family.
#[derive(Clone, Copy, Debug)]
pub struct FamilyMaps {
    pub frontends: &'static str,
    pub services: &'static str,
    pub slots: &'static str,
    pub flows: &'static str,
    /// The node's own addresses.
    pub addrs: &'static str,
}

pub const IPV4: FamilyMaps =
    FamilyMaps { frontends: "FRONTENDS4", services: "SERVICES4", slots: "SLOTS4", flows: "FLOWS4", addrs: "ADDRS4" };

pub const IPV6: FamilyMaps =
    FamilyMaps { frontends: "FRONTENDS6", services: "SERVICES6", slots: "SLOTS6", flows: "FLOWS6", addrs: "ADDRS6" };
