//! Socket load balancing: the programs of the cgroup hooks. In `connect` and `sendmsg` a backend
//! replaces the frontend; `getpeername` and `recvmsg` restore the frontend. `connection.rs` counts
//! the outcomes of TCP connections.
//!
//! The decision is the packet path's ([`decide::find`], [`select`]). A call about which it cannot
//! decide, or where it would drop packets, continues untranslated, and the packet path decides
//! about its packets.

mod client;
mod connection;
mod event;
mod peer;
mod storage;

use aya_ebpf::macros::cgroup_sock_addr;
use aya_ebpf::programs::SockAddrContext;
use proxy_common::addr::{Addr4, Addr6, Port, Proto, SockAddr};
use proxy_common::counter::{Event, Reason, Verdict};
use proxy_common::device::Node;
use proxy_common::frontend::{Algorithm, Backend, FrontendKey, FrontendKind, Service, Set};
use proxy_common::policy::{Decision, Origin};
use proxy_common::socket::{
    CONNECTED, Dialled, EVERYWHERE, KEPT_SECS, REFUSES, Side, Socket, SocketKey, UDP,
};

use crate::clock::now_secs;
use crate::decide::Dial;
use crate::global_fn::any;
use crate::host::LO;
use crate::net::Net;
use crate::socket::client::{Client, Family};
use crate::socket::peer::{Peer, flags, is_worker};
use crate::{decide, lookup, maps, select};

/// The return values of a program.
const ALLOW: i32 = 1;
const REFUSE: i32 = 0;

const ECONNREFUSED: i32 = 111;

#[cgroup_sock_addr(connect4)]
pub fn kpx_connect4(ctx: SockAddrContext) -> i32 {
    dial4(Peer::new(&ctx), Call::Connect)
}

#[cgroup_sock_addr(connect6)]
pub fn kpx_connect6(ctx: SockAddrContext) -> i32 {
    dial6(Peer::new(&ctx), Call::Connect)
}

#[cgroup_sock_addr(sendmsg4)]
pub fn kpx_sendmsg4(ctx: SockAddrContext) -> i32 {
    dial4(Peer::new(&ctx), Call::Send)
}

#[cgroup_sock_addr(sendmsg6)]
pub fn kpx_sendmsg6(ctx: SockAddrContext) -> i32 {
    dial6(Peer::new(&ctx), Call::Send)
}

#[cgroup_sock_addr(recvmsg4)]
pub fn kpx_recvmsg4(ctx: SockAddrContext) -> i32 {
    show4(Peer::new(&ctx))
}

#[cgroup_sock_addr(recvmsg6)]
pub fn kpx_recvmsg6(ctx: SockAddrContext) -> i32 {
    show6(Peer::new(&ctx))
}

#[cgroup_sock_addr(getpeername4)]
pub fn kpx_getpeer4(ctx: SockAddrContext) -> i32 {
    show4(Peer::new(&ctx))
}

#[cgroup_sock_addr(getpeername6)]
pub fn kpx_getpeer6(ctx: SockAddrContext) -> i32 {
    show6(Peer::new(&ctx))
}

/// The call by which a socket dials.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Connect,
    /// Sends a datagram of a socket that is not connected.
    Send,
}

/// The result of a call that dials.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq)]
enum DialResult {
    /// The call continues unchanged.
    Left,
    /// The call continues with a backend as its peer.
    Translated,
    Refused,
}

#[inline(always)]
fn dial4(peer: Peer, call: Call) -> i32 {
    let mut at = peer.v4();
    let result = dial::<Addr4>(peer, peer.is_bound4(), call, &mut at);
    if result == DialResult::Translated {
        peer.set_v4(&at);
    }
    answer(result)
}

/// A socket of IPv6 may dial an IPv4 address, as `::ffff:192.0.2.1`.
#[inline(always)]
fn dial6(peer: Peer, call: Call) -> i32 {
    if peer.is_mapped() {
        let mut at = peer.mapped();
        let result = dial::<Addr4>(peer, peer.is_bound6(), call, &mut at);
        if result == DialResult::Translated {
            peer.set_mapped(&at);
        }
        return answer(result);
    }
    let mut at = peer.v6();
    let result = dial::<Addr6>(peer, peer.is_bound6(), call, &mut at);
    if result == DialResult::Translated {
        peer.set_v6(&at);
    }
    answer(result)
}

#[inline(always)]
fn answer(result: DialResult) -> i32 {
    if result != DialResult::Refused || flags() & REFUSES == 0 {
        return ALLOW;
    }
    peer::fail(ECONNREFUSED);
    REFUSE
}

#[inline(always)]
fn show4(peer: Peer) -> i32 {
    let mut at = peer.v4();
    if show::<Addr4>(peer, &mut at) {
        peer.set_v4(&at);
    }
    ALLOW
}

