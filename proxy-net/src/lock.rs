//! The lock by which one kpx at most changes a network namespace.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use anyhow::{Context, Result};

/// The name of the abstract socket that is the lock. `/proc/net/unix` shows it behind an `@`.
pub const NAME: &str = "kpx";

/// Takes the lock of this network namespace, which holds as long as the result lives.
///
/// The lock is an abstract socket. An abstract socket belongs to the network namespace, and the kernel
/// releases it when its process ends for any reason.
pub fn take() -> Result<UnixListener> {
    let name = SocketAddr::from_abstract_name(NAME).context("name the lock")?;
    UnixListener::bind_addr(&name)
        .context("another kpx is running on this host, or another program holds the abstract socket @kpx")
}
