//! All maps, and the only code that accesses them. Values are copied out: references leave this
//! module only to the node's settings and to this CPU's memory.
//!
//! Most look-ups of the slow path call a function: for each inlined look-up the kernel moves all
//! instructions behind it, which took a third of the load time of the slow path. See [`Find`].

use aya_ebpf::bindings::BPF_NOEXIST;
use core::mem::offset_of;

use aya_ebpf::macros::map;
use aya_ebpf::maps::lpm_trie::Key;
use aya_ebpf::maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, ProgramArray, RingBuf};
use aya_ebpf::programs::TcContext;
use proxy_common::addr::{Addr, Addr4, Addr6, Proto, SockAddr};
use proxy_common::balance::{Affinity, AffinityKey};
use proxy_common::connect::Connects;
use proxy_common::counter::Counter;
use proxy_common::cpu::Cpu;
use proxy_common::device::{Device, Node, OwnAddr, pod_net};
use proxy_common::flow::{Flow, FlowKey};
use proxy_common::foreign_nat::ForeignNat;
use proxy_common::fragment::{FragmentKey, Ports};
use proxy_common::frontend::{
    Backend, Endpoint, EndpointKey, Frontend, FrontendKey, Maglev, Service, SetKey, SlotKey,
    SourceRange, service_net,
};
use proxy_common::half_open::{CLASSES, PaddedEnds, Place, RINGS_MAX, all_places};
use proxy_common::hook::SlowProgram;
use proxy_common::maps::{FLOWS, NO_PREALLOC};
use proxy_common::policy::Decision;
use proxy_common::service_counts::ServiceCounts;
use proxy_common::socket::{Socket, SocketKey};
use proxy_macros::global_fn;

use crate::skb::Skb;

mod answers;
mod clock;
mod connects;
mod devices;
mod ends;
mod exits;
mod flows;
mod foreign_nat;
mod fragments;
mod half_open;
mod handed_over;
mod liberal;
mod live;
mod memory;
mod monitor;
mod peers;
mod senders;
mod services;
mod shares;
mod sockets;

pub use answers::{SenderKind, may_answer};
pub use clock::{about_now_secs, in_this_tick};
pub use connects::{note_answer, note_connection, note_outcome, waited};
pub use devices::{address_of, device, is_stacked, mac_of, mtu_of, place_of, tunnel};
pub use ends::Marked;
pub use exits::{epoch, exit, keep_exit, opens_until};
pub use flows::{
    Entry, Refused, claim_flow, flow, is_flow, is_undnat, live_flow, live_flow_here, opener,
    opener_of, remove_flow, undnat, undnat_of,
};
pub use foreign_nat::{foreign_nat, remove_foreign_nat, set_foreign_nat};
pub use fragments::{forget_fragment, fragment_ports, remember_fragment};
pub use half_open::{dequeue, enqueue, free_place, is_full, set_place};
pub use handed_over::{handed_over_to, note_handed_over};
pub use liberal::{liberal_since, offer};
use live::{Find, Live};
pub use memory::{Closing, DecisionMemory, Eviction, Memory, Scratch, again, closing, eviction};
use memory::{Room, Rooms};
pub use monitor::{is_watched, monitor};
pub use peers::peer;
pub use senders::{Moment, is_sender, keep_sender};
pub use services::{service_closed, service_opened, service_refused};
pub use shares::share;
pub use sockets::{
    CONNECTING, DIALLED4, DIALLED6, forget_socket, is_served_pod, remember_socket, socket,
};

const DEVICES_MAX: u32 = 65_536;

/// The maps of an address family.
pub trait Maps: Addr {
    const MAPS: &'static FamilyMaps<Self>;

    /// Returns this family's part of a CPU's memory.
    fn room(rooms: *mut Rooms) -> *mut Room<Self>;
}