#[inline(always)]
fn show6(peer: Peer) -> i32 {
    if peer.is_mapped() {
        let mut at = peer.mapped();
        if show::<Addr4>(peer, &mut at) {
            peer.set_mapped(&at);
        }
        return ALLOW;
    }
    let mut at = peer.v6();
    if show::<Addr6>(peer, &mut at) {
        peer.set_v6(&at);
    }
    ALLOW
}

/// Returns a decision for [`lookup`] and [`select`] to fill.
#[inline(always)]
fn undecided<A: Net>(origin: Origin) -> Decision<A> {
    Decision {
        frontend: FrontendKey::address(A::UNSPECIFIED),
        service: FrontendKey::address(A::UNSPECIFIED),
        kind: FrontendKind::ADDRESS,
        origin,
        set: Set::CLUSTER,
        flags: 0,
        backend: Backend::new(A::UNSPECIFIED, Port::ANY, 0),
    }
}

/// A socket that dials `dialled`, as the packet path's rules take it.
struct Dialling<A: Net> {
    client: SockAddr<A>,
    dialled: SockAddr<A>,
    proto: Proto,
}

impl<A: Net> Dial<A> for Dialling<A> {
    const MAY_BE_HANDED_OVER: bool = false;

    #[inline(always)]
    fn client(&self) -> A {
        self.client.addr
    }

    #[inline(always)]
    fn dialled(&self) -> &SockAddr<A> {
        &self.dialled
    }

    #[inline(always)]
    fn proto(&self) -> Proto {
        self.proto
    }
}

/// Calls [`decide::find`]. A separate function, so that its keys leave the stack afterwards.
#[inline(never)]
fn find<A: Family>(
    dialling: &Dialling<A>,
    node: &Node,
    service: &mut Service,
    decision: &mut Decision<A>,
) -> Result<(), Reason> {
    decide::find(dialling, node, service, decision)
}

/// Replaces the frontend in `at` by a backend.
#[inline(never)]
fn dial<A: Family>(peer: Peer, is_bound: bool, call: Call, at: &mut SockAddr<A>) -> DialResult {
    let Some(proto) = served(peer) else {
        return DialResult::Left;
    };
    let Some(node) = maps::node() else {
        return DialResult::Left;
    };
    let Some(mut client) = Client::of(peer, proto, node) else {
        return DialResult::Left;
    };
    if node.has(Node::DRAINING) || !client.may_dial(&at.addr, node) {
        return DialResult::Left;
    }
    // Known values would multiply the verifier's work on what follows.
    at.addr = at.addr.arbitrary();
    let proto = Proto(any(proto.0.into()) as u8);
    client.origin = Origin(any(client.origin.0.into()) as u8);
    let is_bound = any(is_bound.into()) != 0;
    let port = Port::from_wire(client.cookie as u16);
    let dialling = Dialling {
        client: SockAddr::new(A::of_netns(client.netns).arbitrary(), port),
        dialled: *at,
        proto,
    };
    let mut service = Service::default();
    let mut decision = undecided(client.origin);
    if let Err(reason) = find(&dialling, node, &mut service, &mut decision) {
        if reason == Reason::NotOurs && call == Call::Connect {
            // The socket may have had this address as a Service's backend before, and now dials it
            // directly.
            forget(peer, client.cookie, at, proto);
        }
        return refused(reason, &decision);
    }
    decision.set = Set(any(decision.set.0.into()) as u8);
    // The source address of its packets is not known yet.
    if decision.kind == FrontendKind::LOAD_BALANCER && service.has(Service::SOURCE_RANGES) {
        return DialResult::Left;
    }
    // Only the source address of packets identifies a spared pod.
    let spares = service.has(Service::SPARES_PODS) || service.has(Service::SPARES_NODE);
    // Datagrams to a redirected address continue to that address without its pod, and the agent
    // does not close stale sockets of pods.
    if spares || proto == Proto::UDP && service.has(Service::ELSE_PASSES) {
        return DialResult::Left;
    }
    // The packet path identifies a client by its address, socket load balancing by its network
    // namespace. A pod in `SOCKET_PODS` uses both in turn, and would have a different backend in
    // each.
    if service.affinity_secs > 0 && !client.origin.is_node() && flags() & EVERYWHERE == 0 {
        return DialResult::Left;
    }
    // Without packets, no hook would count the connection's end, or move it from a silent or lost
    // backend.
    let needs_packets = service.has(Service::FAILS_OVER | Service::ENDS_LOST);
    if service.algorithm == Algorithm::LEAST_CONNECTIONS || needs_packets || is_worker() {
        return DialResult::Left;
    }
    let is_datagram = proto == Proto::UDP && call == Call::Send;
    let had_secs = if is_datagram {
        kept(client.cookie, &dialling.dialled, &mut decision)
    } else {
        0
    };
    let stays = had_secs != 0;
    // The backend's replies may not reach the address of the socket. Only packets can be
    // masqueraded.
    if (is_bound || is_for_packets(peer.device(), &client, node)) && !stays {
        return DialResult::Left;
    }
    let last_secs = if call == Call::Connect || had_secs == CONNECTED {
        CONNECTED
    } else {
        now_secs()
    };
    if !stays && select::backend(&dialling.client, &service, &mut decision).is_err() {
        return DialResult::Left;
    }
    // The backend is a Service's address, so hooks would translate the packets again. They
    // translate packets to the frontend once, as conntrack does.
    if lookup::is_services(&decision.backend_at(), proto) {
        return DialResult::Left;
    }
    if proto == Proto::TCP {
        let dialled = Dialled {
            backend: decision.backend_at(),
            frontend: *at,
        };
        storage::set(A::DIALLED, peer.sock(), &dialled);
    } else if !remember(client.cookie, at, &decision, last_secs) {
        // Without the row, `recvmsg` could not restore the frontend.
        return DialResult::Left;
    }
    if !stays {
        maps::service_opened(&decision.service);
    }
    maps::count(Event::SocketLed);
    *at = decision.backend_at();
    DialResult::Translated
}

