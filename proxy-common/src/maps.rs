//! The maps that exist once for each family, in a single list.
//!
//! `family_maps!(consumer)` passes all rows to a macro. The programs' statics, [`crate::names`] and
//! the agent's copy between maps of different sizes derive from them: a new map is one row here.

/// The kernel's `BPF_F_NO_PREALLOC`: a map allocates memory as it fills.
pub const NO_PREALLOC: u32 = 1;
/// The entries of `FLOWS`. Sizes here are defaults, which the agent may change before it loads the
/// object.
pub const FLOWS: u32 = 262_144;

/// Calls a macro with a row for each map: `field: NAME4 NAME6: Type<Key, Value> = entries, flags,
/// how`.
///
/// `how` selects the copy into a map of another size: `keep` copies missing entries, `more_passed`
/// flows with more packets, `networks` the entries of a trie, and `none` nothing, because the map
/// refills itself. A `per_load` map starts empty with every load and is not part of the layout.
///
/// Flows are preallocated and not LRU: the kernel must not evict established flows, and opening a
/// flow must not allocate. An eviction from an LRU map costs only a client's backend, a fragment or
/// an even share.
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
            /// Foreign NAT ports.
            foreign_nat: GUESTS4 GUESTS6: LruHashMap<FlowKey<A>, ForeignNat> = 32_768, 0, none;
            /// The keys of original entries, oldest first. The programs may evict half-open flows
            /// among them.
            half_open: HALF_OPEN_RING4 HALF_OPEN_RING6: Array<Place<A>> = all_places(FLOWS / 4), 0, none;
            half_open_ends: HALF_OPEN_ENDS4 HALF_OPEN_ENDS6: Array<PaddedEnds> = RINGS_MAX * CLASSES, 0, none;
            /// The number of each client's entries of flows that are no longer half-open.
            clients: CLIENTS4 CLIENTS6: LruHashMap<A, u32> = 65_536, 0, keep;
            /// The number of all entries of flows that are no longer half-open.
            lasting: LASTING4 LASTING6: Array<u32> = 1, 0, none;
            /// The client's previous backend.
            affinity: AFFINITY4 AFFINITY6: LruHashMap<AffinityKey<A>, Affinity<A>> = 65_536, 0, keep;
            /// The previous backend of an unproven client. Unproven clients evict only each other.
            new_affinity: NEW_AFFINITY4 NEW_AFFINITY6: LruHashMap<AffinityKey<A>, Affinity<A>> = 16_384, 0, keep;
            /// The round-robin position of a set.
            cursors: CURSORS4 CURSORS6: LruHashMap<SetKey<A>, u32> = 65_536, 0, keep;
            /// The open flows of each backend, for least connections.
            connections: CONNECTIONS4 CONNECTIONS6: LruHashMap<FrontendKey<A>, u32> = 65_536, 0, keep;
            fragments: FRAGMENTS4 FRAGMENTS6: LruHashMap<FragmentKey<A>, Ports> = 16_384, 0, keep;
            /// The fragments of clients behind uplinks, which evict only each other.
            far_fragments: FAR_FRAGMENTS4 FAR_FRAGMENTS6: LruHashMap<FragmentKey<A>, Ports> = 16_384, 0, keep;
            /// The node's own addresses.
            addrs: ADDRS4 ADDRS6: HashMap<A, OwnAddr> = 65_536, NO_PREALLOC, keep;
            /// The networks of pods, with the bits of `pod_net`.
            pods: PODS4 PODS6: LpmTrie<A, u32> = 1_024, NO_PREALLOC, networks;
            /// The ClusterIP ranges, the ClusterIPs in them that other proxies serve, and shared
            /// networks.
            service_cidrs: SERVICE_CIDRS4 SERVICE_CIDRS6: LpmTrie<A, u32> = 65_536, NO_PREALLOC, networks;
            decisions: DECISIONS4 DECISIONS6: PerCpuArray<Decision<A>> = 1, 0, per_load;
            service_counts: SVC_COUNTS4 SVC_COUNTS6: HashMap<FrontendKey<A>, ServiceCounts> = 65_536, NO_PREALLOC, keep;
            /// The outcomes of each service port's connections to each backend.
            connects: CONNECTS4 CONNECTS6: HashMap<EndpointKey<A>, Connects> = 32_768, NO_PREALLOC, keep;
            /// The frontends dialled by UDP sockets.
            udp_sockets: UDP_SOCKETS4 UDP_SOCKETS6: LruHashMap<SocketKey<A>, Socket<A>> = 65_536, 0, none;
        }
    };
}
