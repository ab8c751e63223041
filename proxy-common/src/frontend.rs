//! From the address that a client dials to a backend: the maps that the agent fills.
//!
//! `FRONTENDS` leads from what a client dials to a service port. `SERVICES` says how many backends
//! each of the service port's sets has, and `SLOTS` holds the backends. A service port is named by
//! its ClusterIP frontend, so that its other frontends (NodePort, ExternalIP, LoadBalancer) share
//! its backends without ids.
//!
//! Three more maps have rows only for service ports that need them: `ENDPOINTS` says of a
//! remembered backend whether it still serves. `MAGLEV` is a consistent hash table over a set's
//! slots, and has the shares of backends that differ in weight. `SOURCE_RANGES` names the clients
//! that may dial a LoadBalancer address.

use crate::addr::{Addr, Addr4, Addr6, Port, Proto, SockAddr};
use crate::assert_size;
use crate::closed::closed;

mod backend;
mod namespace;

pub use backend::Backend;
pub use namespace::Namespace;

/// The address, port and protocol that a client dials: the key of `FRONTENDS`. The ClusterIP's is
/// the name of a service port (key of `SERVICES`).
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
        Self {
            addr,
            port,
            proto,
            pad: 0,
        }
    }

    /// The row that says "this address is a ClusterIP", for packets to ports that it does not
    /// offer.
    #[inline(always)]
    pub const fn address(addr: A) -> Self {
        Self::new(addr, Port::ANY, Proto::ANY)
    }

    /// The row of a node port, at whichever of the node's addresses it is dialled.
    #[inline(always)]
    pub const fn node_port(port: Port, proto: Proto) -> Self {
        Self::new(A::UNSPECIFIED, port, proto)
    }

    /// Returns the address and port in the form of the standard library, for userspace.
    pub fn socket_addr(&self) -> core::net::SocketAddr {
        core::net::SocketAddr::new(self.addr.ip(), self.port.get())
    }
}

impl<A: Addr> core::fmt::Debug for FrontendKey<A> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        if *self == Self::address(self.addr) {
            return write!(f, "{}", self.addr.ip());
        }
        if self.addr.is_unspecified() {
            return write!(f, "{} *:{}/{}", A::FAMILY, self.port.get(), self.proto);
        }
        write!(f, "{}/{}", self.socket_addr(), self.proto)
    }
}

/// The kind of a frontend.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrontendKind(u8);

impl FrontendKind {
    /// A ClusterIP without a matching port: see [`FrontendKey::address`].
    pub const ADDRESS: Self = Self(0);
    pub const CLUSTER_IP: Self = Self(1);
    /// At any address that the node takes node ports at: see [`FrontendKey::node_port`].
    pub const NODE_PORT: Self = Self(2);
    pub const EXTERNAL_IP: Self = Self(3);
    pub const LOAD_BALANCER: Self = Self(4);

    /// Returns true if it is subject to `externalTrafficPolicy`. A kind of a later version is taken
    /// for such a one.
    #[inline(always)]
    pub const fn is_external(self) -> bool {
        match self.known() {
            Some(Dialled::NodePort | Dialled::ExternalIp | Dialled::LoadBalancer) | None => true,
            Some(Dialled::Address | Dialled::ClusterIp) => false,
        }
    }
}

closed! {
    /// A [`FrontendKind`], to match on.
    FrontendKind => Dialled {
        ADDRESS => Address,
        CLUSTER_IP => ClusterIp,
        NODE_PORT => NodePort,
        EXTERNAL_IP => ExternalIp,
        LOAD_BALANCER => LoadBalancer,
    }
}

/// Value of `FRONTENDS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Frontend<A: Addr> {
    /// The service port whose backends serve this frontend.
    pub service: FrontendKey<A>,
    pub kind: FrontendKind,
    /// The Service's namespace. Rows of older agents have none.
    pub namespace: Namespace,
}
assert_size!(Frontend<Addr4> = 8 + 1 + 3);
assert_size!(Frontend<Addr6> = 20 + 1 + 3);

impl<A: Addr> Frontend<A> {
    pub const fn new(service: FrontendKey<A>, kind: FrontendKind) -> Self {
        Self {
            service,
            kind,
            namespace: Namespace::NONE,
        }
    }

    /// Returns the same row of a Service in a namespace.
    #[must_use]
    pub const fn in_namespace(self, namespace: Namespace) -> Self {
        Self { namespace, ..self }
    }
}

/// The endpoints of a service port: all that the cluster offers, or only this node's.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Set(u8);

