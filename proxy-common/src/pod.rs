//! The promise to aya that these types may cross into the kernel byte by byte.

use aya::Pod;

use crate::addr::{Addr, Addr4, Addr6};
use crate::balance::{Affinity, AffinityKey};
use crate::connect::Connects;
use crate::cpu::Cpu;
use crate::device::{Device, Node, OwnAddr};
use crate::flow::{AnyKey, Flow, FlowKey, Offer};
use crate::fragment::{FragmentKey, Ports};
use crate::frontend::{
    Backend, Endpoint, EndpointKey, Frontend, FrontendKey, Maglev, Service, SetKey, SlotKey,
    SourceRange,
};
use crate::guest::Guest;
use crate::half_open::{PaddedEnds, Place};
use crate::monitor::Record;
use crate::policy::Decision;
use crate::service_counts::ServiceCounts;
use crate::socket::{Socket, SocketKey};
use crate::ways::Row;

/// Implements `Pod`, which asks for types without padding. Every type here is `repr(C)` or
/// transparent, `Copy`, and made of integers only. An assertion beside its definition says that its
/// size is the sum of its fields.
macro_rules! pod {
    ($($type:ty),* $(,)?) => {
        // SAFETY: see the macro's documentation; it is only ever applied to the types below.
        $(unsafe impl Pod for $type {})*
    };
}

pod!(
    Addr4,
    Addr6,
    AnyKey,
    Connects,
    Cpu,
    Device,
    Endpoint,
    Guest,
    Maglev,
    Node,
    Offer,
    OwnAddr,
    PaddedEnds,
    Ports,
    Row,
    Service,
    ServiceCounts
);

// SAFETY: as above; an `Addr` is one of the two instances, whose layouts are asserted with each
// type.
unsafe impl<A: Addr> Pod for FrontendKey<A> {}
// SAFETY: as above.
unsafe impl<A: Addr> Pod for Frontend<A> {}
// SAFETY: as above.
unsafe impl<A: Addr> Pod for SlotKey<A> {}
// SAFETY: as above.
unsafe impl<A: Addr> Pod for Backend<A> {}
// SAFETY: as above.
unsafe impl<A: Addr> Pod for FlowKey<A> {}
// SAFETY: as above.
unsafe impl<A: Addr> Pod for Flow<A> {}
// SAFETY: as above.
unsafe impl<A: Addr> Pod for Place<A> {}
// SAFETY: as above.
unsafe impl<A: Addr> Pod for EndpointKey<A> {}
// SAFETY: as above.
unsafe impl<A: Addr> Pod for SetKey<A> {}
// SAFETY: as above.
unsafe impl<A: Addr> Pod for SourceRange<A> {}
// SAFETY: as above.
unsafe impl<A: Addr> Pod for AffinityKey<A> {}
// SAFETY: as above.
unsafe impl<A: Addr> Pod for Affinity<A> {}
// SAFETY: as above.
unsafe impl<A: Addr> Pod for FragmentKey<A> {}
// SAFETY: as above.
unsafe impl<A: Addr> Pod for Decision<A> {}
// SAFETY: as above.
unsafe impl<A: Addr> Pod for Record<A> {}

// SAFETY: as above.
unsafe impl<A: Addr> Pod for SocketKey<A> {}
// SAFETY: as above.
unsafe impl<A: Addr> Pod for Socket<A> {}

/// A value out of its bytes; None if it is not as long as they are.
pub fn from_bytes<T: Pod>(bytes: &[u8]) -> Option<T> {
    // SAFETY: as long as it is, and any bits are a `Pod`.
    (bytes.len() == size_of::<T>()).then(|| unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}