macro_rules! maps {
    ($($(#[$doc:meta])* $field:ident: $v4:ident $v6:ident: $map:ident<$($part:ty),+> = $size:expr, $flags:expr, $how:ident;)+) => {
        /// The maps that exist once per family.
        pub struct FamilyMaps<A: Addr + 'static> {
            $($field: &'static $map<$($part),+>,)+
        }

        mod v4 {
            use super::*;

            type A = Addr4;
            $(
                #[map]
                static $v4: $map<$($part),+> = $map::with_max_entries($size, $flags);
            )+
            impl Maps for A {
                const MAPS: &'static FamilyMaps<Self> = &FamilyMaps { $($field: &$v4),+ };

                #[inline(always)]
                fn room(rooms: *mut Rooms) -> *mut Room<Self> {
                    rooms.wrapping_byte_add(offset_of!(Rooms, v4)).cast()
                }
            }
        }

        mod v6 {
            use super::*;

            type A = Addr6;
            $(
                #[map]
                static $v6: $map<$($part),+> = $map::with_max_entries($size, $flags);
            )+
            impl Maps for A {
                const MAPS: &'static FamilyMaps<Self> = &FamilyMaps { $($field: &$v6),+ };

                #[inline(always)]
                fn room(rooms: *mut Rooms) -> *mut Room<Self> {
                    rooms.wrapping_byte_add(offset_of!(Rooms, v6)).cast()
                }
            }
        }
    };
}
proxy_common::family_maps!(maps);

#[map]
static SLOW: ProgramArray = ProgramArray::with_max_entries(SlowProgram::ALL.len() as u32, 0);

#[map]
static DEVICES: HashMap<u32, Device> = HashMap::with_max_entries(DEVICES_MAX, NO_PREALLOC);
#[map]
static NODE: Array<Node> = Array::with_max_entries(1, 0);
#[map]
static GENERATION: Array<u32> = Array::with_max_entries(1, 0);
/// The counters, followed by this CPU's numbers of answers in the current second: Linux allows a
/// program 64 maps.
#[map]
static COUNTERS: PerCpuArray<u64> =
    PerCpuArray::with_max_entries(Counter::COUNT + SenderKind::COUNT, 0);

#[map]
static CPUS: PerCpuArray<Cpu> = PerCpuArray::with_max_entries(1, 0);

/// In bytes: the records of a few CPUs in one second. Readers consume records as they arrive.
const RING_LEN: u32 = 1 << 20;

#[map]
static MONITOR: RingBuf = RingBuf::with_byte_size(RING_LEN, 0);
#[map]
static WATCHED: Array<u32> = Array::with_max_entries(1, 0);

/// Ends this program, and starts a program of the slow path on the packet. Returns if the array
/// lacks the program.
#[inline(always)]
pub fn call_slow(skb: Skb, slow: SlowProgram) {
    // SAFETY: the caller has nothing left to do, and the hook's memory is no longer lent.
    unsafe { SLOW.tail_call(&TcContext::new(skb.as_ptr()), slow.index()) }
}

#[inline(always)]
pub fn frontend<A: Maps>(key: &FrontendKey<A>) -> Option<Frontend<A>> {
    copied_here(A::MAPS.frontends, key)
}

#[inline(always)]
pub fn has_frontend<A: Maps>(key: &FrontendKey<A>) -> bool {
    A::MAPS.frontends.find(key).is_some()
}

#[inline(always)]
pub fn service<A: Maps>(key: &FrontendKey<A>) -> Option<Service> {
    copied_here(A::MAPS.services, key)
}

#[inline(always)]
pub fn slot<A: Maps>(key: &SlotKey<A>) -> Option<Backend<A>> {
    copied(A::MAPS.slots, key)
}

/// Returns the row of `addr`, if the address is the node's own.
#[inline(always)]
pub fn own_addr<A: Maps>(addr: &A) -> Option<OwnAddr> {
    copied(A::MAPS.addrs, addr)
}

/// The same, looked up inline: see [`Find::find_here`].
#[inline(always)]
pub fn own_addr_here<A: Maps>(addr: &A) -> Option<OwnAddr> {
    copied_here(A::MAPS.addrs, addr)
}

/// Returns true if the configuration declares the address a local pod's.
#[inline(always)]
pub fn is_pod<A: Maps>(addr: A) -> bool {
    pod_net(addr) & pod_net::DETECTED != 0
}

/// Returns the bits of the network that contains an address: see [`pod_net`]. A separate function,
/// so that its key leaves the stack afterwards.
#[inline(never)]
pub fn pod_net<A: Maps>(addr: A) -> u32 {
    A::MAPS
        .pods
        .get(Key::new(addr_bits::<A>(), addr))
        .copied()
        .unwrap_or(0)
}

#[inline(always)]
pub fn is_in_service_cidr<A: Maps>(addr: A) -> bool {
    // The longest prefix counts: kpx does not drop packets to another proxy's address within a
    // range.
    A::MAPS
        .service_cidrs
        .get(Key::new(addr_bits::<A>(), addr))
        .is_some_and(|net| *net == service_net::RANGE)
}

#[inline(always)]
pub fn is_in_source_range<A: Maps>(service: &FrontendKey<A>, addr: A) -> bool {
    let prefix_len = SourceRange::<A>::SERVICE_BITS + addr_bits::<A>();
    A::MAPS
        .source_ranges
        .get(Key::new(prefix_len, SourceRange::new(*service, addr)))
        .is_some()
}

#[inline(always)]
const fn addr_bits<A>() -> u32 {
    size_of::<A>() as u32 * 8
}

/// Returns the endpoint of a service port that listens at `at`, if it serves.
#[inline(always)]
pub fn endpoint<A: Maps>(service: FrontendKey<A>, at: SockAddr<A>) -> Option<Endpoint> {
    copied_here(A::MAPS.endpoints, &EndpointKey::new(service, at))
}

/// Returns true if the service's local redirect excludes this pod's own packets.
#[inline(always)]
pub fn is_spared<A: Maps>(service: FrontendKey<A>, pod: A) -> bool {
    copied_here(A::MAPS.endpoints, &EndpointKey::spared(service, pod)).is_some()
}

/// Returns the slot at a place of a set's Maglev table.
#[inline(always)]
pub fn maglev_slot<A: Maps>(set: &SetKey<A>, place: usize) -> Option<u32> {
    // Read again, for a comparison of 64 bits: old kernels derive no 64-bit bound from a comparison
    // of 32 bits.
    let place = again(&place);
    // Read in place: the table has 8 KiB.
    A::MAPS
        .maglev
        .find(set)?
        .read(|table| table.slots.get(place).copied())
        .map(u32::from)
}

/// Returns the client's last backend, whether its address was proven or not.
#[inline(always)]
pub fn affinity<A: Maps>(key: &AffinityKey<A>) -> Option<Affinity<A>> {
    copied_here(A::MAPS.affinity, key).or_else(|| copied_here(A::MAPS.new_affinity, key))
}

#[inline(always)]
pub fn set_affinity<A: Maps>(key: &AffinityKey<A>, affinity: &Affinity<A>) {
    // If the insert fails, the client may get another backend next time.
    let _set = A::MAPS.affinity.insert(key, affinity, 0);
}

/// Stores the backend of a client whose address may be spoofed. If the address was proven before,
/// updates the existing row instead.
#[inline(always)]
pub fn set_new_affinity<A: Maps>(key: &AffinityKey<A>, affinity: &Affinity<A>) {
    match A::MAPS.affinity.find_here(key) {
        Some(shown) => shown.set(*affinity),
        // If the insert fails, the client may get another backend next time.
        None => drop(A::MAPS.new_affinity.insert(key, affinity, 0)),
    }
}

/// Advances a set's round-robin counter, and returns the previous value.
#[inline(always)]
pub fn next_turn<A: Maps>(set: &SetKey<A>) -> u32 {
    let Some(cursor) = A::MAPS.cursors.find_here(set) else {
        let _first = A::MAPS.cursors.insert(set, 1, u64::from(BPF_NOEXIST));
        return 0;
    };
    // Two CPUs may take the same turn, which evens out.
    cursor.update(|turn| turn.wrapping_add(1))
}

/// Returns the number of open flows of a backend whose flows are counted.
#[inline(always)]
pub fn connections<A: Maps>(backend: SockAddr<A>, proto: Proto) -> u32 {
    copied(
        A::MAPS.connections,
        &FrontendKey::new(backend.addr, backend.port, proto),
    )
    .unwrap_or(0)
}

#[inline(always)]
pub fn connection_opened<A: Maps>(backend: SockAddr<A>, proto: Proto) {
    let key = FrontendKey::new(backend.addr, backend.port, proto);
    match A::MAPS.connections.find(&key) {
        // Not atomic: if two CPUs race, the count is off by one until the agent recounts.
        Some(count) => {
            count.update(|count| count.wrapping_add(1));
        }
        None => {
            // The same if the insert fails or another CPU is first.
            let _first = A::MAPS.connections.insert(key, 1, u64::from(BPF_NOEXIST));
        }
    }
}

#[inline(always)]
pub fn connection_closed<A: Maps>(backend: SockAddr<A>, proto: Proto) {
    let key = FrontendKey::new(backend.addr, backend.port, proto);
    if let Some(count) = A::MAPS.connections.find(&key) {
        count.update(|count| count.saturating_sub(1));
    }
}

/// Returns a number that changes whenever an endpoint stops serving.
#[inline(always)]
pub fn generation() -> u32 {
    GENERATION.get(0).copied().unwrap_or(0)
}

/// Returns the node's settings in place: array elements keep their key, and a mix of old and new
/// fields is harmless.
#[inline(never)]
pub fn node() -> Option<&'static Node> {
    NODE.get(0)
}

/// Adds 1 to a counter of this CPU.
///
/// Socket programs count as well, in process context. If a packet's program interrupts the update,
/// one of the two counts is lost.
#[inline(always)]
pub fn count(counter: impl Into<Counter>) {
    count_at(counter.into().index());
}

#[global_fn(kpx_count)]
fn count_at(index: u32) {
    if let Some(value) = COUNTERS.find_here(&index) {
        value.update(|count| count.wrapping_add(1));
    }
}

/// Returns a copy of a value. The agent or another CPU may replace the value at the same time, and
/// any mix of old and new is good for one packet. (Since Linux 6.1 the kernel may even give the
/// element to another key, if the agent's next write is on the CPU where this program was just
/// preempted. See "A race in the kernel" in docs/limits.md.)
#[inline(always)]
fn copied<K, V: Copy>(map: &impl Find<K, V>, key: &K) -> Option<V> {
    map.find(key).map(|value| value.copy())
}

/// The same, looked up inline: see [`Find::find_here`].
#[inline(always)]
fn copied_here<K, V: Copy>(map: &impl Find<K, V>, key: &K) -> Option<V> {
    map.find_here(key).map(|value| value.copy())
}
