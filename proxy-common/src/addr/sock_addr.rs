//! Addresses with ports, in the form of maps and flows.

use core::cmp::Ordering;
use core::fmt;
use core::hash::{Hash, Hasher};
use core::net::SocketAddr;

use super::{Addr, Addr4, Addr6, Port};
use crate::assert_size;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct SockAddr<A: Addr> {
    pub addr: A,
    pub port: Port,
    /// Spare bytes, in which a [`Flow`](crate::flow::Flow) stores its cached route. 0 in all other
    /// values. Comparisons ignore the spare bytes, and map keys do not contain them.
    pub spare: u16,
}
assert_size!(SockAddr<Addr4> = 4 + 2 + 2);
assert_size!(SockAddr<Addr6> = 16 + 2 + 2);

impl<A: Addr> SockAddr<A> {
    #[inline(always)]
    pub const fn new(addr: A, port: Port) -> Self {
        Self {
            addr,
            port,
            spare: 0,
        }
    }

    pub fn socket_addr(&self) -> SocketAddr {
        SocketAddr::new(self.addr.ip(), self.port.get())
    }

    #[inline(always)]
    const fn named(&self) -> (&A, &Port) {
        (&self.addr, &self.port)
    }
}

impl<A: Addr> PartialEq for SockAddr<A> {
    #[inline(always)]
    fn eq(&self, other: &Self) -> bool {
        self.named() == other.named()
    }
}

impl<A: Addr> Eq for SockAddr<A> {}

impl<A: Addr> PartialOrd for SockAddr<A> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<A: Addr> Ord for SockAddr<A> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.named().cmp(&other.named())
    }
}

impl<A: Addr> Hash for SockAddr<A> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.named().hash(state);
    }
}

impl<A: Addr> fmt::Debug for SockAddr<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.socket_addr())
    }
}
