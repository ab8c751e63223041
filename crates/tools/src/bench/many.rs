//! The mode of many open connections: requests and answers visit them in turn.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use anyhow::{Context, Result};
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use socket2::SockRef;

use super::traffic::{Slice, Work, exchange};

const CONNECTIONS: usize = 10_000;
/// The size of a thread's file table: an end of each connection, and the process' other open files.
const FILES: u64 = CONNECTIONS as u64 + 4_000;

pub(super) fn request_response(slice: &Slice<'_>) -> Result<Work> {
    let (allowed, most) =
        getrlimit(Resource::RLIMIT_NOFILE).context("ask how many files may be open")?;
    if allowed < FILES {
        setrlimit(Resource::RLIMIT_NOFILE, FILES, most.max(FILES))
            .context("allow as many open files")?;
    }
    // The limit is per file table. The client's ends get their own table, which ends with this
    // thread.
    unshare(CloneFlags::CLONE_FILES).context("take a table of files")?;
    let mut streams = (0..CONNECTIONS)
        .map(|_| open(slice))
        .collect::<Result<Vec<_>>>()?;
    let mut next = (0..CONNECTIONS).cycle();
    slice.timed(|| {
        let nth = next.next().context("a round without an end")?;
        exchange(&mut streams[nth]).map(|()| 1)
    })
}

/// Opens a connection and waits until the server accepts it. It ends by a RST, so that none of
/// thousands stays in TIME_WAIT.
fn open(slice: &Slice<'_>) -> Result<TcpStream> {
    let mut stream = slice.connect()?;
    SockRef::from(&stream).set_linger(Some(std::time::Duration::ZERO))?;
    exchange(&mut stream)?;
    Ok(stream)
}

/// Accepts all connections, then answers them in the order of their opening.
pub(super) fn answer(listener: TcpListener) {
    let mut streams = Vec::with_capacity(CONNECTIONS);
    while streams.len() < CONNECTIONS {
        let Ok((mut stream, _)) = listener.accept() else {
            return;
        };
        let _ = stream.set_nodelay(true);
        // The client reports a failure here.
        if echo(&mut stream).is_some() {
            streams.push(stream);
        }
    }
    for nth in (0..CONNECTIONS).cycle() {
        if echo(&mut streams[nth]).is_none() {
            return;
        }
    }
}

/// Returns `None` after the client has closed.
fn echo(stream: &mut TcpStream) -> Option<()> {
    let mut byte = [0];
    stream
        .read_exact(&mut byte)
        .and_then(|()| stream.write_all(&byte))
        .ok()
}
