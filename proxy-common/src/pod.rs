//! Implementations of aya's `Pod`, which lets these types cross into the kernel as bytes.

use aya::Pod;

use crate::addr::{Addr, Addr4, Addr6};
use crate::balance::{Affinity, AffinityKey};
use crate::connect::Connects;
use crate::cpu::Cpu;
use crate::device::{Device, Node, OwnAddr};
use crate::flow::{AnyKey, Flow, FlowKey, Offer};
use crate::foreign_nat::ForeignNat;
use crate::fragment::{FragmentKey, Ports};
use crate::frontend::{
    Backend, Endpoint, EndpointKey, Frontend, FrontendKey, Maglev, Service, SetKey, SlotKey,
    SourceRange,
};
use crate::half_open::{PaddedEnds, Place};
use crate::monitor::Record;
use crate::peer::{Peer, PeerKey};
use crate::policy::Decision;
use crate::service_counts::ServiceCounts;
use crate::socket::{Socket, SocketKey};
use crate::ways::Row;

/// Implements `Pod`, which requires types without padding. Every type here is `repr(C)` or
/// transparent, `Copy`, and consists of integers. An assertion next to its definition ensures that
/// its size is the sum of its fields.
macro_rules! pod {
    ($($type:ty),* $(,)?) => {
        // SAFETY: see the macro's documentation; it is applied only to the types below.
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
    Peer,
    PeerKey,
    Endpoint,
    ForeignNat,
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

// SAFETY: as above; an `Addr` is one of two instances, and each type asserts both layouts.
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

/// Returns the value of these bytes. `None` if the length differs.
pub fn from_bytes<T: Pod>(bytes: &[u8]) -> Option<T> {
    // SAFETY: the length is checked, and any bits are a valid `Pod`.
    (bytes.len() == size_of::<T>()).then(|| unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}
