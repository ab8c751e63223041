//! The client of a call.

use aya_ebpf::btf_maps::SkStorage;
use proxy_common::addr::{Addr4, Addr6, Proto};
use proxy_common::device::Node;
use proxy_common::policy::Origin;
use proxy_common::socket::{Dialled, EVERYWHERE, PODS, PODS_BELOW, PODS_DEPTH};

use super::peer::{self, Peer, cgroup_at, flags};
use crate::clock::now_secs;
use crate::global_fn::any;
use crate::net::Net;
use crate::{fast_path, maps};

/// The socket of a call.
#[derive(Clone, Copy)]
pub struct Client {
    pub cookie: u64,
    /// The cookie of its network namespace.
    pub netns: u64,
    pub origin: Origin,
}

impl Client {
    /// Returns `None` if these programs do not serve the socket.
    #[inline(always)]
    pub fn of(peer: Peer, proto: Proto, node: &Node) -> Option<Self> {
        let netns = peer.netns();
        let origin = if netns == peer::own_netns() {
            Origin::NODE
        } else if !serves_pod(proto, node) {
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

    /// Returns true if this client may reach a frontend at this address. Node ports may be at the
    /// host's loopback address, but not at a pod's.
    #[inline(always)]
    pub fn may_dial<A: Family>(&self, addr: &A, node: &Node) -> bool {
        if self.origin.is_node() && addr.is_loopback() {
            return maps::own_addr(addr).is_some_and(|own| own.takes_node_ports());
        }
        // In host mode, the host's own addresses have no frontends.
        addr.is_unicast() && !(node.has(Node::HOST) && maps::own_addr(addr).is_some())
    }
}

/// Returns true if the programs translate sockets of the calling pod.
#[inline(always)]
fn serves_pod(proto: Proto, node: &Node) -> bool {
    // Masquerading depends on the client's address, which a socket may not have yet.
    if node.has(Node::COMPAT | Node::MASQUERADE_ALL) {
        return false;
    }
    if flags() & EVERYWHERE != 0 {
        return true;
    }
    // A bypass flow is faster than socket load balancing. The agent cannot close stale UDP sockets
    // of pods.
    let is_for_packets = node.has(Node::BARE_PODS) && fast_path::opens_flows_by(now_secs);
    flags() & PODS != 0 && proto == Proto::TCP && !is_for_packets && is_of_served_pod()
}

/// Returns true if the calling thread is in the cgroup of a pod in `SOCKET_PODS`, or at most
/// [`PODS_BELOW`] levels below it. Containers inside a pod are deeper. They may be nodes of another
/// cluster, with its own Services at the same addresses.
#[inline(never)]
fn is_of_served_pod() -> bool {
    for level in 1..=PODS_DEPTH {
        let cgroup = cgroup_at(level);
        if cgroup == 0 {
            return false;
        }
        if maps::is_served_pod(cgroup) {
            return cgroup_at(level + PODS_BELOW + 1) == 0;
        }
    }
    false
}

/// The differences between the families for sockets.
pub trait Family: Net {
    /// The sockets' last dialled frontends. If the kernel has no memory for one, `getpeername` shows
    /// the backend, and the connection is not counted.
    const DIALLED: &'static SkStorage<Dialled<Self>>;

    /// Returns an address that no packet has, as the client's address of a network namespace in
    /// session affinity.
    fn of_netns(cookie: u64) -> Self;
    /// Calls [`any`] with each word of the address.
    fn arbitrary(self) -> Self;
}

impl Family for Addr4 {
    const DIALLED: &'static SkStorage<Dialled<Self>> = &maps::DIALLED4;

    /// In 224/8: no sender has a multicast address.
    #[inline(always)]
    fn of_netns(cookie: u64) -> Self {
        Self::from_wire((0xe000_0000 | cookie as u32 & 0x00ff_ffff).to_be())
    }

    #[inline(always)]
    fn arbitrary(self) -> Self {
        Self::from_wire(any(self.wire()))
    }
}

impl Family for Addr6 {
    const DIALLED: &'static SkStorage<Dialled<Self>> = &maps::DIALLED6;

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
    fn arbitrary(self) -> Self {
        Self::from_wire(self.wire().map(any))
    }
}
