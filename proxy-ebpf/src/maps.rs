//! Every map, and the only code that touches one. Values are copied out: no reference into a map leaves this file.

use aya_ebpf::bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST};
use aya_ebpf::macros::map;
use aya_ebpf::maps::lpm_trie::Key;
use aya_ebpf::maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, Queue, RingBuf};
use proxy_common::addr::{Addr, Addr4, Addr6, Proto, SockAddr};
use proxy_common::balance::{Affinity, AffinityKey};
use proxy_common::counter::Counter;
use proxy_common::device::{Device, Node, OwnAddr, pod_net};
use proxy_common::flow::{Flow, FlowKey};
use proxy_common::fragment::{FragmentKey, Ports};
use proxy_common::frontend::{
    Backend, Endpoint, EndpointKey, Frontend, FrontendKey, Maglev, Service, SetKey, SlotKey, SourceRange, service_net,
};
use proxy_common::guest::Guest;
use proxy_common::monitor::Monitored;
use proxy_common::policy::Decision;
use proxy_common::service_counts::ServiceCounts;
use proxy_common::socket::{Socket, SocketKey};

use crate::net::Net;

mod answers;
mod clock;
mod devices;
mod flows;
mod fragments;
mod guests;
mod live;
mod memory;
mod monitor;
mod services;
mod sockets;

pub use answers::{Asker, may_answer};
pub use clock::{Clock, in_this_tick};
pub use devices::{device, is_stacked, mac_of, mtu_of, place_of};
#[cfg(feature = "bench")]
pub use flows::other_end;
pub use flows::{
    Entry, Refused, claim_flow, enlist, flow, is_flow, live_flow, next_in_line, opener, remove_flow, undnat,
};
pub use fragments::{forget_fragment, fragment_ports, remember_fragment};
pub use guests::{guest, remove_guest, set_guest};
use live::{Find, Live};
pub use memory::{DecisionMemory, Eviction, Memory, Scratch, eviction};
pub use monitor::{is_watched, monitor};
pub use services::{service_closed, service_opened, service_refused};
pub use sockets::{forget_socket, remember_socket, socket};

// Sizes are defaults: the agent may set others before it loads the object.
const FRONTENDS: u32 = 65_536;
const SLOTS: u32 = 262_144;
const SOURCE_RANGES: u32 = 65_536;
const FLOWS: u32 = 262_144;
const NURSERY: u32 = FLOWS / Flow::<Addr4>::ENTRIES_MAX;
const GUESTS: u32 = 32_768;
const CLIENTS: u32 = 65_536;
const BACKENDS: u32 = 65_536;
const SOCKETS: u32 = 65_536;
const FRAGMENTED: u32 = 16_384;
const ADDRS: u32 = 65_536;
const NETS: u32 = 1_024;
/// The ranges of ClusterIPs, and those ClusterIPs in them that other proxies serve.
const SERVICE_NETS: u32 = 65_536;
const DEVICES_MAX: u32 = 65_536;

/// The maps of a family.
pub trait Maps: Addr {
    const MAPS: &'static FamilyMaps<Self>;
}

/// The maps that exist once per family.
pub struct FamilyMaps<A: Addr + 'static> {
    frontends: &'static HashMap<FrontendKey<A>, Frontend<A>>,
    services: &'static HashMap<FrontendKey<A>, Service>,
    slots: &'static HashMap<SlotKey<A>, Backend<A>>,
    endpoints: &'static HashMap<EndpointKey<A>, Endpoint>,
    maglev: &'static HashMap<SetKey<A>, Maglev>,
    source_ranges: &'static LpmTrie<SourceRange<A>, u32>,
    flows: &'static HashMap<FlowKey<A>, Flow<A>>,
    guests: &'static LruHashMap<FlowKey<A>, Guest>,
    nursery: &'static Queue<FlowKey<A>>,
    affinity: &'static LruHashMap<AffinityKey<A>, Affinity<A>>,
    cursors: &'static LruHashMap<SetKey<A>, u32>,
    connections: &'static LruHashMap<FrontendKey<A>, u32>,
    fragments: &'static LruHashMap<FragmentKey<A>, Ports>,
    addrs: &'static HashMap<A, OwnAddr>,
    pods: &'static LpmTrie<A, u32>,
    service_cidrs: &'static LpmTrie<A, u32>,
    scratches: &'static PerCpuArray<Scratch<A>>,
    evictions: &'static PerCpuArray<Eviction<A>>,
    decisions: &'static PerCpuArray<Decision<A>>,
    service_counts: &'static HashMap<FrontendKey<A>, ServiceCounts>,
    tcp_sockets: &'static LruHashMap<SocketKey<A>, Socket<A>>,
    udp_sockets: &'static LruHashMap<SocketKey<A>, Socket<A>>,
}

