//! Talks to the kernel by netlink and `/proc/sys/net`: about devices, the anchor, its routes and rules.

pub mod addr;
pub mod anchor;
pub(crate) mod answers;
mod behind;
pub mod changes;
pub mod fib;
pub mod filter;
pub mod forward;
pub mod link;
pub mod listeners;
pub mod pod_route;
pub mod ports;
pub mod role;
pub mod route;
mod route_watch;
pub mod rule;
pub mod sock_diag;
pub mod sysctl;
mod watch;

use std::fs;
use std::io;
use std::path::PathBuf;

use anyhow::Context;
use futures::StreamExt;
use netlink_packet_core::{NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
pub use rtnetlink::Handle;

pub use route_watch::watch_routes;
pub use watch::{LinkEvent, watch};

/// The number of attempts at a dump that changes interrupt.
const DUMP_TRIES: u32 = 5;

/// Opens a netlink socket in the network namespace of this thread. The future is its driver. Only while it is polled do
/// requests get answers, and it ends only when the socket fails or every handle is gone.
///
/// The kernel checks requests strictly, so it applies their filters instead of ignoring them.
pub fn connect() -> anyhow::Result<(impl Future<Output = ()> + Send + use<>, Handle)> {
    let (mut connection, handle, _) = rtnetlink::new_connection_with_strict_check().context("open a netlink socket")?;
    // The end of a dump carries its error and whether it is consistent.
    connection.set_forward_done(true);
    Ok((connection, handle))
}

/// Returns the kernel's name of the network namespace of this thread: `net:[4026531840]`.
pub fn namespace() -> anyhow::Result<PathBuf> {
    fs::read_link("/proc/thread-self/ns/net").context("read this network namespace")
}

/// Returns the kernel's answers to a dump that `pick` selects.
///
/// Changes during a dump may hide entries that did not change, so the dump is repeated. On a node that changes all the
/// time the last attempt counts: events announce the changes, and every caller repeats its dump later anyway.
async fn dump<T>(
    handle: &Handle,
    request: RouteNetlinkMessage,
    pick: impl Fn(RouteNetlinkMessage) -> Option<T>,
) -> io::Result<Vec<T>> {
    let mut items = Vec::new();
    for _ in 0..DUMP_TRIES {
        items.clear();
        if dump_once(handle, &request, &pick, &mut items).await? {
            break;
        }
    }
    Ok(items)
}

/// Dumps once. Returns true if the dump is consistent.
async fn dump_once<T>(
    handle: &Handle,
    request: &RouteNetlinkMessage,
    pick: &impl Fn(RouteNetlinkMessage) -> Option<T>,
    items: &mut Vec<T>,
) -> io::Result<bool> {
    let mut message = NetlinkMessage::from(request.clone());
    message.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let mut answers = handle.clone().request(message).map_err(io::Error::other)?;
    let mut consistent = true;
    while let Some(answer) = answers.next().await {
        consistent &= answer.header.flags & NLM_F_DUMP_INTR == 0;
        match answer.payload {
            NetlinkPayload::InnerMessage(message) => items.extend(pick(message)),
            NetlinkPayload::Done(done) if done.code == 0 => return Ok(consistent),
            NetlinkPayload::Done(done) => return Err(io::Error::from_raw_os_error(-done.code)),
            NetlinkPayload::Error(error) => return Err(error.to_io()),
            _ => {}
        }
    }
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the netlink socket closed in the middle of a dump"))
}
