//! Socket load balancing: sockets that dial Services get backends as peers before any packet
//! exists.

use crate::addr::{Addr, Addr4, Addr6, Port, Proto, SockAddr};
use crate::assert_size;
use crate::frontend::FrontendKey;

/// A bit of `SOCKET_FLAGS`: serve sockets of all network namespaces, not only of `SOCKET_NETNS`.
pub const EVERYWHERE: u32 = 1 << 0;
/// A bit of `SOCKET_FLAGS`: serve UDP as well as TCP.
pub const UDP: u32 = 1 << 1;
/// A bit of `SOCKET_FLAGS`: the kernel lets a program set a call's error (`bpf_set_retval`).
pub const REFUSES: u32 = 1 << 2;
/// A bit of `SOCKET_FLAGS`: the kernel gives a program the thread's name (`bpf_get_current_comm`).
pub const NAMES: u32 = 1 << 3;
/// A bit of `SOCKET_FLAGS`: serve TCP sockets of the pods in `SOCKET_PODS`, except while packet
/// translation is faster.
pub const PODS: u32 = 1 << 4;

/// The entries of `SOCKET_PODS`. A node has a few hundred pods.
pub const PODS_MAX: u32 = 4_096;
/// The only value of `SOCKET_PODS`. Its keys are cgroup ids (`u64`), which the kernel never reuses.
pub const LED: u32 = 1;
/// The maximum depth of a pod's cgroup below the root of the hierarchy.
pub const PODS_DEPTH: u32 = 8;
/// The levels below a pod's cgroup whose threads belong to the pod: the container's, and crun's
/// sub-cgroup.
pub const PODS_BELOW: u32 = 2;

/// The idle seconds after which an unconnected UDP socket loses its backend of a frontend. Equals
/// the packet path's timeout of an answered flow.
pub const KEPT_SECS: u32 = 180;

/// Value of `DIALLED`, a TCP socket's storage: its last dialled frontend. The kernel frees it with
/// the socket.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialled<A: Addr> {
    /// The peer in the kernel. Differs if the socket has connected elsewhere since.
    pub backend: SockAddr<A>,
    pub frontend: SockAddr<A>,
}
assert_size!(Dialled<Addr4> = 8 + 8);
assert_size!(Dialled<Addr6> = 20 + 20);

/// The peer address by which a row of `UDP_SOCKETS` is keyed.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Side(u8);

impl Side {
    /// Keyed by the backend, which is the peer in the kernel. The value is the dialled frontend.
    pub const BACKEND: Self = Self(0);
    /// Keyed by the frontend, which the local process dials. The value is its backend. For
    /// unconnected sockets.
    pub const FRONTEND: Self = Self(1);
}

/// Key of `UDP_SOCKETS`. A map rather than socket storage, because a UDP socket may send to many
/// Services.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SocketKey<A: Addr> {
    /// The kernel's socket cookie, never reused. Lower half first.
    cookie: [u32; 2],
    pub addr: A,
    pub port: Port,
    /// Always UDP.
    pub proto: Proto,
    pub side: Side,
}
assert_size!(SocketKey<Addr4> = 8 + 4 + 2 + 1 + 1);
assert_size!(SocketKey<Addr6> = 8 + 16 + 2 + 1 + 1);

impl<A: Addr> SocketKey<A> {
    #[inline(always)]
    pub const fn new(cookie: u64, at: SockAddr<A>, side: Side) -> Self {
        let cookie = [cookie as u32, (cookie >> 32) as u32];
        Self {
            cookie,
            addr: at.addr,
            port: at.port,
            proto: Proto::UDP,
            side,
        }
    }

    /// Returns the value of `SO_COOKIE`.
    pub const fn cookie(&self) -> u64 {
        self.cookie[0] as u64 | (self.cookie[1] as u64) << 32
    }
}

/// Value of `UDP_SOCKETS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Socket<A: Addr> {
    /// The peer on the other side: see [`Side`].
    pub at: SockAddr<A>,
    pub service: FrontendKey<A>,
    /// The time of the last translation, in seconds since boot.
    pub last_secs: u32,
}

/// The value of `last_secs` for a socket connected to the frontend, which accepts answers only from
/// this backend.
pub const CONNECTED: u32 = u32::MAX;

assert_size!(Socket<Addr4> = 8 + 8 + 4);
assert_size!(Socket<Addr6> = 20 + 20 + 4);

impl<A: Addr> Socket<A> {
    #[inline(always)]
    pub const fn new(at: SockAddr<A>, service: FrontendKey<A>, last_secs: u32) -> Self {
        Self {
            at,
            service,
            last_secs,
        }
    }
}