/// Flows are preallocated and never LRU: what is established must not be evicted, and opening a flow must not allocate.
/// What is LRU may be forgotten: it costs a client its backend, a fragment, an even share.
macro_rules! maps {
    ($addr:ty: $frontends:ident $services:ident $slots:ident $endpoints:ident $maglev:ident $source_ranges:ident
     $flows:ident $guests:ident $nursery:ident $affinity:ident $cursors:ident $connections:ident $fragments:ident
     $addrs:ident $pods:ident $service_cidrs:ident $scratches:ident $evictions:ident $decisions:ident $service_counts:ident
     $tcp_sockets:ident $udp_sockets:ident) => {
        #[map]
        static $frontends: HashMap<FrontendKey<$addr>, Frontend<$addr>> =
            HashMap::with_max_entries(FRONTENDS, BPF_F_NO_PREALLOC);
        #[map]
        static $services: HashMap<FrontendKey<$addr>, Service> =
            HashMap::with_max_entries(FRONTENDS, BPF_F_NO_PREALLOC);
        #[map]
        static $slots: HashMap<SlotKey<$addr>, Backend<$addr>> = HashMap::with_max_entries(SLOTS, BPF_F_NO_PREALLOC);
        #[map]
        static $endpoints: HashMap<EndpointKey<$addr>, Endpoint> = HashMap::with_max_entries(SLOTS, BPF_F_NO_PREALLOC);
        #[map]
        static $maglev: HashMap<SetKey<$addr>, Maglev> = HashMap::with_max_entries(FRONTENDS, BPF_F_NO_PREALLOC);
        #[map]
        static $source_ranges: LpmTrie<SourceRange<$addr>, u32> =
            LpmTrie::with_max_entries(SOURCE_RANGES, BPF_F_NO_PREALLOC);
        #[map]
        static $flows: HashMap<FlowKey<$addr>, Flow<$addr>> = HashMap::with_max_entries(FLOWS, 0);
        #[map]
        static $guests: LruHashMap<FlowKey<$addr>, Guest> = LruHashMap::with_max_entries(GUESTS, 0);
        #[map]
        static $nursery: Queue<FlowKey<$addr>> = Queue::with_max_entries(NURSERY, 0);
        #[map]
        static $affinity: LruHashMap<AffinityKey<$addr>, Affinity<$addr>> = LruHashMap::with_max_entries(CLIENTS, 0);
        #[map]
        static $cursors: LruHashMap<SetKey<$addr>, u32> = LruHashMap::with_max_entries(FRONTENDS, 0);
        #[map]
        static $connections: LruHashMap<FrontendKey<$addr>, u32> = LruHashMap::with_max_entries(BACKENDS, 0);
        #[map]
        static $fragments: LruHashMap<FragmentKey<$addr>, Ports> = LruHashMap::with_max_entries(FRAGMENTED, 0);
        #[map]
        static $addrs: HashMap<$addr, OwnAddr> = HashMap::with_max_entries(ADDRS, BPF_F_NO_PREALLOC);
        #[map]
        static $pods: LpmTrie<$addr, u32> = LpmTrie::with_max_entries(NETS, BPF_F_NO_PREALLOC);
        #[map]
        static $service_cidrs: LpmTrie<$addr, u32> = LpmTrie::with_max_entries(SERVICE_NETS, BPF_F_NO_PREALLOC);
        #[map]
        static $scratches: PerCpuArray<Scratch<$addr>> = PerCpuArray::with_max_entries(1, 0);
        #[map]
        static $evictions: PerCpuArray<Eviction<$addr>> = PerCpuArray::with_max_entries(1, 0);
        #[map]
        static $decisions: PerCpuArray<Decision<$addr>> = PerCpuArray::with_max_entries(1, 0);
        #[map]
        static $service_counts: HashMap<FrontendKey<$addr>, ServiceCounts> =
            HashMap::with_max_entries(FRONTENDS, BPF_F_NO_PREALLOC);
        #[map]
        static $tcp_sockets: LruHashMap<SocketKey<$addr>, Socket<$addr>> = LruHashMap::with_max_entries(SOCKETS, 0);
        #[map]
        static $udp_sockets: LruHashMap<SocketKey<$addr>, Socket<$addr>> = LruHashMap::with_max_entries(SOCKETS, 0);

        impl Maps for $addr {
            const MAPS: &'static FamilyMaps<Self> = &FamilyMaps {
                frontends: &$frontends,
                services: &$services,
                slots: &$slots,
                endpoints: &$endpoints,
                maglev: &$maglev,
                source_ranges: &$source_ranges,
                flows: &$flows,
                guests: &$guests,
                nursery: &$nursery,
                affinity: &$affinity,
                cursors: &$cursors,
                connections: &$connections,
                fragments: &$fragments,
                addrs: &$addrs,
                pods: &$pods,
                service_cidrs: &$service_cidrs,
                scratches: &$scratches,
                evictions: &$evictions,
                decisions: &$decisions,
                service_counts: &$service_counts,
                tcp_sockets: &$tcp_sockets,
                udp_sockets: &$udp_sockets,
            };
        }
    };
}
maps!(Addr4: FRONTENDS4 SERVICES4 SLOTS4 ENDPOINTS4 MAGLEV4 SOURCE_RANGES4 FLOWS4 GUESTS4 NURSERY4 AFFINITY4 CURSORS4 CONNECTIONS4
    FRAGMENTS4 ADDRS4 PODS4 SERVICE_CIDRS4 SCRATCH4 EVICTION4 DECISIONS4 SVC_COUNTS4 TCP_SOCKETS4
    UDP_SOCKETS4);
