//! The agent's maps from a dialled address to a backend.
//!
//! `FRONTENDS` maps a dialled address to a service port. `SERVICES` holds the number of backends in
//! each set of a service port, and `SLOTS` the backends. A service port is named by its ClusterIP
//! frontend, so its other frontends (NodePort, ExternalIP, LoadBalancer) share its backends without
//! ids.
//!
//! Three more maps have rows only where needed. `ENDPOINTS` holds the endpoints that still serve.
//! `MAGLEV` is a consistent hash table over a set's slots, which also holds the shares of weighted
//! backends. `SOURCE_RANGES` holds the clients allowed to dial LoadBalancer addresses.

use crate::addr::{Addr, Addr4, Addr6, Port, Proto, SockAddr};
use crate::assert_size;
use crate::closed::closed;

mod backend;
mod namespace;

pub use backend::Backend;
pub use namespace::Namespace;

/// A dialled address, port and protocol: the key of `FRONTENDS`. The ClusterIP's key names a
/// service port (key of `SERVICES`).
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

    /// The whole-address row, which marks a ClusterIP and serves packets to unknown ports.
    #[inline(always)]
    pub const fn address(addr: A) -> Self {
        Self::new(addr, Port::ANY, Proto::ANY)
    }

    /// The row of a node port, at any of the node's addresses.
    #[inline(always)]
    pub const fn node_port(port: Port, proto: Proto) -> Self {
        Self::new(A::UNSPECIFIED, port, proto)
    }

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

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrontendKind(u8);

impl FrontendKind {
    /// A port that the ClusterIP does not have: see [`FrontendKey::address`].
    pub const ADDRESS: Self = Self(0);
    pub const CLUSTER_IP: Self = Self(1);
    /// At any node port address of the node: see [`FrontendKey::node_port`].
    pub const NODE_PORT: Self = Self(2);
    pub const EXTERNAL_IP: Self = Self(3);
    pub const LOAD_BALANCER: Self = Self(4);

    /// Returns true if `externalTrafficPolicy` applies. Unknown kinds of later versions count as
    /// external.
    #[inline(always)]
    pub const fn is_external(self) -> bool {
        match self.known() {
            Some(Dialled::NodePort | Dialled::ExternalIp | Dialled::LoadBalancer) | None => true,
            Some(Dialled::Address | Dialled::ClusterIp) => false,
        }
    }
}

closed! {
    /// A [`FrontendKind`], for `match`.
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
    /// The service port that serves this frontend.
    pub service: FrontendKey<A>,
    pub kind: FrontendKind,
    /// The Service's namespace. `NONE` in rows of older agents.
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

    #[must_use]
    pub const fn in_namespace(self, namespace: Namespace) -> Self {
        Self { namespace, ..self }
    }
}

/// A set of endpoints: the cluster's or this node's, or the set that all nodes agree on.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Set(pub u8);

impl Set {
    pub const CLUSTER: Self = Self(0);
    pub const LOCAL: Self = Self(1);
    /// Under [`Service::HANDS_OVER`]: the ready endpoints of the cluster, the same and in the same
    /// order on every node. Always with a [`Maglev`] table.
    pub const DIRECT: Self = Self(2);
    /// The slot `i` has the address that packets to backend `i` of [`Set::DIRECT`] are handed over
    /// to, for a backend with [`Backend::TUNNELLED`].
    pub const NODES: Self = Self(3);
    /// The sets whose slots a [`Service`] row counts.
    pub const ALL: [Self; 2] = [Self::CLUSTER, Self::LOCAL];
}

closed! {
    /// A [`Set`], for `match`.
    Set => Endpoints { CLUSTER => Cluster, LOCAL => Local, DIRECT => Direct, NODES => Nodes }
}

/// The load balancing algorithm of a service port.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Algorithm(pub u8);

impl Algorithm {
    pub const RANDOM: Self = Self(0);
    /// By the client's address and port, through [`Maglev`]: the same on every node.
    pub const MAGLEV: Self = Self(1);
    pub const ROUND_ROBIN: Self = Self(2);
    /// The backend with fewer open flows on this node, out of two random backends.
    pub const LEAST_CONNECTIONS: Self = Self(3);
}

closed! {
    /// An [`Algorithm`], for `match`.
    Algorithm => Choice {
        RANDOM => Random,
        MAGLEV => Maglev,
        ROUND_ROBIN => RoundRobin,
        LEAST_CONNECTIONS => LeastConnections,
    }
}

/// Value of `SERVICES`: the slots of a service port, and the choice among them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Service {
    /// The number of slots in [`Set::CLUSTER`].
    cluster: u16,
    /// The number of slots in [`Set::LOCAL`].
    local: u16,
    flags: u16,
    pub algorithm: Algorithm,
    pad: u8,
    /// `sessionAffinity: ClientIP`: the seconds after its last new flow for which a client keeps
    /// its backend. 0 disables affinity.
    pub affinity_secs: u32,
}
assert_size!(Service = 2 + 2 + 2 + 1 + 1 + 4);

