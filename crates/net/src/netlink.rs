//! Netlink sockets and dumps.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use futures::{Stream, StreamExt};
use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
pub use rtnetlink::Handle;
use rtnetlink::sys::SocketAddr;
use tokio::time::sleep;

/// The number of attempts at a dump that changes interrupt.
const DUMP_TRIES: u32 = 5;

/// The number of attempts at a dump while another dump uses the socket, and the pause between them:
/// 1 s in total.
const BUSY_TRIES: u32 = 200;
const BUSY_PAUSE: Duration = Duration::from_millis(5);

/// Opens a netlink socket in the network namespace of this thread. The future drives the socket:
/// requests are answered only while it is polled. The future ends when the socket fails or the last
/// handle is dropped.
///
/// The socket checks requests strictly, so the kernel applies their filters instead of ignoring
/// them.
pub fn connect() -> anyhow::Result<(impl Future<Output = ()> + Send + use<>, Handle)> {
    let (mut connection, handle, _) =
        rtnetlink::new_connection_with_strict_check().context("open a netlink socket")?;
    // The message that ends a dump carries its error and whether the dump is consistent.
    connection.set_forward_done(true);
    Ok((connection, handle))
}

/// Runs a future that sends netlink requests, on its own thread. The kernel answers within the send
/// call, which blocks while another program holds RTNL.
pub async fn on_own_thread<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Handle::current();
    tokio::task::spawn_blocking(move || runtime.block_on(work))
        .await
        .context("a thread for netlink")
}

/// Returns the kernel's name of this thread's network namespace, such as `net:[4026531840]`.
pub fn namespace() -> anyhow::Result<PathBuf> {
    fs::read_link("/proc/thread-self/ns/net").context("read this network namespace")
}

/// Returns what `pick` selects from the answers to a dump.
///
/// A dump that changes interrupt may miss unchanged entries, so it is repeated. If it is always
/// interrupted, the last attempt counts: events announce the changes, and every caller dumps again
/// later.
///
/// The kernel runs one dump per socket and refuses a second dump with `EBUSY`
/// (`__netlink_dump_start` in net/netlink/af_netlink.c). Handles share a socket, so a refused dump
/// is retried.
pub(crate) async fn dump<T>(
    handle: &Handle,
    request: RouteNetlinkMessage,
    pick: impl Fn(RouteNetlinkMessage) -> Option<T>,
) -> io::Result<Vec<T>> {
    let mut tries = 0;
    let mut busy_tries = 0;
    loop {
        let mut items = Vec::new();
        match dump_once(handle, &request, &pick, &mut items).await {
            Err(error)
                if error.raw_os_error() == Some(nix::libc::EBUSY) && busy_tries < BUSY_TRIES =>
            {
                busy_tries += 1;
                sleep(BUSY_PAUSE).await;
            }
            found => {
                tries += 1;
                if found? || tries == DUMP_TRIES {
                    return Ok(items);
                }
            }
        }
    }
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
    let answers = handle.clone().request(message).map_err(io::Error::other)?;
    dumped(answers, |message| items.extend(pick(message))).await
}

/// Calls `take` with each message of a dump. Returns true if the dump is consistent. The connection
/// must forward the message that ends the dump, which carries its error.
pub(crate) async fn dumped<T>(
    mut answers: impl Stream<Item = NetlinkMessage<T>> + Unpin,
    mut take: impl FnMut(T),
) -> io::Result<bool> {
    let mut consistent = true;
    while let Some(answer) = answers.next().await {
        consistent &= answer.header.flags & NLM_F_DUMP_INTR == 0;
        match answer.payload {
            NetlinkPayload::InnerMessage(message) => take(message),
            NetlinkPayload::Done(done) if done.code == 0 => return Ok(consistent),
            NetlinkPayload::Done(done) => return Err(io::Error::from_raw_os_error(-done.code)),
            NetlinkPayload::Error(error) => return Err(error.to_io()),
            _ => {}
        }
    }
    Err(io::Error::new(
        io::ErrorKind::UnexpectedEof,
        "the netlink socket closed in the middle of a dump",
    ))
}

/// Waits for the kernel's answer to a deletion. Returns false if the object was already gone.
pub(crate) async fn deleted<T>(
    mut answers: impl Stream<Item = NetlinkMessage<T>> + Unpin,
) -> io::Result<bool> {
    while let Some(answer) = answers.next().await {
        if let NetlinkPayload::Error(error) = answer.payload
            && error.code.is_some()
        {
            let error = error.to_io();
            return if error.kind() == io::ErrorKind::NotFound {
                Ok(false)
            } else {
                Err(error)
            };
        }
    }
    // The acknowledgement comes last.
    Ok(true)
}

pub(crate) fn kernel() -> SocketAddr {
    SocketAddr::new(0, 0)
}
