//! Reads the kernel's answers to any netlink request.

use std::io;

use futures::{Stream, StreamExt};
use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use rtnetlink::sys::SocketAddr;

/// Returns the address of the kernel, which receives requests.
pub(crate) fn kernel() -> SocketAddr {
    SocketAddr::new(0, 0)
}

/// Calls `take` with each message of a dump. The connection must forward the end of a dump, which carries its error.
pub(crate) async fn dumped<T>(
    mut answers: impl Stream<Item = NetlinkMessage<T>> + Unpin,
    mut take: impl FnMut(T),
) -> io::Result<()> {
    while let Some(answer) = answers.next().await {
        match answer.payload {
            NetlinkPayload::InnerMessage(message) => take(message),
            NetlinkPayload::Done(done) if done.code == 0 => return Ok(()),
            NetlinkPayload::Done(done) => return Err(io::Error::from_raw_os_error(-done.code)),
            NetlinkPayload::Error(error) => return Err(error.to_io()),
            _ => {}
        }
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

/// Waits for a deletion. Returns false if the object was gone.
pub(crate) async fn deleted<T>(mut answers: impl Stream<Item = NetlinkMessage<T>> + Unpin) -> io::Result<bool> {
    while let Some(answer) = answers.next().await {
        if let NetlinkPayload::Error(error) = answer.payload
            && error.code.is_some()
        {
            let error = error.to_io();
            return if error.kind() == io::ErrorKind::NotFound { Ok(false) } else { Err(error) };
        }
    }
    // The acknowledgement ends the answers.
    Ok(true)
}
