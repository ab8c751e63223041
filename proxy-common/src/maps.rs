//! The maps that exist once per family: the one place that names them.
//!
//! `family_maps!(consumer)` hands all rows to a macro. From them come the statics of the programs,
//! [`crate::names`], and the agent's copy between maps of different sizes: a new map is one row
//! here.

/// Flag of the kernel: a map takes memory as it fills.
pub const NO_PREALLOC: u32 = 1;
/// Entries of `FLOWS`. The sizes here are defaults: the agent may set others before it loads the
/// object.
pub const FLOWS: u32 = 262_144;

/// Calls a macro with a row for each map:
/// `field: NAME4 NAME6: Type<Key, Value> = entries, flags, how`.
///
/// The last word says how a map's entries get into one of another size: `keep` copies those that
/// are not there yet, `more_passed` those of flows that have gone on, `networks` those of a trie.
/// `none` copies nothing, because the map fills by itself. A map that is `per_load` begins empty
/// with every load, and is not part of the layout.
///
/// Flows are preallocated and never LRU: the kernel must not evict what is established, and opening
/// a flow must not allocate. The kernel may evict from LRU maps: it costs a client its backend, a
/// fragment, an even share.
#[macro_export]
macro_rules! family_maps {
    ($($consumer:tt)+) => {
        $($consumer)+! {
            frontends: FRONTENDS4 FRONTENDS6: HashMap<FrontendKey<A>, Frontend<A>> = 65_536, NO_PREALLOC, keep;
            services: SERVICES4 SERVICES6: HashMap<FrontendKey<A>, Service> = 65_536, NO_PREALLOC, keep;
            slots: SLOTS4 SLOTS6: HashMap<SlotKey<A>, Backend<A>> = 262_144, NO_PREALLOC, keep;
            endpoints: ENDPOINTS4 ENDPOINTS6: HashMap<EndpointKey<A>, Endpoint> = 262_144, NO_PREALLOC, keep;
            maglev: MAGLEV4 MAGLEV6: HashMap<SetKey<A>, Maglev> = 65_536, NO_PREALLOC, keep;
            source_ranges: SOURCE_RANGES4 SOURCE_RANGES6: LpmTrie<SourceRange<A>, u32> = 65_536, NO_PREALLOC, networks;
            flows: FLOWS4 FLOWS6: HashMap<FlowKey<A>, Flow<A>> = FLOWS, 0, more_passed;
            /// Source ports that other programs' connections have.
            guests: GUESTS4 GUESTS6: LruHashMap<FlowKey<A>, Guest> = 32_768, 0, none;
            /// Openers' keys, oldest first: the half-open flows among them make room.
            half_open: HALF_OPEN_RING4 HALF_OPEN_RING6: Array<Place<A>> = all_places(FLOWS / 4), 0, none;
            half_open_ends: HALF_OPEN_ENDS4 HALF_OPEN_ENDS6: Array<PaddedEnds> = RINGS_MAX * CLASSES, 0, none;
            /// The entries of flows beyond half-open, of each client.
            clients: CLIENTS4 CLIENTS6: LruHashMap<A, u32> = 65_536, 0, keep;
            /// The entries of flows beyond half-open.
            lasting: LASTING4 LASTING6: Array<u32> = 1, 0, none;
            /// The backend that a client had.
            affinity: AFFINITY4 AFFINITY6: LruHashMap<AffinityKey<A>, Affinity<A>> = 65_536, 0, keep;
            /// The same of clients that have not shown themselves yet. They evict only each other.
            new_affinity: NEW_AFFINITY4 NEW_AFFINITY6: LruHashMap<AffinityKey<A>, Affinity<A>> = 16_384, 0, keep;
            /// The turn of a set, in round robin.
            cursors: CURSORS4 CURSORS6: LruHashMap<SetKey<A>, u32> = 65_536, 0, keep;
            /// Open flows of a backend, for least connections.
            connections: CONNECTIONS4 CONNECTIONS6: LruHashMap<FrontendKey<A>, u32> = 65_536, 0, keep;
            fragments: FRAGMENTS4 FRAGMENTS6: LruHashMap<FragmentKey<A>, Ports> = 16_384, 0, keep;
            /// The same of flows whose clients are behind uplinks. They evict only each other.
            far_fragments: FAR_FRAGMENTS4 FAR_FRAGMENTS6: LruHashMap<FragmentKey<A>, Ports> = 16_384, 0, keep;
            /// The node's own addresses.
            addrs: ADDRS4 ADDRS6: HashMap<A, OwnAddr> = 65_536, NO_PREALLOC, keep;
            /// The networks of local pods, as the operator says.
            pods: PODS4 PODS6: LpmTrie<A, u32> = 1_024, NO_PREALLOC, networks;
            /// The ranges of ClusterIPs, and those ClusterIPs in them that other proxies serve.
            service_cidrs: SERVICE_CIDRS4 SERVICE_CIDRS6: LpmTrie<A, u32> = 65_536, NO_PREALLOC, networks;
            /// A hook's own room while it runs.
            rooms: ROOM4 ROOM6: PerCpuArray<Room<A>> = 1, 0, per_load;
            decisions: DECISIONS4 DECISIONS6: PerCpuArray<Decision<A>> = 1, 0, per_load;
            /// The counters of each service port.
            service_counts: SVC_COUNTS4 SVC_COUNTS6: HashMap<FrontendKey<A>, ServiceCounts> = 65_536, NO_PREALLOC, keep;
            /// What became of the connections of each service port to each backend.
            connects: CONNECTS4 CONNECTS6: HashMap<EndpointKey<A>, Connects> = 32_768, NO_PREALLOC, keep;
            /// The frontends that UDP sockets have dialled.
            udp_sockets: UDP_SOCKETS4 UDP_SOCKETS6: LruHashMap<SocketKey<A>, Socket<A>> = 65_536, 0, none;
        }
    };
}
