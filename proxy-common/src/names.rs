//! The names of programs and maps in the BPF object. The kernel keeps 15 characters of each.

use crate::hook::PacketHook;

/// Attached to the ingress and egress of every device, the egress of the anchor, and the egress of
/// lo.
pub const INGRESS: &str = PacketHook::Ingress.program();
pub const EGRESS: &str = PacketHook::Egress.program();
pub const ANCHOR: &str = PacketHook::Anchor.program();
pub const LO: &str = PacketHook::Lo.program();

/// The programs at `connect` and `getpeername`.
pub const SOCKETS: [&str; 4] = [
    "kpx_connect4",
    "kpx_connect6",
    "kpx_getpeer4",
    "kpx_getpeer6",
];
/// The programs for datagrams of unconnected sockets.
pub const DATAGRAMS: [&str; 4] = [
    "kpx_sendmsg4",
    "kpx_sendmsg6",
    "kpx_recvmsg4",
    "kpx_recvmsg6",
];

/// The program that counts the outcomes of translated sockets' connections.
pub const SOCK_OPS: &str = "kpx_sock_ops";

pub const COUNTERS: &str = "COUNTERS";
pub const DEVICES: &str = "DEVICES";
pub const NODE: &str = "NODE";
/// The socket storage of TCP sockets, for each family.
pub const DIALLED: [&str; 2] = ["DIALLED4", "DIALLED6"];
/// The socket storage of connecting TCP sockets, with the time of their first SYN.
pub const CONNECTING: &str = "CONNECTING";
/// The pods with socket load balancing, by cgroup.
pub const SOCKET_PODS: &str = "SOCKET_PODS";
/// The number of removals from `ENDPOINTS`.
pub const GENERATION: &str = "GENERATION";

/// The agent's settings for the fast path, and the marks of flows' ends: see [`crate::ways`].
pub const WAYS: &str = "WAYS";
/// The devices of this node's pods.
pub const EXITS: &str = "EXITS";
/// Flows that request a liberal conntrack entry, to bypass the stack, and the agent's replies.
pub const OFFERS: &str = "OFFERS";
pub const TOLERATED: &str = "TOLERATED";

/// The senders whose source address the routes have validated.
pub const SENDERS: &str = "SENDERS";

/// The nodes that hand over packets of external clients: see [`crate::peer`].
pub const PEERS: &str = "PEERS";
pub const HANDED_OVER: &str = "HANDED_OVER";

/// The programs of the slow path: see [`SlowProgram`](crate::hook::SlowProgram).
pub const SLOW: &str = "SLOW";

/// The scratch space of a running hook.
pub const ROOM: &str = "ROOM";

/// The state of each CPU: the time, and the numbers of written and lost records.
pub const CPUS: &str = "CPUS";

/// The records for `kpx monitor`, and their limit while it runs.
pub const MONITOR: &str = "MONITOR";
pub const WATCHED: &str = "WATCHED";

/// Not 0: the hooks keep their packet mark in `mark` as well as in `tc_index` (`u32`, set before
/// loading).
pub const EXPOSES_PACKET_MARK: &str = "EXPOSES_PACKET_MARK";
/// Not 0: the programs can bypass the stack (`u32`, set before loading).
pub const FAST_PATH: &str = "FAST_PATH";

/// Not 0: the programs hand over packets of external clients (`u32`, set before loading).
pub const HANDS_OVER: &str = "HANDS_OVER";

/// The packets that each CPU may answer in a second (`u32`, set before loading).
pub const ANSWERS_PER_SEC: &str = "ANSWERS_PER_SEC";

/// The number of rings in the half-open queue, and the places in each (`u32`, set before loading).
pub const HALF_OPEN_RINGS: &str = "HALF_OPEN_RINGS";
pub const HALF_OPEN_PLACES: &str = "HALF_OPEN_PLACES";
/// The capacity of `FLOWS` in entries (`u32`, set before loading).
pub const FLOW_ROOM: &str = "FLOW_ROOM";

/// The idle timeouts of flows in seconds: see [`Timeouts`](crate::flow::Timeouts) (`u32`, set
/// before loading).
pub const TCP_ESTABLISHED_SECS: &str = "TCP_ESTABLISHED_SECS";
pub const TCP_HALF_CLOSED_SECS: &str = "TCP_HALF_CLOSED_SECS";
pub const UDP_SECS: &str = "UDP_SECS";
pub const UDP_STREAM_SECS: &str = "UDP_STREAM_SECS";

/// The network namespace of the served sockets, and the flags: see [`crate::socket`] (`u64`, `u32`,
/// set before loading).
pub const SOCKET_NETNS: &str = "SOCKET_NETNS";
pub const SOCKET_FLAGS: &str = "SOCKET_FLAGS";

/// The maps without family that start empty with every load: scratch space, kernel state that is
/// refreshed each second, records for `kpx monitor`, and counters whose indexes change with every
/// new counter.
const PER_LOAD: [&str; 10] = [
    SLOW, ROOM, EXITS, OFFERS, TOLERATED, SENDERS, CPUS, MONITOR, WATCHED, COUNTERS,
];

/// Returns true if the map starts empty with every load, and is not part of the layout.
pub fn is_per_load(map: &str) -> bool {
    PER_LOAD.contains(&map) || IPV4.has_per_load(map) || IPV6.has_per_load(map)
}

macro_rules! names {
    ($($(#[$doc:meta])* $field:ident: $v4:ident $v6:ident: $map:ident<$($part:ty),+> = $size:expr, $flags:expr, $how:ident;)+) => {
        /// The names of the maps that exist once for each family.
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
