//! Every map, and the only code that touches one. Values are copied out: no reference into a map leaves this file.

use aya_ebpf::bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST};
use aya_ebpf::macros::map;
use aya_ebpf::maps::{Array, HashMap, PerCpuArray};
use proxy_common::addr::{Addr, Addr4, Addr6, Proto};
use proxy_common::counter::Counter;
use proxy_common::device::{Device, Node};
use proxy_common::flow::{Flow, FlowKey, Seen};
use proxy_common::frontend::{Backend, Frontend, FrontendKey, Service, SlotKey};

use crate::net::Net;

// Sizes are defaults: the agent may set others before it loads the object.
const FRONTENDS: u32 = 65_536;
const SLOTS: u32 = 262_144;
const FLOWS: u32 = 262_144;
const ADDRS: u32 = 65_536;
const DEVICES_MAX: u32 = 65_536;

#[map]
static FRONTENDS4: HashMap<FrontendKey<Addr4>, Frontend<Addr4>> =
    HashMap::with_max_entries(FRONTENDS, BPF_F_NO_PREALLOC);
#[map]
static FRONTENDS6: HashMap<FrontendKey<Addr6>, Frontend<Addr6>> =
    HashMap::with_max_entries(FRONTENDS, BPF_F_NO_PREALLOC);

#[map]
static SERVICES4: HashMap<FrontendKey<Addr4>, Service> = HashMap::with_max_entries(FRONTENDS, BPF_F_NO_PREALLOC);
#[map]
static SERVICES6: HashMap<FrontendKey<Addr6>, Service> = HashMap::with_max_entries(FRONTENDS, BPF_F_NO_PREALLOC);

#[map]
static SLOTS4: HashMap<SlotKey<Addr4>, Backend<Addr4>> = HashMap::with_max_entries(SLOTS, BPF_F_NO_PREALLOC);
#[map]
static SLOTS6: HashMap<SlotKey<Addr6>, Backend<Addr6>> = HashMap::with_max_entries(SLOTS, BPF_F_NO_PREALLOC);

// Preallocated and never LRU: what is established must not be evicted, and opening a flow must not allocate.
#[map]
static FLOWS4: HashMap<FlowKey<Addr4>, Flow<Addr4>> = HashMap::with_max_entries(FLOWS, 0);
#[map]
static FLOWS6: HashMap<FlowKey<Addr6>, Flow<Addr6>> = HashMap::with_max_entries(FLOWS, 0);

/// The node's own addresses, each with the index of the device that carries it.
#[map]
static ADDRS4: HashMap<Addr4, u32> = HashMap::with_max_entries(ADDRS, BPF_F_NO_PREALLOC);
#[map]
static ADDRS6: HashMap<Addr6, u32> = HashMap::with_max_entries(ADDRS, BPF_F_NO_PREALLOC);

#[map]
static DEVICES: HashMap<u32, Device> = HashMap::with_max_entries(DEVICES_MAX, BPF_F_NO_PREALLOC);
#[map]
static NODE: Array<Node> = Array::with_max_entries(1, 0);
#[map]
static SCRATCH4: PerCpuArray<Flow<Addr4>> = PerCpuArray::with_max_entries(2, 0);
#[map]
static SCRATCH6: PerCpuArray<Flow<Addr6>> = PerCpuArray::with_max_entries(2, 0);
#[map]
static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(Counter::COUNT, 0);

/// The maps of a family.
pub trait Maps: Addr {
    fn frontends() -> &'static HashMap<FrontendKey<Self>, Frontend<Self>>;
    fn services() -> &'static HashMap<FrontendKey<Self>, Service>;
    fn slots() -> &'static HashMap<SlotKey<Self>, Backend<Self>>;
    fn flows() -> &'static HashMap<FlowKey<Self>, Flow<Self>>;
    fn addrs() -> &'static HashMap<Self, u32>;
    fn scratches() -> &'static PerCpuArray<Flow<Self>>;
}

macro_rules! maps {
    ($addr:ty: $frontends:ident $services:ident $slots:ident $flows:ident $addrs:ident $scratches:ident) => {
        impl Maps for $addr {
            #[inline(always)]
            fn frontends() -> &'static HashMap<FrontendKey<Self>, Frontend<Self>> {
                &$frontends
            }
            #[inline(always)]
            fn services() -> &'static HashMap<FrontendKey<Self>, Service> {
                &$services
            }
            #[inline(always)]
            fn slots() -> &'static HashMap<SlotKey<Self>, Backend<Self>> {
                &$slots
            }
            #[inline(always)]
            fn flows() -> &'static HashMap<FlowKey<Self>, Flow<Self>> {
                &$flows
            }
            #[inline(always)]
            fn addrs() -> &'static HashMap<Self, u32> {
                &$addrs
            }
            #[inline(always)]
            fn scratches() -> &'static PerCpuArray<Flow<Self>> {
                &$scratches
            }
        }
    };
}
maps!(Addr4: FRONTENDS4 SERVICES4 SLOTS4 FLOWS4 ADDRS4 SCRATCH4);
maps!(Addr6: FRONTENDS6 SERVICES6 SLOTS6 FLOWS6 ADDRS6 SCRATCH6);

