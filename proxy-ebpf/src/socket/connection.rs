//! Counts the connections of sockets that got their backend at `connect`, as the packet path counts
//! those of flows.
//!
//! The kernel calls `kpx_sock_ops` at events of every TCP connection below the cgroup:
//!
//! ```text
//!   connect ──▶ TCP_CONNECT_CB ─┬─▶ ACTIVE_ESTABLISHED_CB        answered
//!               (first SYN)     ├─▶ RTO_CB                       a retransmitted SYN; the last: unanswered
//!                               └─▶ STATE_CB, SYN_SENT → CLOSE   refused, or the client gave up
//! ```
//!
//! The program leaves `reply` and the callbacks of other programs in the cgroup unchanged. So it
//! adds its callbacks to a socket and removes none: another program may have requested the same.

use aya_ebpf::bindings::{
    BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, BPF_SOCK_OPS_RTO_CB, BPF_SOCK_OPS_RTO_CB_FLAG,
    BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG, BPF_SOCK_OPS_TCP_CONNECT_CB, bpf_sock,
};
use aya_ebpf::macros::sock_ops;
use aya_ebpf::programs::SockOpsContext;
use proxy_common::addr::{Addr4, Addr6, Port, Proto};
use proxy_common::connect::{DialTime, Outcome, PATIENCE, Voter};
use proxy_common::frontend::{Backend, FrontendKey, FrontendKind, Set};
use proxy_common::policy::{Decision, Origin};
use proxy_common::socket::Dialled;

use super::client::Family;
use super::event::Event;
use super::storage;
use crate::clock::now_ns;
use crate::{lookup, maps};

/// The kernel goes on with the next program.
const CONTINUE: u32 = 1;

#[sock_ops]
pub fn kpx_sock_ops(ctx: SockOpsContext) -> u32 {
    let event = Event::new(&ctx);
    let sock = event.sock();
    if !sock.is_null() {
        handle(event, sock);
    }
    CONTINUE
}

#[inline(always)]
fn handle(event: Event, sock: *mut bpf_sock) {
    let op = event.op();
    if op == BPF_SOCK_OPS_TCP_CONNECT_CB {
        begin(event, sock);
        return;
    }
    if op != BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB
        && op != BPF_SOCK_OPS_RTO_CB
        && (op != BPF_SOCK_OPS_STATE_CB || !event.closes())
    {
        return;
    }
    let Some(since) = storage::get(&maps::CONNECTING, sock) else {
        return;
    };
    let units = since.units_until(now_ns());
    let end = match op {
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB => End::Answered,
        BPF_SOCK_OPS_RTO_CB if !event.retransmits_last() => End::NotYet,
        BPF_SOCK_OPS_RTO_CB => End::Unanswered,
        _ if units >= PATIENCE => End::Unanswered,
        // For a RST or an ICMP error the kernel empties the queue before it closes the socket, for
        // the socket's process afterwards.
        _ if !event.has_queue() => End::Refused,
        _ => End::GivenUp,
    };
    if end != End::NotYet {
        storage::clear(&maps::CONNECTING, sock);
    }
    match Peers::of(event, sock) {
        _ if end == End::GivenUp => {}
        Some(Peers::V4(dialled)) => count(&dialled, end, units, event.local4()),
        Some(Peers::V6(dialled)) => count(&dialled, end, units, event.local6()),
        None => {}
    }
}

/// Records the time of a translated socket's first SYN, and requests the events that end the
/// connect.
#[inline(always)]
fn begin(event: Event, sock: *mut bpf_sock) {
    if Peers::of(event, sock).is_some() && event.request(CALLBACKS) {
        storage::set(&maps::CONNECTING, sock, &DialTime::at(now_ns()));
    } else {
        // An earlier connect of the socket may have ended without an event.
        storage::clear(&maps::CONNECTING, sock);
    }
}

const CALLBACKS: u32 = BPF_SOCK_OPS_RTO_CB_FLAG | BPF_SOCK_OPS_STATE_CB_FLAG;

/// The end of a connect.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Answered,
    /// The kernel sends another SYN.
    NotYet,
    Refused,
    /// The kernel gives up, or the process does after [`PATIENCE`].
    Unanswered,
    /// The process closes the socket sooner.
    GivenUp,
}

/// The frontend and the backend of a translated socket, by family. An IPv6 socket may have IPv4
/// peers.
enum Peers {
    V4(Dialled<Addr4>),
    V6(Dialled<Addr6>),
}

impl Peers {
    /// Returns `None` if the socket connects to an address that it got from no frontend.
    #[inline(always)]
    fn of(event: Event, sock: *mut bpf_sock) -> Option<Self> {
        if let Some(dialled) = storage::get(Addr4::DIALLED, sock)
            && dialled.backend == event.remote4()
        {
            return Some(Self::V4(dialled));
        }
        if let Some(dialled) = storage::get(Addr6::DIALLED, sock)
            && dialled.backend == event.remote6()
        {
            return Some(Self::V6(dialled));
        }
        None
    }
}

/// Counts an outcome for the service port of the frontend, if that still exists.
#[inline(never)]
fn count<A: Family>(dialled: &Dialled<A>, end: End, units: u32, client: A) {
    let mut decision = Decision {
        frontend: FrontendKey::address(A::UNSPECIFIED),
        service: FrontendKey::address(A::UNSPECIFIED),
        kind: FrontendKind::ADDRESS,
        origin: Origin::POD,
        set: Set::CLUSTER,
        flags: 0,
        backend: Backend::new(A::UNSPECIFIED, Port::ANY, 0),
    };
    if lookup::frontend(&dialled.frontend, Proto::TCP, &mut decision).is_err() {
        return;
    }
    let voter = Voter::of(&client, false);
    let outcome = match end {
        End::Answered => Outcome::answered(units),
        End::NotYet if units >= PATIENCE => Outcome::unheard(voter),
        End::NotYet => Outcome::RETRANSMITTED,
        End::Refused => Outcome::refused(voter),
        End::Unanswered => Outcome::UNANSWERED,
        End::GivenUp => return,
    };
    maps::note_connection(&decision.service, &dialled.backend, outcome);
}
