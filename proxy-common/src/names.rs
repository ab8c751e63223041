//! Names of programs and maps in the BPF object. The kernel keeps 15 characters of each.

use crate::hook::PacketHook;

/// Attached to every device's ingress and egress, to the anchor's egress, to lo's egress.
pub const INGRESS: &str = PacketHook::Ingress.program();
pub const EGRESS: &str = PacketHook::Egress.program();
pub const ANCHOR: &str = PacketHook::Anchor.program();
pub const LO: &str = PacketHook::Lo.program();

/// The programs of the hooks at which sockets name the address that they dial, and ask for it.
pub const SOCKETS: [&str; 4] = [
    "kpx_connect4",
    "kpx_connect6",
    "kpx_getpeer4",
    "kpx_getpeer6",
];
/// The same for datagrams of sockets that are not connected.
pub const DATAGRAMS: [&str; 4] = [
    "kpx_sendmsg4",
    "kpx_sendmsg6",
    "kpx_recvmsg4",
    "kpx_recvmsg6",
];

pub const COUNTERS: &str = "COUNTERS";
pub const DEVICES: &str = "DEVICES";
pub const NODE: &str = "NODE";
/// The storages of TCP sockets, of each family.
pub const DIALLED: [&str; 2] = ["DIALLED4", "DIALLED6"];
/// The pods whose sockets are led, by their cgroups.
pub const SOCKET_PODS: &str = "SOCKET_PODS";
/// Counts the removals from `ENDPOINTS`.
pub const GENERATION: &str = "GENERATION";

/// The agent's words to the fast path, and the ends that have flows: see [`crate::ways`].
pub const WAYS: &str = "WAYS";
/// The links to the pods of this node.
pub const EXITS: &str = "EXITS";
/// Flows that ask whether they may skip the stack beside conntrack, and the agent's answers.
pub const OFFERS: &str = "OFFERS";
pub const TOLERATED: &str = "TOLERATED";

/// The senders that the routes have vouched for.
pub const SENDERS: &str = "SENDERS";

/// What each CPU keeps: the time, and how many records it has written and lost.
pub const CPUS: &str = "CPUS";

/// Records for `kpx monitor`, the limit while it runs, and the number of lost records.
pub const MONITOR: &str = "MONITOR";
pub const WATCHED: &str = "WATCHED";

/// Not 0, the packet mark of our hooks is kept in `mark` as well as in `tc_index` (`u32`, set
/// before loading).
pub const EXPOSES_PACKET_MARK: &str = "EXPOSES_PACKET_MARK";
/// Not 0, the programs have what it takes to deliver packets past the stack (`u32`, set before
/// loading).
pub const FAST_PATH: &str = "FAST_PATH";

/// How many packets each CPU may answer in a second (`u32`, set before loading).
pub const ANSWERS_PER_SEC: &str = "ANSWERS_PER_SEC";

/// The rings of the half-open queue, and the places of each (`u32`, set before loading).
pub const HALF_OPEN_RINGS: &str = "HALF_OPEN_RINGS";
pub const HALF_OPEN_PLACES: &str = "HALF_OPEN_PLACES";
/// The entries that `FLOWS` has room for (`u32`, set before loading).
pub const FLOW_ROOM: &str = "FLOW_ROOM";

/// The times for which flows may be silent: see [`Timeouts`](crate::flow::Timeouts) (`u32` in
/// seconds, set before loading).
pub const TCP_ESTABLISHED_SECS: &str = "TCP_ESTABLISHED_SECS";
pub const TCP_HALF_CLOSED_SECS: &str = "TCP_HALF_CLOSED_SECS";
pub const UDP_SECS: &str = "UDP_SECS";
pub const UDP_STREAM_SECS: &str = "UDP_STREAM_SECS";

/// The network namespace whose sockets are served, and how: see [`crate::socket`] (`u64`, `u32`,
/// set before loading).
pub const SOCKET_NETNS: &str = "SOCKET_NETNS";
pub const SOCKET_FLAGS: &str = "SOCKET_FLAGS";

/// Maps outside of families that begin empty with every load. They hold a program's own room while
/// it runs, what it asks the kernel for again each second, records for `kpx monitor`, and numbers
/// whose places move with every new one.
const PER_LOAD: [&str; 8] = [
    EXITS, OFFERS, TOLERATED, SENDERS, CPUS, MONITOR, WATCHED, COUNTERS,
];

/// Returns true if a map begins empty with every load, and is not part of the layout.
pub fn is_per_load(map: &str) -> bool {
    PER_LOAD.contains(&map) || IPV4.has_per_load(map) || IPV6.has_per_load(map)
}

macro_rules! names {
    ($($(#[$doc:meta])* $field:ident: $v4:ident $v6:ident: $map:ident<$($part:ty),+> = $size:expr, $flags:expr, $how:ident;)+) => {
        /// The names of the maps that exist once per family.
        #[derive(Clone, Copy, Debug)]
        pub struct FamilyMaps {
            $($(#[$doc])* pub $field: &'static str,)+
        }

        pub const IPV4: FamilyMaps = FamilyMaps { $($field: stringify!($v4)),+ };
        pub const IPV6: FamilyMaps = FamilyMaps { $($field: stringify!($v6)),+ };

        impl FamilyMaps {
            fn has_per_load(&self, map: &str) -> bool {
                [$((self.$field, stringify!($how))),+].contains(&(map, "per_load"))
            }
        }
    };
}
crate::family_maps!(names);