#[inline(always)]
pub fn frontend<A: Net>(key: &FrontendKey<A>) -> Option<Frontend<A>> {
    copied(A::frontends(), key)
}

#[inline(always)]
pub fn service<A: Net>(key: &FrontendKey<A>) -> Option<Service> {
    copied(A::services(), key)
}

#[inline(always)]
pub fn slot<A: Net>(key: &SlotKey<A>) -> Option<Backend<A>> {
    copied(A::slots(), key)
}

/// The device that carries `addr`, if it is the node's own.
#[inline(always)]
pub fn addr_ifindex<A: Net>(addr: &A) -> Option<u32> {
    copied(A::addrs(), addr)
}

#[inline(always)]
pub fn device(ifindex: u32) -> Option<Device> {
    copied(&DEVICES, &ifindex)
}

#[inline(always)]
pub fn node() -> Option<Node> {
    NODE.get(0).copied()
}

/// Adds one to a counter.
#[inline(always)]
pub fn count(counter: impl Into<Counter>) {
    if let Some(value) = COUNTERS.get_ptr_mut(counter.into().index()) {
        // SAFETY: the slot is this CPU's own, and no other program runs on it before this one ends.
        unsafe { *value += 1 };
    }
}

/// Why an entry could not be made.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// Its key is taken.
    Taken,
    Full,
}

/// Makes an entry, unless its key is taken.
#[inline(always)]
pub fn claim_flow<A: Net>(key: &FlowKey<A>, flow: &Flow<A>) -> Result<(), Refused> {
    const EEXIST: i32 = -17;
    A::flows().insert(key, flow, u64::from(BPF_NOEXIST)).map_err(|error| match error {
        EEXIST => Refused::Taken,
        _ => Refused::Full,
    })
}

#[inline(always)]
pub fn remove_flow<A: Net>(key: &FlowKey<A>) {
    // Already gone is as good.
    let _gone = A::flows().remove(key);
}

/// An entry of the flow table: the way to read and write the little that changes while it lives.
pub struct Entry<A: Addr>(*mut Flow<A>);

/// The entry at `key`, its value copied to `flow`.
///
/// The kernel may give a deleted element to another key while we read it, so a value that does not belong to its key
/// counts as none.
#[inline(always)]
pub fn flow<A: Net>(key: &FlowKey<A>, flow: &mut Flow<A>) -> Option<Entry<A>> {
    let live = A::flows().get_ptr_mut(key)?;
    // SAFETY: map memory outlives the program. The copy may be torn, which the comparison below catches.
    *flow = unsafe { *live };
    (flow.key(key.proto()) == *key).then_some(Entry(live))
}

/// The opener's entry of `flow`.
#[inline(always)]
pub fn opener<A: Net>(flow: &Flow<A>, proto: Proto) -> Option<Entry<A>> {
    A::flows().get_ptr_mut(flow.opener_key(proto)).map(Entry)
}

/// The entry that gives replies of `flow` their frontend's address back.
#[inline(always)]
pub fn undnat<A: Net>(flow: &Flow<A>, proto: Proto) -> Option<Entry<A>> {
    A::flows().get_ptr_mut(flow.undnat_key(proto)).map(Entry)
}

impl<A: Net> Entry<A> {
    #[inline(always)]
    pub fn tx(&self) -> Seen {
        // SAFETY: as in `flow`; a byte is never torn.
        unsafe { (*self.0).tx }
    }

    // If the element changes hands while it is written, its new owner is a flow of the same second whose end is noticed
    // early or late once: the timeouts below bound what that can cost.

    #[inline(always)]
    pub fn set_last_secs(&self, last_secs: u32) {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).last_secs = last_secs };
    }

    #[inline(always)]
    pub fn set_tx(&self, tx: Seen) {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).tx = tx };
    }

    #[inline(always)]
    pub fn set_rx(&self, rx: Seen) {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).rx = rx };
    }
}

/// Room for the flow of the packet at hand (place 0), and for another one (place 1): those of IPv6 would not fit the
/// stack beside their keys.
#[inline(always)]
pub fn scratch<A: Net>(place: u32) -> Option<&'static mut Flow<A>> {
    let flow = A::scratches().get_ptr_mut(place)?;
    // SAFETY: the room is this CPU's own, our programs never nest (a redirected packet meets the next hook after we
    // returned), and each program asks once for each place.
    Some(unsafe { &mut *flow })
}

#[inline(always)]
fn copied<K, V: Copy>(map: &HashMap<K, V>, key: &K) -> Option<V> {
    // SAFETY: map memory outlives the program. The value may be replaced by a newer one while we copy it, and every
    // value here is good for one packet whichever half is new. (Since Linux 6.1 the element may even be given to another
    // key meanwhile, if the agent's next write is on the CPU that this program was just taken off: see ARCHITECTURE.md.)
    unsafe { map.get(key) }.copied()
}
