//! The client of a call.

use proxy_common::addr::{Addr4, Addr6, Proto};
use proxy_common::device::Node;
use proxy_common::policy::Origin;
use proxy_common::socket::{Dialled, EVERYWHERE, PODS, PODS_BELOW, PODS_DEPTH};

use super::peer::{self, Peer, cgroup_at, flags};
use crate::clock::now_secs;
use crate::net::Net;
use crate::{maps, redirect};

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
    pub fn of(peer: Peer, proto: Proto, node: &Node) -> Option<Self> {
        let netns = peer.netns();
        let origin = if netns == peer::own_netns() {
            Origin::NODE
        } else if !leads_pod(proto, node) {
            return None;
        } else {
            Origin::POD
        };
        Some(Self {
            cookie: peer.cookie(),
            netns,
            origin,
        })
    }

    /// Returns true if a frontend may be at this address, to this client. Node ports may be at the
    /// host's own loopback address; a pod's is another.
    #[inline(always)]
    pub fn may_dial<A: Family>(&self, addr: &A, node: &Node) -> bool {
        if self.origin.is_node() && addr.is_loopback() {
            return maps::own_addr(addr).is_some_and(|own| own.takes_node_ports());
        }
        // On a host outside of the cluster its own addresses are its own.
        addr.is_unicast() && !(node.has(Node::HOST) && maps::own_addr(addr).is_some())
    }
}

/// Returns true if sockets of the calling pod are led.
#[inline(always)]
fn leads_pod(proto: Proto, node: &Node) -> bool {
    // Addresses tell the clients to masquerade, and a socket may not have one yet.
    if node.has(Node::COMPAT | Node::MASQUERADE_ALL) {
        return false;
    }
    if flags() & EVERYWHERE != 0 {
        return true;
    }
    // A bypass connection past the stack is quicker than one that is led. The agent cannot end stale
    // UDP sockets of pods.
    let is_for_packets = node.has(Node::BARE_PODS) && redirect::opens_flows_by(now_secs);
    flags() & PODS != 0 && proto == Proto::TCP && !is_for_packets && is_of_led_pod()
}

/// Returns true if the calling thread is in the cgroup of a pod whose sockets are led, or a little
/// below it. Containers that a pod makes are deeper. They may be nodes of a cluster with Services
/// of its own at the same addresses.
#[inline(never)]
fn is_of_led_pod() -> bool {
    for level in 1..=PODS_DEPTH {
        let cgroup = cgroup_at(level);
        if cgroup == 0 {
            return false;
        }
        if maps::is_led(cgroup) {
            return cgroup_at(level + PODS_BELOW + 1) == 0;
        }
    }
    false
}

/// The differences between the families where there are no packets.
pub trait Family: Net {
    /// An address that no packet carries, for a network namespace where affinity is by address.
    fn of_netns(cookie: u64) -> Self;
    /// Keeps with the socket of a call what it dials. Without memory for that, it is shown its
    /// backend.
    fn keep_dialled(peer: Peer, dialled: &Dialled<Self>);
    /// Forgets what the socket of a call has dialled in this family.
    fn forget_dialled(peer: Peer);
    /// Returns what the socket of a call has dialled last in this family.
    fn dialled(peer: Peer) -> Option<Dialled<Self>>;
}

impl Family for Addr4 {
    /// In 224/8: no sender has a multicast address.
    #[inline(always)]
    fn of_netns(cookie: u64) -> Self {
        Self::from_wire((0xe000_0000 | cookie as u32 & 0x00ff_ffff).to_be())
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
    /// In ff00::/64.
    #[inline(always)]
    fn of_netns(cookie: u64) -> Self {
        Self::from_wire([
            0xff00_0000_u32.to_be(),
            0,
            ((cookie >> 32) as u32).to_be(),
            (cookie as u32).to_be(),
        ])
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
