//! Sockets that dial services and get backends as their peers, before there are packets.

use crate::addr::{Addr, Addr4, Addr6, Port, Proto, SockAddr};
use crate::assert_size;
use crate::frontend::FrontendKey;

/// Bits of `SOCKET_FLAGS`: sockets of other network namespaces are served too, not only those of
/// `SOCKET_NETNS`.
pub const EVERYWHERE: u32 = 1 << 0;
/// ... UDP as well as TCP.
pub const UDP: u32 = 1 << 1;
/// ... the kernel lets a program say with which error a call fails (`bpf_set_retval`).
pub const REFUSES: u32 = 1 << 2;
/// ... the kernel tells a program by what name the calling thread goes (`bpf_get_current_comm`).
pub const NAMES: u32 = 1 << 3;
/// ... TCP sockets of the pods in `SOCKET_PODS` are served too, while packets are not quicker.
pub const PODS: u32 = 1 << 4;

/// The rows of `SOCKET_PODS`: a node has a few hundred pods.
pub const PODS_MAX: u32 = 4_096;
/// The only value of `SOCKET_PODS`, whose keys are ids of cgroups (`u64`), which the kernel never
/// gives twice.
pub const LED: u32 = 1;
/// The deepest place of a pod's cgroup, in levels below the root of the hierarchy.
pub const PODS_DEPTH: u32 = 8;
/// The levels below a pod's cgroup in which threads count as the pod's: a container's, and the one
/// that crun makes in it.
pub const PODS_BELOW: u32 = 2;

/// The seconds for which a UDP socket that is not connected keeps the backend of a frontend without
/// sending to it. The packet path keeps a flow that was answered for as long.
pub const KEPT_SECS: u32 = 180;

/// Value of `DIALLED`, the storage of a TCP socket: what it dialled last. The kernel frees it with
/// the socket.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialled<A: Addr> {
    /// The peer that the kernel knows. A socket that connects elsewhere later has another one.
    pub backend: SockAddr<A>,
    pub frontend: SockAddr<A>,
}
assert_size!(Dialled<Addr4> = 8 + 8);
assert_size!(Dialled<Addr6> = 20 + 20);

/// Which of a peer's two addresses a row of `UDP_SOCKETS` is found by.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Side(u8);

impl Side {
    /// By the backend's, which the kernel knows; it says what was dialled.
    pub const BACKEND: Self = Self(0);
    /// By the frontend's, which the program dials: it says who serves it. For sockets that are not
    /// connected.
    pub const FRONTEND: Self = Self(1);
}

/// Key of `UDP_SOCKETS`. A UDP socket may send to many Services, so its storage has no room for all
/// of them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SocketKey<A: Addr> {
    /// The kernel's number of the socket, never given twice; the lower half first.
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

    /// Returns the number that `SO_COOKIE` tells.
    pub const fn cookie(&self) -> u64 {
        self.cookie[0] as u64 | (self.cookie[1] as u64) << 32
    }
}

/// Value of `UDP_SOCKETS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Socket<A: Addr> {
    /// The peer on the other side of the key's.
    pub at: SockAddr<A>,
    pub service: FrontendKey<A>,
    /// When the socket was last translated to it: seconds since boot.
    pub last_secs: u32,
}

/// In the place of that for a socket that was connected to the frontend: from another backend it
/// takes no answers.
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