maps!(Addr6: FRONTENDS6 SERVICES6 SLOTS6 ENDPOINTS6 MAGLEV6 SOURCE_RANGES6 FLOWS6 GUESTS6 NURSERY6 AFFINITY6 CURSORS6 CONNECTIONS6
    FRAGMENTS6 ADDRS6 PODS6 SERVICE_CIDRS6 SCRATCH6 EVICTION6 DECISIONS6 SVC_COUNTS6 TCP_SOCKETS6
    UDP_SOCKETS6);

#[map]
static DEVICES: HashMap<u32, Device> = HashMap::with_max_entries(DEVICES_MAX, BPF_F_NO_PREALLOC);
#[map]
static NODE: Array<Node> = Array::with_max_entries(1, 0);
#[map]
static GENERATION: Array<u32> = Array::with_max_entries(1, 0);
#[map]
static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(Counter::COUNT, 0);

/// Answers of each CPU in a second: the second in the upper half.
#[map]
static ANSWERED: PerCpuArray<u64> = PerCpuArray::with_max_entries(Asker::COUNT, 0);

#[map]
static CLOCK: PerCpuArray<Clock> = PerCpuArray::with_max_entries(1, 0);

/// Room for a second's records of a few CPUs: who watches reads as they come.
const RING_LEN: u32 = 1 << 20;

#[map]
static MONITOR: RingBuf = RingBuf::with_byte_size(RING_LEN, 0);
#[map]
static WATCHED: Array<u32> = Array::with_max_entries(1, 0);
#[map]
static MONITORED: PerCpuArray<Monitored> = PerCpuArray::with_max_entries(1, 0);

#[inline(always)]
pub fn frontend<A: Net>(key: &FrontendKey<A>) -> Option<Frontend<A>> {
    copied(A::MAPS.frontends, key)
}

#[inline(always)]
pub fn has_frontend<A: Net>(key: &FrontendKey<A>) -> bool {
    A::MAPS.frontends.get_ptr(key).is_some()
}

#[inline(always)]
pub fn service<A: Net>(key: &FrontendKey<A>) -> Option<Service> {
    copied(A::MAPS.services, key)
}

#[inline(always)]
pub fn slot<A: Net>(key: &SlotKey<A>) -> Option<Backend<A>> {
    copied(A::MAPS.slots, key)
}

/// What is known of `addr`, if it is the node's own.
#[inline(always)]
pub fn own_addr<A: Net>(addr: &A) -> Option<OwnAddr> {
    copied(A::MAPS.addrs, addr)
}

/// Does the operator call this address a local pod's?
#[inline(always)]
pub fn is_pod<A: Net>(addr: A) -> bool {
    pod_net(addr) & pod_net::DETECTED != 0
}

/// What is known of the network that an address lies in: see [`pod_net`]. A function of its own, for its key's place on the
/// stack.
#[inline(never)]
pub fn pod_net<A: Net>(addr: A) -> u32 {
    A::MAPS.pods.get(Key::new(addr_bits::<A>(), addr)).copied().unwrap_or(0)
}

