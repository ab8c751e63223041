//! Reads the cookie of a network namespace, which the kernel never reuses (`SO_NETNS_COOKIE`, Linux
//! 5.14). BPF programs read it with `bpf_get_netns_cookie`.

use std::io::{Error, Result};
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;

use anyhow::Context;

/// The option's number in include/uapi/asm-generic/socket.h.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// Returns the cookie of this thread's network namespace.
pub(crate) fn netns_cookie() -> Result<u64> {
    let socket = UnixDatagram::unbound()?;
    let mut cookie = 0_u64;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `cookie`, and both variables outlive the
    // call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut len,
        )
    };
    if result == 0 {
        Ok(cookie)
    } else {
        Err(Error::last_os_error())
    }
}

/// Returns true if this thread is in the initial network namespace, which contains all processes of
/// a machine without containers.
pub fn is_first_namespace() -> anyhow::Result<bool> {
    // The kernel assigns cookies in sequence (net/core/net_namespace.c).
    Ok(netns_cookie().context("read the cookie of this network namespace")? == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_has_a_cookie() {
        let cookie = netns_cookie().unwrap();
        assert_ne!(cookie, 0);
        assert_eq!(netns_cookie().unwrap(), cookie);
    }
}
