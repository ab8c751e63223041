//! Names of programs and maps in the BPF object. The kernel keeps 15 characters of each.

/// Attached to every device's ingress and egress, to the anchor's egress, to lo's egress.
pub const INGRESS: &str = "kpx_ingress";
pub const EGRESS: &str = "kpx_egress";
pub const ANCHOR: &str = "kpx_anchor";
pub const LO: &str = "kpx_lo";

/// Does nothing. Of the object with the feature `bench`, as the next two.
pub const EMPTY: &str = "kpx_empty";
/// Look up a flow and rewrite the packet, no more, as the programs for ingress and egress.
pub const MINIMAL: &str = "kpx_minimal";
pub const MINIMAL_OUT: &str = "kpx_minimal_out";

/// The programs of the hooks at which sockets say whom they dial, and are told whom they have dialled.
pub const SOCKETS: [&str; 4] = ["kpx_connect4", "kpx_connect6", "kpx_getpeer4", "kpx_getpeer6"];
/// The same for datagrams of sockets that are not connected.
pub const DATAGRAMS: [&str; 4] = ["kpx_sendmsg4", "kpx_sendmsg6", "kpx_recvmsg4", "kpx_recvmsg6"];

pub const COUNTERS: &str = "COUNTERS";
pub const DEVICES: &str = "DEVICES";
pub const NODE: &str = "NODE";
/// Counts the removals from `ENDPOINTS`.
pub const GENERATION: &str = "GENERATION";

/// When each CPU last asked for the time, and what it was told.
pub const CLOCK: &str = "CLOCK";

/// How many packets each CPU has answered in a second.
pub const ANSWERED: &str = "ANSWERED";

/// Records for those who watch, whether any do, and what was lost.
pub const MONITOR: &str = "MONITOR";
pub const WATCHED: &str = "WATCHED";
pub const MONITORED: &str = "MONITORED";

/// Not 0, what hooks note on a packet is kept in its `mark` as well as in its `tc_index` (`u32`, set before loading).
pub const NOTES_IN_MARK: &str = "NOTES_IN_MARK";
/// Not 0, the programs have what it takes to deliver packets past the stack (`u32`, set before loading).
pub const FAST_PATH: &str = "FAST_PATH";

/// How many packets each CPU may answer in a second (`u32`, set before loading).
pub const ANSWERS_PER_SEC: &str = "ANSWERS_PER_SEC";

/// Whose sockets are served, and how: see [`crate::socket`] (`u64`, `u32`, set before loading).
pub const SOCKET_NETNS: &str = "SOCKET_NETNS";
pub const SOCKET_FLAGS: &str = "SOCKET_FLAGS";

/// Maps that begin anew with every load, and are not part of the layout: a program's own room while it runs, what is told
/// to those who watch, and numbers whose places move with every new one.
pub const PER_LOAD: [&str; 12] = [
    "SCRATCH4",
    "SCRATCH6",
    "EVICTION4",
    "EVICTION6",
    CLOCK,
    ANSWERED,
    IPV4.decisions,
    IPV6.decisions,
    MONITOR,
    WATCHED,
    MONITORED,
    COUNTERS,
];

/// The maps that exist once per family.
#[derive(Clone, Copy, Debug)]
pub struct FamilyMaps {
    pub frontends: &'static str,
    pub services: &'static str,
    pub slots: &'static str,
    pub endpoints: &'static str,
    pub maglev: &'static str,
    pub source_ranges: &'static str,
    pub flows: &'static str,
    /// Which source ports other programs' connections have.
    pub guests: &'static str,
    /// Which flows were opened, oldest first: the half-open ones among them make room.
    pub nursery: &'static str,
    /// Which backend a client had.
    pub affinity: &'static str,
    /// Whose turn it is, of round robin.
    pub cursors: &'static str,
    /// Open flows of a backend, for least connections.
    pub connections: &'static str,
    pub fragments: &'static str,
    /// The node's own addresses.
    pub addrs: &'static str,
    /// Where local pods have their addresses, says the operator.
    pub pods: &'static str,
    pub service_cidrs: &'static str,
    pub decisions: &'static str,
    /// What passed for each service port.
    pub service_counts: &'static str,
    /// Whom sockets have dialled: a table for each protocol, so that many of one make nobody forget the other's.
    pub tcp_sockets: &'static str,
    pub udp_sockets: &'static str,
}

macro_rules! family_maps {
    ($digit:literal) => {
        FamilyMaps {
            frontends: concat!("FRONTENDS", $digit),
            services: concat!("SERVICES", $digit),
            slots: concat!("SLOTS", $digit),
            endpoints: concat!("ENDPOINTS", $digit),
            maglev: concat!("MAGLEV", $digit),
            source_ranges: concat!("SOURCE_RANGES", $digit),
            flows: concat!("FLOWS", $digit),
            guests: concat!("GUESTS", $digit),
            nursery: concat!("NURSERY", $digit),
            affinity: concat!("AFFINITY", $digit),
            cursors: concat!("CURSORS", $digit),
            connections: concat!("CONNECTIONS", $digit),
            fragments: concat!("FRAGMENTS", $digit),
            addrs: concat!("ADDRS", $digit),
            pods: concat!("PODS", $digit),
            service_cidrs: concat!("SERVICE_CIDRS", $digit),
            decisions: concat!("DECISIONS", $digit),
            service_counts: concat!("SVC_COUNTS", $digit),
            tcp_sockets: concat!("TCP_SOCKETS", $digit),
            udp_sockets: concat!("UDP_SOCKETS", $digit),
        }
    };
}

pub const IPV4: FamilyMaps = family_maps!("4");
pub const IPV6: FamilyMaps = family_maps!("6");
