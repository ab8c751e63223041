//! The client of a call.

use proxy_common::addr::{Addr4, Addr6};
use proxy_common::device::Node;
use proxy_common::policy::Origin;
use proxy_common::socket::{Dialled, EVERYWHERE};

use super::peer::{self, Peer, flags};
use crate::maps;
use crate::net::Net;

/// The socket of a call.
#[derive(Clone, Copy)]
pub struct Client {
    pub cookie: u64,
    /// The cookie of its network namespace.
    pub netns: u64,
    pub origin: Origin,
}

impl Client {
    /// Returns None if the socket is not served here.
    #[inline(always)]
    pub fn of(peer: Peer, node: &Node) -> Option<Self> {
        let netns = peer.netns();
        let origin = if netns == peer::own_netns() {
            Origin::NODE
        } else if flags() & EVERYWHERE == 0 || node.has(Node::COMPAT | Node::MASQUERADE_ALL) {
            // Addresses tell the clients to masquerade, and a socket may not have one yet.
            return None;
        } else {
            Origin::POD
        };
        Some(Self { cookie: peer.cookie(), netns, origin })
    }

    /// Returns true if a frontend may be at this address, to this client. Node ports may be at the host's own loopback address; a pod's is
    /// another.
    #[inline(always)]
    pub fn may_dial<A: Family>(&self, addr: &A, node: &Node) -> bool {
        if self.origin.is_node() && addr.is_localhost() {
            return maps::own_addr(addr).is_some_and(|own| own.takes_node_ports());
        }
        // On a host outside of the cluster its own addresses are its own.
        addr.is_unicast() && !(node.has(Node::HOST) && maps::own_addr(addr).is_some())
    }
}

/// The differences between the families where there are no packets.
pub trait Family: Net {
    /// An address that no packet carries, for a network namespace where affinity is by address.
    fn of_netns(cookie: u64) -> Self;
    /// A loopback address at which kube-proxy serves node ports.
    fn is_localhost(self) -> bool;
    /// Keeps with the socket of a call what it dials. Without memory for that, it is shown its backend.
    fn keep_dialled(peer: Peer, dialled: &Dialled<Self>);
    /// Forgets what the socket of a call has dialled in this family.
    fn forget_dialled(peer: Peer);
    /// Returns what the socket of a call has dialled last in this family.
    fn dialled(peer: Peer) -> Option<Dialled<Self>>;
}

impl Family for Addr4 {
    /// In 0/8.
    #[inline(always)]
    fn of_netns(cookie: u64) -> Self {
        Self::from_wire((cookie as u32 & 0x00ff_ffff).to_be())
    }

    #[inline(always)]
    fn is_localhost(self) -> bool {
        u32::from_be(self.wire()) >> 24 == 127
    }

    #[inline(always)]
    fn keep_dialled(peer: Peer, dialled: &Dialled<Self>) {
        peer.store(&maps::DIALLED4, dialled);
    }

    #[inline(always)]
    fn forget_dialled(peer: Peer) {
        peer.clear(&maps::DIALLED4);
    }

    #[inline(always)]
    fn dialled(peer: Peer) -> Option<Dialled<Self>> {
        peer.stored(&maps::DIALLED4)
    }
}

impl Family for Addr6 {
    /// In ::/64.
    #[inline(always)]
    fn of_netns(cookie: u64) -> Self {
        Self::from_wire([0, 0, ((cookie >> 32) as u32).to_be(), (cookie as u32).to_be()])
    }

    #[inline(always)]
    fn is_localhost(self) -> bool {
        false
    }

    #[inline(always)]
    fn keep_dialled(peer: Peer, dialled: &Dialled<Self>) {
        peer.store(&maps::DIALLED6, dialled);
    }

    #[inline(always)]
    fn forget_dialled(peer: Peer) {
        peer.clear(&maps::DIALLED6);
    }

    #[inline(always)]
    fn dialled(peer: Peer) -> Option<Dialled<Self>> {
        peer.stored(&maps::DIALLED6)
    }
}
