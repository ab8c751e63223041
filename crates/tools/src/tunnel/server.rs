//! The server in a pod. The first byte of a connection says what it is for.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use anyhow::{Context, Result};
use nix::sys::socket::{Shutdown, shutdown};
use testbed::lab::Host;

use super::fixture::PORT;
use crate::bench::{echo, pin, swallow};

/// Answer each byte until the client closes, ...
pub(super) const ECHO: u8 = 1;
/// ... or read all that comes.
pub(super) const SWALLOW: u8 = 2;

/// A server, which ends with this value.
pub(super) struct Server {
    pub(super) at: SocketAddr,
    /// The bytes that connections to swallow have brought.
    pub(super) swallowed: Arc<AtomicU64>,
    listener: TcpListener,
}

impl Server {
    pub(super) fn start(pod: &Host) -> Result<Self> {
        let at = SocketAddr::from((pod.addrs.v4, PORT));
        let listener = pod
            .ns
            .run(|| TcpListener::bind(at))
            .with_context(|| format!("listen on {at}"))?;
        let swallowed = Arc::new(AtomicU64::new(0));
        let clients = listener.try_clone().context("duplicate a listener")?;
        let counter = swallowed.clone();
        pod.ns
            .thread("server", move || pin().map(|()| serve(&clients, &counter)))?;
        Ok(Self {
            at,
            swallowed,
            listener,
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = shutdown(self.listener.as_raw_fd(), Shutdown::Both); // Its thread then ends.
    }
}

/// Serves each connection on a thread of its own: the end of one may pass the way more slowly than
/// the start of the next.
fn serve(listener: &TcpListener, swallowed: &Arc<AtomicU64>) {
    while let Ok((mut stream, _)) = listener.accept() {
        let mut first = [0];
        // A failure here is the client's to report.
        if stream.set_nodelay(true).is_err() || stream.read_exact(&mut first).is_err() {
            continue;
        }
        match first[0] {
            ECHO => stay(move || {
                if stream.write_all(&first).is_ok() {
                    echo(stream);
                }
            }),
            _ => {
                let swallowed = swallowed.clone();
                stay(move || count(stream, &swallowed));
            }
        }
    }
}

/// On a thread of its own, which is pinned as this one.
fn stay(serve: impl FnOnce() + Send + 'static) {
    drop(thread::spawn(serve));
}

fn count(stream: TcpStream, swallowed: &AtomicU64) {
    swallow(stream, |bytes| {
        swallowed.fetch_add(bytes as u64, Ordering::Relaxed);
    });
}
