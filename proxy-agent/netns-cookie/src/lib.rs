//! The kernel's number of a network namespace, never given twice (`SO_NETNS_COOKIE`, Linux 5.14): what BPF programs know
//! of a socket's, by `bpf_get_netns_cookie`.

use std::io::{Error, Result};
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;

/// Of include/uapi/asm-generic/socket.h.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// That of this thread's network namespace.
pub fn netns_cookie() -> Result<u64> {
    // Any socket has one.
    let socket = UnixDatagram::unbound()?;
    let (mut cookie, mut len) = (0_u64, size_of::<u64>() as libc::socklen_t);
    // SAFETY: the kernel writes at most `len` bytes to `cookie`, and both live on.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, (&raw mut cookie).cast(), &raw mut len)
    };
    if result == 0 { Ok(cookie) } else { Err(Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_has_one() {
        let cookie = netns_cookie().unwrap();
        assert_ne!(cookie, 0);
        assert_eq!(netns_cookie().unwrap(), cookie);
    }
}