impl Service {
    /// `internalTrafficPolicy: Local`: the ClusterIP uses [`Set::LOCAL`] only.
    pub const INTERNAL_LOCAL: u16 = 1 << 0;
    /// The cluster has usable endpoints, so the programs drop packets to an empty set instead of
    /// rejecting them.
    pub const HAS_ENDPOINTS: u16 = 1 << 1;
    /// `externalTrafficPolicy: Local`: the other frontends use [`Set::LOCAL`] for clients outside.
    pub const EXTERNAL_LOCAL: u16 = 1 << 2;
    /// LoadBalancer frontends serve clients in `SOURCE_RANGES` only.
    pub const SOURCE_RANGES: u16 = 1 << 3;
    /// The ClusterIP serves this node's clients from [`Set::LOCAL`], which holds a local redirect's
    /// pods.
    pub const REDIRECTED: u16 = 1 << 4;
    /// With `REDIRECTED`: [`Set::CLUSTER`] serves pods with a row [`EndpointKey::spared`].
    pub const SPARES_PODS: u16 = 1 << 5;
    /// With `REDIRECTED`: [`Set::CLUSTER`] serves the node itself.
    pub const SPARES_NODE: u16 = 1 << 6;
    /// Backends differ in weight, so every algorithm chooses slots through [`Maglev`] entries.
    pub const WEIGHTED: u16 = 1 << 7;
    /// A TCP flow leaves an unresponsive backend when its client retransmits the SYN. Each serving
    /// set has several backends.
    pub const FAILS_OVER: u16 = 1 << 8;
    /// TCP flows to lost nodes are reset, so socket load balancing must not bypass the programs.
    pub const ENDS_LOST: u16 = 1 << 9;
    /// Packets of clients that the set does not serve pass to the dialled address, which no Service
    /// has.
    pub const ELSE_PASSES: u16 = 1 << 10;
    /// `--external-forwarding dsr`: external frontends serve clients outside from [`Set::DIRECT`],
    /// and the client's packets go to the backend's node unchanged.
    pub const HANDS_OVER: u16 = 1 << 11;

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

    #[must_use]
    pub const fn with(self, flags: u16) -> Self {
        Self {
            flags: self.flags | flags,
            ..self
        }
    }

    #[inline(always)]
    pub const fn count(&self, set: Set) -> u16 {
        match set.known() {
            Some(Endpoints::Local) => self.local,
            Some(Endpoints::Cluster | Endpoints::Direct | Endpoints::Nodes) | None => self.cluster,
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

/// Key of `SLOTS`: the slot `index`, from 0, in a set of a service port.
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

/// Key of `ENDPOINTS`: a serving endpoint of a service port, ready or terminating. Rows exist for
/// UDP ports, whose flows leave a removed backend, and for ports with session affinity. A local
/// redirect adds rows for its pods: see [`EndpointKey::spared`].
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

    /// The row of a local redirect's pod, whose own packets go to the Service's endpoints: see
    /// [`Service::SPARES_PODS`]. Port 0, which no endpoint uses.
    #[inline(always)]
    pub const fn spared(service: FrontendKey<A>, pod: A) -> Self {
        Self::new(service, SockAddr::new(pod, Port::ANY))
    }
}

/// Value of `ENDPOINTS`: flags.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Endpoint(u32);

impl Endpoint {
    /// The endpoint is in [`Set::CLUSTER`], so clients of this set may keep it.
    pub const IN_CLUSTER_SET: u32 = 1 << 0;
    /// The endpoint is in [`Set::LOCAL`].
    pub const IN_LOCAL_SET: u32 = 1 << 1;
    /// The endpoint is on this node: see [`Backend::LOCAL`].
    pub const LOCAL: u32 = 1 << 2;

    pub const fn new(flags: u32) -> Self {
        Self(flags)
    }

    #[inline(always)]
    pub const fn is_in(self, set: Set) -> bool {
        let flag = match set.known() {
            Some(Endpoints::Local) => Self::IN_LOCAL_SET,
            Some(Endpoints::Cluster | Endpoints::Direct | Endpoints::Nodes) | None => {
                Self::IN_CLUSTER_SET
            }
        };
        self.0 & flag != 0
    }

    #[inline(always)]
    pub const fn is_local(self) -> bool {
        self.0 & Self::LOCAL != 0
    }
}

/// Key of `MAGLEV` and `CURSORS`: a set of a service port.
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

/// The entries of a [`Maglev`] table: a prime, as the algorithm requires. With 40 backends, shares
/// differ by one percent.
pub const MAGLEV_PLACES: usize = 4_093;

/// Value of `MAGLEV`: the slot index of each entry (Eisenbud et al., "Maglev", NSDI 2016, section
/// 3.4). A slot has entries in proportion to its backend's weight.
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

/// Key of `SOURCE_RANGES`, after its prefix length in bits: the service port's bits plus the
/// range's.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceRange<A: Addr> {
    pub service: FrontendKey<A>,
    pub addr: A,
}
assert_size!(SourceRange<Addr4> = 8 + 4);
assert_size!(SourceRange<Addr6> = 20 + 16);

impl<A: Addr> SourceRange<A> {
    /// The bits of the service port in the prefix.
    pub const SERVICE_BITS: u32 = size_of::<FrontendKey<A>>() as u32 * 8;

    #[inline(always)]
    pub const fn new(service: FrontendKey<A>, addr: A) -> Self {
        Self { service, addr }
    }
}

/// Values of `SERVICE_CIDRS`.
pub mod service_net {
    /// A ClusterIP range. Packets to other addresses in it are dropped.
    pub const RANGE: u32 = 1;
    /// A ClusterIP that another proxy serves. Packets to it pass.
    pub const OF_OTHER_PROXY: u32 = 2;
    /// A network in a range that has pods or a route. Packets to other addresses in it pass.
    pub const SHARED: u32 = 3;
}