/// Returns true if the packet path serves a socket that is bound to this device (0: none). A pod's
/// packets pass a hook behind any device, and the host's packets pass the hooks of the anchor and
/// lo. On other devices the host's packets leave untranslated, so the socket needs a backend that
/// the device reaches, as with netfilter's NAT.
#[inline(always)]
fn is_for_packets(device: u32, client: &Client, node: &Node) -> bool {
    device != 0 && (!client.origin.is_node() || device == node.anchor_ifindex || device == LO)
}

/// The protocol of a socket, if it is one that is served.
#[inline(always)]
fn served(peer: Peer) -> Option<Proto> {
    match peer.proto() {
        Proto::TCP => Some(Proto::TCP),
        Proto::UDP if flags() & UDP != 0 => Some(Proto::UDP),
        _ => None,
    }
}

/// Refuses a call if the packet path would reject its packets. Leaves the call to the packet path
/// if that would drop or pass them.
#[inline(never)]
fn refused<A: Net>(reason: Reason, decision: &Decision<A>) -> DialResult {
    let verdict = reason.verdict();
    if verdict != Verdict::Reject || flags() & REFUSES == 0 {
        return DialResult::Left;
    }
    maps::count(reason);
    if decision.has(Decision::<A>::FRONTEND) {
        maps::service_refused(&decision.service, verdict);
    }
    DialResult::Refused
}

/// Finds the backend of a socket's previous datagrams to a frontend, or of its connection. Returns
/// the time in seconds since boot, or [`CONNECTED`]; 0 if that is too long ago, or the backend no
/// longer serves.
#[inline(never)]
fn kept<A: Net>(cookie: u64, dialled: &SockAddr<A>, decision: &mut Decision<A>) -> u32 {
    let key = SocketKey::new(cookie, *dialled, Side::FRONTEND);
    let Some(had) = maps::socket(&key) else {
        return 0;
    };
    if had.service != decision.service || now_secs().saturating_sub(had.last_secs) >= KEPT_SECS {
        return 0;
    }
    decision.backend = Backend::new(had.at.addr, had.at.port, 0);
    if maps::endpoint(had.service, had.at).is_some() {
        had.last_secs
    } else {
        0
    }
}

/// Stores the frontend that a UDP socket has dialled. Returns false without room.
#[inline(never)]
fn remember<A: Net>(
    cookie: u64,
    dialled: &SockAddr<A>,
    decision: &Decision<A>,
    last_secs: u32,
) -> bool {
    let backend = decision.backend_at();
    let socket = Socket::new(*dialled, decision.service, last_secs);
    if !maps::remember_socket(&SocketKey::new(cookie, backend, Side::BACKEND), &socket) {
        return false;
    }
    // A connected socket may also name a destination in `sendmsg`.
    maps::remember_socket(
        &SocketKey::new(cookie, *dialled, Side::FRONTEND),
        &Socket {
            at: backend,
            ..socket
        },
    )
}

/// Removes the record that a socket's peer at `at` is a backend.
#[inline(always)]
fn forget<A: Family>(peer: Peer, cookie: u64, at: &SockAddr<A>, proto: Proto) {
    if proto == Proto::UDP {
        maps::forget_socket(&SocketKey::new(cookie, *at, Side::BACKEND));
    } else {
        storage::clear(A::DIALLED, peer.sock());
    }
}

/// Replaces the backend in `at` by the frontend that the socket has dialled. Returns false without
/// such a frontend.
#[inline(never)]
fn show<A: Family>(peer: Peer, at: &mut SockAddr<A>) -> bool {
    match served(peer) {
        Some(Proto::TCP) => match storage::get(A::DIALLED, peer.sock()) {
            Some(dialled) if dialled.backend == *at => *at = dialled.frontend,
            _ => return false,
        },
        Some(_) => match maps::socket(&SocketKey::new(peer.cookie(), *at, Side::BACKEND)) {
            Some(socket) => *at = socket.at,
            None => return false,
        },
        None => return false,
    }
    true
}
