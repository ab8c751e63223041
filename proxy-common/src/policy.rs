//! Which set serves a client, and whether it is masqueraded: kube-proxy's rules as functions of
//! what a packet showed.

use crate::addr::{Addr, Addr4, Addr6, SockAddr};
use crate::assert_size;
use crate::closed::closed;
use crate::device::Node;
use crate::frontend::{Backend, FrontendKey, FrontendKind, Service, Set};

/// The place of a client.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Origin(u8);

impl Origin {
    /// Somewhere else: another node, or outside the cluster.
    pub const EXTERNAL: Self = Self(0);
    /// A pod of this node, by the operator's detection and by the device through which it came in.
    pub const DETECTED: Self = Self(1);
    /// Behind a pod's device of this node, with any address.
    pub const POD: Self = Self(2);
    /// The node itself.
    pub const NODE: Self = Self(3);
    /// A pod by its address, says the operator's detection; it came in from elsewhere, as pods of
    /// other nodes do.
    pub const ELSEWHERE: Self = Self(4);

    #[inline(always)]
    pub const fn is_external(self) -> bool {
        matches!(self.known(), Some(Client::External))
    }

    /// Returns true if the operator's detection calls the client a pod. kube-proxy goes by that
    /// alone when it masquerades.
    #[inline(always)]
    pub const fn is_detected(self) -> bool {
        match self.known() {
            Some(Client::Detected | Client::Elsewhere) => true,
            Some(Client::External | Client::Pod | Client::Node) | None => false,
        }
    }

    /// Returns true if the client came in from elsewhere. Its address does not count.
    #[inline(always)]
    pub const fn is_remote(self) -> bool {
        match self.known() {
            Some(Client::External | Client::Elsewhere) => true,
            Some(Client::Detected | Client::Pod | Client::Node) | None => false,
        }
    }

    #[inline(always)]
    pub const fn is_pod(self) -> bool {
        matches!(self.known(), Some(Client::Pod))
    }

    #[inline(always)]
    pub const fn is_node(self) -> bool {
        matches!(self.known(), Some(Client::Node))
    }
}

closed! {
    /// An [`Origin`], to match on.
    Origin => Client {
        EXTERNAL => External,
        DETECTED => Detected,
        POD => Pod,
        NODE => Node,
        ELSEWHERE => Elsewhere,
    }
}

/// The set that serves a client. Under `externalTrafficPolicy: Local` the node and its pods need no
/// local backend: nothing would be gained by refusing them.
///
/// An address makes no client this node's pod: a pod of another node asks that node's endpoints
/// (KEP-2086's e2e tests). So a stranger on an uplink never reaches the pods of a local redirect.
#[inline(always)]
pub const fn set(kind: FrontendKind, service: &Service, origin: Origin) -> Set {
    let local = if kind.is_external() {
        service.has(Service::EXTERNAL_LOCAL) && origin.is_remote()
    } else {
        service.has(Service::INTERNAL_LOCAL)
            || service.has(Service::REDIRECTED) && !origin.is_remote()
    };
    if local { Set::LOCAL } else { Set::CLUSTER }
}

/// Returns true if a client may reach this kind of frontend. Every client may, unless the operator
/// restricts ClusterIPs to the cluster (`--cluster-ip-external=false`).
#[inline(always)]
pub const fn is_open_to(kind: FrontendKind, origin: Origin, node: &Node) -> bool {
    kind.is_external()
        || !origin.is_external()
        || node.has(Node::CLUSTER_IP_EXTERNAL | Node::COMPAT)
}

/// Returns true if the backend must see the node instead of the client. Two cases are not asked
/// here. A client that is its own backend is always masqueraded, and the host's own packets may
/// need another address of the node.
///
/// `detects`: the node has a way to tell local pods of this family.
#[inline(always)]
pub fn is_masqueraded<A: Addr>(
    decision: &Decision<A>,
    service: &Service,
    node: &Node,
    detects: bool,
) -> bool {
    // Without the redirect the address saw the client.
    if service.has(Service::ELSE_PASSES) {
        return false;
    }
    let Decision { kind, origin, .. } = *decision;
    if !kind.is_external() && node.has(Node::MASQUERADE_ALL) {
        return true;
    }
    if !node.has(Node::COMPAT) {
        // kube-proxy lets a ClusterIP's backend see the node where a detector calls the client
        // external.
        if !kind.is_external() && detects && origin.is_external() {
            return true;
        }
        // Replies of a remote backend would go straight to a client that is not on this node, who
        // never heard of it. What is only detected, by its address, may be a pod of another node.
        return !origin.is_node() && !origin.is_pod() && !decision.backend.is_local();
    }
    if kind.is_external() {
        !service.has(Service::EXTERNAL_LOCAL) || origin.is_node()
    } else {
        detects && !origin.is_detected()
    }
}

/// The decision about the last packet that opened a flow, or tried to. The programs, `kpx trace`
/// and tests read it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision<A: Addr> {
    /// The row that matched.
    pub frontend: FrontendKey<A>,
    pub service: FrontendKey<A>,
    pub kind: FrontendKind,
    pub origin: Origin,
    pub set: Set,
    /// Which of these fields are of this packet, and more: see the constants.
    pub flags: u8,
    pub backend: Backend<A>,
}
assert_size!(Decision<Addr4> = 2 * 8 + 4 + 8);
assert_size!(Decision<Addr6> = 2 * 20 + 4 + 20);

impl<A: Addr> Decision<A> {
    /// A frontend was found: the fields above are of this packet.
    pub const FRONTEND: u8 = 1 << 0;
    /// A set was chosen.
    pub const SET: u8 = 1 << 1;
    /// A backend was chosen.
    pub const BACKEND: u8 = 1 << 2;
    /// It is the one that the client had before.
    pub const AFFINITY: u8 = 1 << 3;
    /// The backend sees the node instead of the client.
    pub const MASQUERADE: u8 = 1 << 4;
    /// The backend's open flows are counted.
    pub const COUNTED: u8 = 1 << 5;

    #[inline(always)]
    pub const fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Returns the address and port at which the backend listens.
    #[inline(always)]
    pub const fn backend_at(&self) -> SockAddr<A> {
        SockAddr::new(self.backend.addr, self.backend.port)
    }
}
