//! Queries tables of legacy iptables through socket options (linux/netfilter_ipv4/ip_tables.h,
//! ip6_tables.h).
#![allow(
    unsafe_code,
    reason = "the kernel reads and writes the buffer of a socket option, for which no crate has a call"
)]

use std::io::{Error, Result};
use std::mem::size_of_val;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::libc::{self, c_int, socklen_t};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use super::super::packet::Family;

/// The socket options that read a table's description and its entries.
pub(super) const GET_INFO: c_int = 64;
pub(super) const GET_ENTRIES: c_int = 65;

/// A socket for queries. The kernel requires CAP_NET_ADMIN and accepts any socket of the family.
pub(super) struct Asker {
    socket: OwnedFd,
    level: c_int,
}

impl Asker {
    pub(super) fn new(family: Family) -> Result<Self> {
        let (domain, level) = match family {
            Family::V4 => (AddressFamily::Inet, libc::IPPROTO_IP),
            Family::V6 => (AddressFamily::Inet6, libc::IPPROTO_IPV6),
        };
        Ok(Self {
            socket: socket(domain, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?,
            level,
        })
    }

    /// Sends the request in `buffer` to the kernel, which overwrites it with the answer.
    pub(super) fn ask(&self, option: c_int, buffer: &mut [u8]) -> Result<()> {
        let mut len = size_of_val(buffer) as socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to `buffer`, and both variables outlive the
        // call.
        let result = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                self.level,
                option,
                buffer.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(Error::last_os_error())
        }
    }
}