impl Set {
    pub const CLUSTER: Self = Self(0);
    pub const LOCAL: Self = Self(1);
    pub const ALL: [Self; 2] = [Self::CLUSTER, Self::LOCAL];
}

closed! {
    /// A [`Set`], to match on.
    Set => Endpoints { CLUSTER => Cluster, LOCAL => Local }
}

/// The way in which a service port spreads new flows over a set.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Algorithm(pub u8);

impl Algorithm {
    pub const RANDOM: Self = Self(0);
    /// By the client's address and port, through [`Maglev`]: every node answers alike.
    pub const MAGLEV: Self = Self(1);
    pub const ROUND_ROBIN: Self = Self(2);
    /// The one with fewer open flows of two at random. Counts are this node's own.
    pub const LEAST_CONNECTIONS: Self = Self(3);
}

closed! {
    /// An [`Algorithm`], to match on.
    Algorithm => Choice {
        RANDOM => Random,
        MAGLEV => Maglev,
        ROUND_ROBIN => RoundRobin,
        LEAST_CONNECTIONS => LeastConnections,
    }
}

/// Value of `SERVICES`: how a service port chooses among its slots.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Service {
    /// Slots in [`Set::CLUSTER`].
    cluster: u16,
    /// Slots in [`Set::LOCAL`].
    local: u16,
    flags: u16,
    pub algorithm: Algorithm,
    pad: u8,
    /// `sessionAffinity: ClientIP`: for how many seconds without a new flow a client keeps its
    /// backend. 0: not at all.
    pub affinity_secs: u32,
}
assert_size!(Service = 2 + 2 + 2 + 1 + 1 + 4);

impl Service {
    /// `internalTrafficPolicy: Local`: the ClusterIP serves from [`Set::LOCAL`] only.
    pub const INTERNAL_LOCAL: u16 = 1 << 0;
    /// There are usable endpoints somewhere, so an empty set drops instead of rejecting.
    pub const HAS_ENDPOINTS: u16 = 1 << 1;
    /// `externalTrafficPolicy: Local`: the other frontends serve clients outside from
    /// [`Set::LOCAL`] only.
    pub const EXTERNAL_LOCAL: u16 = 1 << 2;
    /// LoadBalancer frontends serve only clients in `SOURCE_RANGES`.
    pub const SOURCE_RANGES: u16 = 1 << 3;
    /// The ClusterIP serves clients on this node from [`Set::LOCAL`], which has pods of a local
    /// redirect.
    pub const REDIRECTED: u16 = 1 << 4;
    /// With `REDIRECTED`: a pod with the row [`EndpointKey::spared`] is served from
    /// [`Set::CLUSTER`].
    pub const SPARES_PODS: u16 = 1 << 5;
    /// With `REDIRECTED`: the node itself is served from [`Set::CLUSTER`].
    pub const SPARES_NODE: u16 = 1 << 6;
    /// Backends differ in weight: under every algorithm the slots are taken from the places of
    /// [`Maglev`].
    pub const WEIGHTED: u16 = 1 << 7;
    /// A TCP flow whose backend is silent goes to another one, when its client's SYN comes again:
    /// each set that serves has several.
    pub const FAILS_OVER: u16 = 1 << 8;
    /// TCP flows to lost nodes are ended, so that no socket may be led past the programs.
    pub const ENDS_LOST: u16 = 1 << 9;
    /// Clients that the chosen set does not serve go on to the dialled address, which is no
    /// Service's.
    pub const ELSE_PASSES: u16 = 1 << 10;

    pub const fn new(cluster: u16, local: u16, flags: u16) -> Self {
        Self {
            cluster,
            local,
            flags,
            algorithm: Algorithm::RANDOM,
            pad: 0,
            affinity_secs: 0,
        }
    }

    #[must_use]
    pub const fn with_algorithm(self, algorithm: Algorithm) -> Self {
        Self { algorithm, ..self }
    }

    #[must_use]
    pub const fn with_affinity(self, affinity_secs: u32) -> Self {
        Self {
            affinity_secs,
            ..self
        }
    }

    #[inline(always)]
    pub const fn count(&self, set: Set) -> u16 {
        match set.known() {
            Some(Endpoints::Local) => self.local,
            Some(Endpoints::Cluster) | None => self.cluster,
        }
    }

    #[inline(always)]
    pub const fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    pub const fn flags(&self) -> u16 {
        self.flags
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
        Self {
            service,
            set,
            pad: 0,
            index,
        }
    }
}

