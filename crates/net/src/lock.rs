//! The lock that limits a network namespace to one running kpx instance.

use std::io::{self, Read};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::unistd::Uid;

/// The name of the abstract socket that serves as the lock. `/proc/net/unix` shows it as `@kpx`.
pub const NAME: &str = "kpx";

/// Takes the lock of this network namespace. Dropping the result releases the lock.
///
/// The lock is an abstract socket, which belongs to the network namespace. The kernel releases it
/// when the process ends for any reason.
pub fn take() -> Result<UnixListener> {
    let name = SocketAddr::from_abstract_name(NAME).context("name the lock")?;
    UnixListener::bind_addr(&name).context(
        "another kpx is running on this host, or another program holds the abstract socket @kpx",
    )
}

/// The abstract socket at which a successor requests the lock from a holder that is only waiting.
const LEAVES: &str = "kpx-leaves";
/// The maximum time to wait for the lock's holder, which may be at its last step.
const PATIENCE: Duration = Duration::from_secs(60);

/// Takes the lock like [`take`], and also from a holder that releases it for a successor.
pub fn take_over() -> Result<UnixListener> {
    let taken = take();
    let Err(error) = taken else { return taken };
    let name = SocketAddr::from_abstract_name(LEAVES).context("name the lock")?;
    let Ok(mut stream) = UnixStream::connect_addr(&name) else {
        return Err(error);
    };
    stream
        .set_read_timeout(Some(PATIENCE))
        .context("wait for the lock")?;
    // The holder writes nothing, and closes the connection after it has released the lock.
    let _closed = stream.read(&mut [0]);
    take()
}

/// The listener for successors that request the lock. Drop the listener after the lock.
#[derive(Debug)]
pub struct Leaving {
    listener: tokio::net::UnixListener,
    successors: Vec<tokio::net::UnixStream>,
}

impl Leaving {
    pub fn listen() -> io::Result<Self> {
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(LEAVES)?)?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener: tokio::net::UnixListener::from_std(listener)?,
            successors: Vec::new(),
        })
    }

    /// Waits until a process of this user (root) requests the lock. Connections of other users'
    /// processes are ignored. Cancel-safe.
    pub async fn asked(&mut self) -> io::Result<()> {
        loop {
            let (stream, _) = self.listener.accept().await?;
            if getsockopt(&stream, PeerCredentials)
                .is_ok_and(|peer| peer.uid() == Uid::effective().as_raw())
            {
                self.successors.push(stream);
                return Ok(());
            }
        }
    }
}
