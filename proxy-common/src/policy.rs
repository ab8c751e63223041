//! kube-proxy's rules for one packet: the set that serves the client, and masquerading.

use crate::addr::{Addr, Addr4, Addr6, SockAddr};
use crate::assert_size;
use crate::closed::closed;
use crate::device::Node;
use crate::frontend::{Backend, FrontendKey, FrontendKind, Service, Set};

/// The location of a client.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Origin(pub u8);

impl Origin {
    /// Another node, or outside the cluster.
    pub const EXTERNAL: Self = Self(0);
    /// A pod of this node, by the operator's detection and the ingress device.
    pub const DETECTED: Self = Self(1);
    /// Behind a pod's device of this node, with any address.
    pub const POD: Self = Self(2);
    /// The node itself.
    pub const NODE: Self = Self(3);
    /// A pod by the operator's detection, but behind an uplink, like pods of other nodes.
    pub const ELSEWHERE: Self = Self(4);
    /// Outside the cluster, as [`Origin::EXTERNAL`]. Another node has handed the packet over, and
    /// this node has the backend.
    pub const HANDED_OVER: Self = Self(5);

    #[inline(always)]
    pub const fn is_external(self) -> bool {
        matches!(self.known(), Some(Client::External | Client::HandedOver))
    }

    /// Returns true if the operator's detection matches the client. kube-proxy decides by the
    /// detection alone whether to masquerade.
    #[inline(always)]
    pub const fn is_detected(self) -> bool {
        match self.known() {
            Some(Client::Detected | Client::Elsewhere) => true,
            Some(Client::External | Client::HandedOver | Client::Pod | Client::Node) | None => {
                false
            }
        }
    }

    /// Returns true if the client came from another host, whatever its address.
    #[inline(always)]
    pub const fn is_remote(self) -> bool {
        match self.known() {
            Some(Client::External | Client::Elsewhere | Client::HandedOver) => true,
            Some(Client::Detected | Client::Pod | Client::Node) | None => false,
        }
    }

    #[inline(always)]
    pub const fn is_pod(self) -> bool {
        matches!(self.known(), Some(Client::Pod))
    }

    #[inline(always)]
    pub const fn is_handed_over(self) -> bool {
        matches!(self.known(), Some(Client::HandedOver))
    }

    #[inline(always)]
    pub const fn is_node(self) -> bool {
        matches!(self.known(), Some(Client::Node))
    }
}

closed! {
    /// An [`Origin`], for `match`.
    Origin => Client {
        EXTERNAL => External,
        DETECTED => Detected,
        POD => Pod,
        NODE => Node,
        ELSEWHERE => Elsewhere,
        HANDED_OVER => HandedOver,
    }
}

/// Returns the set that serves a client. Under `externalTrafficPolicy: Local`, the node and its
/// pods may use remote backends, because a refusal would gain nothing.
///
/// An address alone does not make a client this node's pod: pods of another node use that node's
/// endpoints (KEP-2086's e2e tests). So spoofed packets from an uplink never reach the pods of a
/// local redirect.
#[inline(always)]
pub const fn set(kind: FrontendKind, service: &Service, origin: Origin) -> Set {
    let local = if kind.is_external() {
        service.has(Service::EXTERNAL_LOCAL) && origin.is_remote()
    } else {
        service.has(Service::INTERNAL_LOCAL)
            || service.has(Service::REDIRECTED) && !origin.is_remote()
    };
    if local {
        Set::LOCAL
    } else if kind.is_external() && service.has(Service::HANDS_OVER) && origin.is_external() {
        Set::DIRECT
    } else {
        Set::CLUSTER
    }
}

/// Returns true if a client may reach this kind of frontend. The operator may restrict ClusterIPs
/// to the cluster (`--cluster-ip-external=false`).
#[inline(always)]
pub const fn is_open_to(kind: FrontendKind, origin: Origin, node: &Node) -> bool {
    kind.is_external()
        || !origin.is_external()
        || node.has(Node::CLUSTER_IP_EXTERNAL | Node::COMPAT)
}

/// Returns true if the node's address must replace the client's as source. The caller handles two
/// further cases: hairpins are always masqueraded, and the host's own packets may need another
/// address of the node.
///
/// `detects` is set if the node can detect local pods of this family.
#[inline(always)]
pub fn is_masqueraded<A: Addr>(
    decision: &Decision<A>,
    service: &Service,
    node: &Node,
    detects: bool,
) -> bool {
    // Without the redirect, the dialled address would receive the client's own address.
    if service.has(Service::ELSE_PASSES) {
        return false;
    }
    let Decision { kind, origin, .. } = *decision;
    if !kind.is_external() && node.has(Node::MASQUERADE_ALL) {
        return true;
    }
    if !node.has(Node::COMPAT) {
        // kube-proxy masquerades a ClusterIP's clients that its detector classifies as external.
        if !kind.is_external() && detects && origin.is_external() {
            return true;
        }
        // A remote backend's replies would go directly to a client that is not on this node, past
        // the translation. A client detected only by its address may be another node's pod.
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
    /// The matching row.
    pub frontend: FrontendKey<A>,
    pub service: FrontendKey<A>,
    pub kind: FrontendKind,
    pub origin: Origin,
    pub set: Set,
    /// Marks the valid fields, and more: see the constants.
    pub flags: u8,
    pub backend: Backend<A>,
}
assert_size!(Decision<Addr4> = 2 * 8 + 4 + 8);
assert_size!(Decision<Addr6> = 2 * 20 + 4 + 20);

impl<A: Addr> Decision<A> {
    /// The frontend's fields are valid.
    pub const FRONTEND: u8 = 1 << 0;
    /// The set is valid.
    pub const SET: u8 = 1 << 1;
    /// The backend is valid.
    pub const BACKEND: u8 = 1 << 2;
    /// Session affinity chose the backend.
    pub const AFFINITY: u8 = 1 << 3;
    /// The node's address replaces the client's as source.
    pub const MASQUERADE: u8 = 1 << 4;
    /// The backend's open flows are counted.
    pub const COUNTED: u8 = 1 << 5;

    #[inline(always)]
    pub const fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    #[inline(always)]
    pub const fn backend_at(&self) -> SockAddr<A> {
        SockAddr::new(self.backend.addr, self.backend.port)
    }
}