#[inline(always)]
pub fn is_in_service_cidr<A: Net>(addr: A) -> bool {
    // The longest prefix counts: another proxy's address within a range is not ours to drop.
    A::MAPS.service_cidrs.get(Key::new(addr_bits::<A>(), addr)).is_some_and(|net| *net == service_net::RANGE)
}

#[inline(always)]
pub fn is_in_source_range<A: Net>(service: &FrontendKey<A>, addr: A) -> bool {
    let prefix_len = SourceRange::<A>::SERVICE_BITS + addr_bits::<A>();
    A::MAPS.source_ranges.get(Key::new(prefix_len, SourceRange::new(*service, addr))).is_some()
}

#[inline(always)]
const fn addr_bits<A>() -> u32 {
    size_of::<A>() as u32 * 8
}

/// The endpoint of a service port that listens at `at`, if it serves.
#[inline(always)]
pub fn endpoint<A: Net>(service: FrontendKey<A>, at: SockAddr<A>) -> Option<Endpoint> {
    copied(A::MAPS.endpoints, &EndpointKey::new(service, at))
}

/// What stands at a place of a set's Maglev table.
#[inline(always)]
pub fn maglev_slot<A: Net>(set: &SetKey<A>, place: usize) -> Option<u32> {
    // Not copied: it is 8 KiB.
    A::MAPS.maglev.find(set)?.read(|table| table.slots.get(place).copied()).map(u32::from)
}

#[inline(always)]
pub fn affinity<A: Net>(key: &AffinityKey<A>) -> Option<Affinity<A>> {
    copied(A::MAPS.affinity, key)
}

#[inline(always)]
pub fn set_affinity<A: Net>(key: &AffinityKey<A>, affinity: &Affinity<A>) {
    // Refused, it costs the client its backend the next time.
    let _set = A::MAPS.affinity.insert(key, affinity, 0);
}

/// How many flows a set has opened in turn, before this one.
#[inline(always)]
pub fn next_turn<A: Net>(set: &SetKey<A>) -> u32 {
    let Some(cursor) = A::MAPS.cursors.find(set) else {
        let _first = A::MAPS.cursors.insert(set, 1, u64::from(BPF_NOEXIST));
        return 0;
    };
    // Two CPUs may take the same turn, which evens out.
    cursor.update(|turn| turn.wrapping_add(1))
}

/// How many flows are open to a backend whose flows are counted.
#[inline(always)]
pub fn connections<A: Net>(backend: SockAddr<A>, proto: Proto) -> u32 {
    copied(A::MAPS.connections, &FrontendKey::new(backend.addr, backend.port, proto)).unwrap_or(0)
}

#[inline(always)]
pub fn connection_opened<A: Net>(backend: SockAddr<A>, proto: Proto) {
    let key = FrontendKey::new(backend.addr, backend.port, proto);
    match A::MAPS.connections.find(&key) {
        // Not atomic: if two CPUs meet, the count is one off until the agent counts again.
        Some(count) => {
            count.update(|count| count.wrapping_add(1));
        }
        None => {
            // Refused or beaten, the same.
            let _first = A::MAPS.connections.insert(key, 1, u64::from(BPF_NOEXIST));
        }
    }
}

#[inline(always)]
pub fn connection_closed<A: Net>(backend: SockAddr<A>, proto: Proto) {
    let key = FrontendKey::new(backend.addr, backend.port, proto);
    if let Some(count) = A::MAPS.connections.find(&key) {
        count.update(|count| count.saturating_sub(1));
    }
}

/// Changes whenever an endpoint has ceased to serve.
#[inline(always)]
pub fn generation() -> u32 {
    GENERATION.get(0).copied().unwrap_or(0)
}

/// An element of an array is never given to another key, and half of an old one is as good as the other.
#[inline(always)]
pub fn node() -> Option<&'static Node> {
    NODE.get(0)
}

/// Adds one to a counter of this CPU.
///
/// Programs of sockets count as well, in the context of a process: if a packet's program comes between read and write, one
/// of the two counts is lost.
#[inline(always)]
pub fn count(counter: impl Into<Counter>) {
    if let Some(value) = COUNTERS.find(&counter.into().index()) {
        value.update(|count| count.wrapping_add(1));
    }
}

/// A copy of a value. The agent or another CPU may replace the value meanwhile, and every value here is good for one packet
/// whichever half of it is new. (Since Linux 6.1 the kernel may even give the element to another key, if the agent's next
/// write is on the CPU that this program was just taken off: see ARCHITECTURE.md.)
#[inline(always)]
fn copied<K, V: Copy>(map: &impl Find<K, V>, key: &K) -> Option<V> {
    map.find(key).map(|value| value.copy())
}
