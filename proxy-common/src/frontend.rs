//! Where clients dial and where their packets go: the three maps that the agent fills.
//!
//! `FRONTENDS` leads from what a client dials to a service port, `SERVICES` says how many backends each of the service
//! port's sets has, `SLOTS` holds the backends. A service port is named by its ClusterIP frontend, so that further
//! frontends (NodePort, ExternalIP, LoadBalancer) share its backends without ids.

use crate::addr::{Addr, Addr4, Addr6, Port, Proto};
use crate::assert_size;

/// What a client dials: the key of `FRONTENDS`, and as the ClusterIP's, the name of a service port (key of `SERVICES`).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrontendKey<A: Addr> {
    pub addr: A,
    pub port: Port,
    pub proto: Proto,
    pad: u8,
}
assert_size!(FrontendKey<Addr4> = 4 + 2 + 1 + 1);
assert_size!(FrontendKey<Addr6> = 16 + 2 + 1 + 1);

impl<A: Addr> FrontendKey<A> {
    #[inline(always)]
    pub const fn new(addr: A, port: Port, proto: Proto) -> Self {
        Self { addr, port, proto, pad: 0 }
    }

    /// The row that says "this address is a ClusterIP", for packets to ports that it does not offer.
    #[inline(always)]
    pub const fn address(addr: A) -> Self {
        Self::new(addr, Port::ANY, Proto::ANY)
    }
}

impl<A: Addr> core::fmt::Debug for FrontendKey<A> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        if *self == Self::address(self.addr) {
            return write!(f, "{}", self.addr.ip());
        }
        let dialled = core::net::SocketAddr::new(self.addr.ip(), self.port.get());
        write!(f, "{dialled}/{}", self.proto)
    }
}

/// What kind of frontend a client dialled.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrontendKind(u8);

impl FrontendKind {
    /// A ClusterIP of which no port matched: see [`FrontendKey::address`].
    pub const ADDRESS: Self = Self(0);
    pub const CLUSTER_IP: Self = Self(1);
}

/// Value of `FRONTENDS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Frontend<A: Addr> {
    /// The service port whose backends serve this frontend.
    pub service: FrontendKey<A>,
    pub kind: FrontendKind,
    pad: [u8; 3],
}
assert_size!(Frontend<Addr4> = 8 + 1 + 3);
assert_size!(Frontend<Addr6> = 20 + 1 + 3);

impl<A: Addr> Frontend<A> {
    pub const fn new(service: FrontendKey<A>, kind: FrontendKind) -> Self {
        Self { service, kind, pad: [0; 3] }
    }
}

/// Which endpoints of a service port: all that the cluster offers, or only this node's.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Set(u8);

impl Set {
    pub const CLUSTER: Self = Self(0);
    pub const LOCAL: Self = Self(1);
    pub const ALL: [Self; 2] = [Self::CLUSTER, Self::LOCAL];
}

/// Value of `SERVICES`: how a service port chooses among its slots.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Service {
    /// Slots in [`Set::CLUSTER`].
    cluster: u16,
    /// Slots in [`Set::LOCAL`].
    local: u16,
    flags: u32,
}
assert_size!(Service = 2 + 2 + 4);

impl Service {
    /// `internalTrafficPolicy: Local`: the ClusterIP serves from [`Set::LOCAL`] only.
    pub const INTERNAL_LOCAL: u32 = 1 << 0;
    /// There are usable endpoints somewhere, so an empty set drops instead of rejecting.
    pub const HAS_ENDPOINTS: u32 = 1 << 1;

    pub const fn new(cluster: u16, local: u16, flags: u32) -> Self {
        Self { cluster, local, flags }
    }

    #[inline(always)]
    pub const fn count(&self, set: Set) -> u16 {
        if set.0 == Set::LOCAL.0 { self.local } else { self.cluster }
    }

    #[inline(always)]
    pub const fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    pub const fn flags(&self) -> u32 {
        self.flags
    }

    /// The set that serves clients of the ClusterIP.
    #[inline(always)]
    pub const fn internal_set(&self) -> Set {
        if self.has(Self::INTERNAL_LOCAL) { Set::LOCAL } else { Set::CLUSTER }
    }
}

/// Key of `SLOTS`: the `index`-th place, from 0, of a set of a service port.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotKey<A: Addr> {
    pub service: FrontendKey<A>,
    pub set: Set,
    pad: u8,
    pub index: u16,
}
assert_size!(SlotKey<Addr4> = 8 + 1 + 1 + 2);
assert_size!(SlotKey<Addr6> = 20 + 1 + 1 + 2);

impl<A: Addr> SlotKey<A> {
    #[inline(always)]
    pub const fn new(service: FrontendKey<A>, set: Set, index: u16) -> Self {
        Self { service, set, pad: 0, index }
    }
}

/// Value of `SLOTS`: address and port of an endpoint that may take traffic.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Backend<A: Addr> {
    pub addr: A,
    pub port: Port,
    flags: u16,
}
assert_size!(Backend<Addr4> = 4 + 2 + 2);
assert_size!(Backend<Addr6> = 16 + 2 + 2);

impl<A: Addr> Backend<A> {
    /// The endpoint is on this node: its replies come back here whatever their source address is.
    pub const LOCAL: u16 = 1 << 0;

    pub const fn new(addr: A, port: Port, flags: u16) -> Self {
        Self { addr, port, flags }
    }

    #[inline(always)]
    pub const fn is_local(&self) -> bool {
        self.flags & Self::LOCAL != 0
    }
}
