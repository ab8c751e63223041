//! The mode of many open connections: requests and answers go round them, one after the other.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use anyhow::{Context, Result};
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use socket2::SockRef;

use super::traffic::{Slice, Work, exchange};

const CONNECTIONS: usize = 10_000;
/// The files that a thread's table has to hold: one end of each connection, and all else that the
/// process has open.
const FILES: u64 = CONNECTIONS as u64 + 4_000;

pub(super) fn request_response(slice: &Slice<'_>) -> Result<Work> {
    let (allowed, most) =
        getrlimit(Resource::RLIMIT_NOFILE).context("ask how many files may be open")?;
    if allowed < FILES {
        setrlimit(Resource::RLIMIT_NOFILE, FILES, most.max(FILES))
            .context("allow as many open files")?;
    }
    // The limit counts a table of files. The client's ends have one of their own, which ends with
    // this thread.
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

/// Opens a connection and waits until the server has it. It will end by a RST, so that none of
/// thousands waits for its time.
fn open(slice: &Slice<'_>) -> Result<TcpStream> {
    let mut stream = slice.connect()?;
    SockRef::from(&stream).set_linger(Some(std::time::Duration::ZERO))?;
    exchange(&mut stream)?;
    Ok(stream)
}

/// Takes all connections, then answers them in the order in which they came.
pub(super) fn answer(listener: TcpListener) {
    let mut streams = Vec::with_capacity(CONNECTIONS);
    while streams.len() < CONNECTIONS {
        let Ok((mut stream, _)) = listener.accept() else {
            return;
        };
        let _ = stream.set_nodelay(true);
        // A failure here is the client's to report.
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

/// Returns nothing once the client is gone.
fn echo(stream: &mut TcpStream) -> Option<()> {
    let mut byte = [0];
    stream
        .read_exact(&mut byte)
        .and_then(|()| stream.write_all(&byte))
        .ok()
}