/// Key of `ENDPOINTS`: an endpoint of a service port that serves, be it ready or terminating. There
/// are rows for UDP ports, whose flows do not stay with a backend that has left, and for those with
/// session affinity. A local redirect adds rows of its own: see [`EndpointKey::spared`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointKey<A: Addr> {
    pub service: FrontendKey<A>,
    pub at: SockAddr<A>,
}
assert_size!(EndpointKey<Addr4> = 8 + 8);
assert_size!(EndpointKey<Addr6> = 20 + 20);

impl<A: Addr> EndpointKey<A> {
    #[inline(always)]
    pub const fn new(service: FrontendKey<A>, at: SockAddr<A>) -> Self {
        let at = SockAddr::new(at.addr, at.port);
        Self { service, at }
    }

    /// The row of a pod that answers in a local redirect, and is to reach the service's own
    /// endpoints: see [`Service::SPARES_PODS`]. No endpoint listens at port 0.
    #[inline(always)]
    pub const fn spared(service: FrontendKey<A>, pod: A) -> Self {
        Self::new(service, SockAddr::new(pod, Port::ANY))
    }
}

/// Value of `ENDPOINTS`: a set of bits.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Endpoint(u32);

impl Endpoint {
    /// In [`Set::CLUSTER`], so that its clients may stay with it.
    pub const IN_CLUSTER_SET: u32 = 1 << 0;
    /// In [`Set::LOCAL`].
    pub const IN_LOCAL_SET: u32 = 1 << 1;
    /// On this node: see [`Backend::LOCAL`].
    pub const LOCAL: u32 = 1 << 2;

    pub const fn new(flags: u32) -> Self {
        Self(flags)
    }

    #[inline(always)]
    pub const fn is_in(self, set: Set) -> bool {
        let flag = match set.known() {
            Some(Endpoints::Local) => Self::IN_LOCAL_SET,
            Some(Endpoints::Cluster) | None => Self::IN_CLUSTER_SET,
        };
        self.0 & flag != 0
    }

    #[inline(always)]
    pub const fn is_local(self) -> bool {
        self.0 & Self::LOCAL != 0
    }
}

/// A set of a service port: key of `MAGLEV` and of `CURSORS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SetKey<A: Addr> {
    pub service: FrontendKey<A>,
    pub set: Set,
    pad: [u8; 3],
}
assert_size!(SetKey<Addr4> = 8 + 1 + 3);
assert_size!(SetKey<Addr6> = 20 + 1 + 3);

impl<A: Addr> SetKey<A> {
    #[inline(always)]
    pub const fn new(service: FrontendKey<A>, set: Set) -> Self {
        Self {
            service,
            set,
            pad: [0; 3],
        }
    }
}

/// Places in a [`Maglev`] table: a prime, as the algorithm asks. At 40 backends shares differ by
/// one in a hundred.
pub const MAGLEV_PLACES: usize = 4_093;

/// Value of `MAGLEV`: for each place the index of a slot (Eisenbud et al., "Maglev", NSDI 2016,
/// section 3.4). A slot has places in proportion to its backend's weight.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Maglev {
    pub slots: [u16; MAGLEV_PLACES],
    pad: u16,
}
assert_size!(Maglev = 2 * 4_093 + 2);

impl Maglev {
    pub const fn new(slots: [u16; MAGLEV_PLACES]) -> Self {
        Self { slots, pad: 0 }
    }
}

/// Key of `SOURCE_RANGES`, behind its prefix length in bits: the service port's and as many of the
/// address as the range has.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceRange<A: Addr> {
    pub service: FrontendKey<A>,
    pub addr: A,
}
assert_size!(SourceRange<Addr4> = 8 + 4);
assert_size!(SourceRange<Addr6> = 20 + 16);

impl<A: Addr> SourceRange<A> {
    /// Bits of the service port in the prefix.
    pub const SERVICE_BITS: u32 = size_of::<FrontendKey<A>>() as u32 * 8;

    #[inline(always)]
    pub const fn new(service: FrontendKey<A>, addr: A) -> Self {
        Self { service, addr }
    }
}

/// Values of `SERVICE_CIDRS`.
pub mod service_net {
    /// A range from which ClusterIPs are taken: what is in it and no frontend is dropped.
    pub const RANGE: u32 = 1;
    /// The ClusterIP of a Service that another proxy serves: packets to it are left alone.
    pub const OF_OTHER_PROXY: u32 = 2;
    /// A network in a range that has pods, or to which the node has a route: what is in it and no
    /// frontend is left alone.
    pub const SHARED: u32 = 3;
}
