//! Counts the connections of sockets that got their backend at `connect`.
//!
//! The kernel calls `kpx_sock_ops` for events of every TCP socket below the cgroup:
//!
//! ```text
//!   connect ──▶ TCP_CONNECT_CB ─┬─▶ ACTIVE_ESTABLISHED_CB        answered
//!               (first SYN)     ├─▶ RTO_CB in SYN_SENT           a retransmitted SYN; the last: unanswered
//!                               └─▶ STATE_CB, SYN_SENT → CLOSE   refused, unanswered, or closed by the process
//! ```
//!
//! Other programs of the cgroup see the same context. This program leaves `reply` unchanged, reads
//! nothing that shares its memory (`args[0]`), and removes no callbacks, because another program may
//! have requested the same. A program that clears all callbacks hides failures from this program.

use aya_ebpf::bindings::{
    BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, BPF_SOCK_OPS_RTO_CB, BPF_SOCK_OPS_RTO_CB_FLAG,
    BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG, BPF_SOCK_OPS_TCP_CONNECT_CB, bpf_sock,
};
use aya_ebpf::macros::sock_ops;
use aya_ebpf::programs::SockOpsContext;
use proxy_common::addr::{Addr4, Addr6, Proto};
use proxy_common::connect::{DialTime, Outcome, PATIENCE};
use proxy_common::policy::Origin;
use proxy_common::socket::Dialled;

use super::client::Family;
use super::event::Event;
use super::{storage, undecided};
use crate::clock::now_ns;
use crate::{lookup, maps};

/// The return value with which the kernel uses `reply`. With 0 it ignores the replies of all
/// programs.
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
    let is_end = match op {
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB => true,
        BPF_SOCK_OPS_RTO_CB => event.is_in_syn_sent(),
        BPF_SOCK_OPS_STATE_CB => event.is_in_syn_sent() && event.closes(),
        _ => false,
    };
    if !is_end {
        return;
    }
    let Some(since) = storage::get(&maps::CONNECTING, sock) else {
        return;
    };
    let units = since.units_until(now_ns());
    let outcome = match op {
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB => Outcome::answered(units),
        BPF_SOCK_OPS_RTO_CB if !event.is_last_timeout() => Outcome::RETRANSMITTED,
        // The SYN is still queued if the process closed the socket, and before about Linux 6.10 on an
        // ICMP error. On a RST the kernel has purged the queue.
        BPF_SOCK_OPS_STATE_CB if event.has_unacked() && units < PATIENCE => {
            // The backend may still answer.
            storage::clear(&maps::CONNECTING, sock);
            return;
        }
        // Only a RST is a segment.
        BPF_SOCK_OPS_STATE_CB if !event.has_unacked() && event.has_received() => {
            Outcome::CONNECT_REFUSED
        }
        _ => Outcome::UNANSWERED,
    };
    if outcome != Outcome::RETRANSMITTED {
        storage::clear(&maps::CONNECTING, sock);
    }
    match Peers::of(event, sock) {
        Some(Peers::V4(dialled)) => count(&dialled, outcome),
        Some(Peers::V6(dialled)) => count(&dialled, outcome),
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

/// The frontend and the backend of a translated socket, by family. An IPv6 socket may have IPv4
/// peers.
enum Peers {
    V4(Dialled<Addr4>),
    V6(Dialled<Addr6>),
}

impl Peers {
    /// Returns `None` if kpx has not translated the address to which the socket connects.
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
fn count<A: Family>(dialled: &Dialled<A>, outcome: Outcome) {
    let mut decision = undecided(Origin::POD);
    if lookup::frontend(&dialled.frontend, Proto::TCP, &mut decision).is_ok() {
        maps::note_connection(&decision.service, &dialled.backend, outcome);
    }
}
