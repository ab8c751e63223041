//! The context of a socket call: its address, and its socket. The verifier accepts only accesses to
//! single words of the context, and only to those of the hook's family. So every access is
//! volatile, and to one field. This module also has the other unsafe calls of helpers.

use core::ptr::{read_volatile, write_volatile};

use aya_ebpf::bindings::{bpf_sock, bpf_sock_addr};
use aya_ebpf::helpers::generated::{
    bpf_get_current_ancestor_cgroup_id, bpf_get_current_comm, bpf_get_netns_cookie,
    bpf_get_socket_cookie, bpf_set_retval,
};
use aya_ebpf::programs::SockAddrContext;
use proxy_common::addr::{Addr4, Addr6, Port, Proto, SockAddr};
use proxy_common::socket::NAMES;

use crate::setting::{SOCKET_FLAGS, SOCKET_NETNS};

/// The word before an IPv4 address that is mapped into IPv6 (RFC 4291 §2.5.5.2).
const MAPPED: u32 = 0x0000_ffff_u32.to_be();

#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Peer(*mut bpf_sock_addr);

/// Reads a field of the context, as one word.
macro_rules! field {
    ($peer:ident.$($field:tt)+) => {
        // SAFETY: the kernel lends the context for the program's whole run, and this is a field of
        // it.
        unsafe { read_volatile(&raw const (*$peer.0).$($field)+) }
    };
}

/// Reads a field of the socket behind the context, as one word.
macro_rules! sock_field {
    ($peer:ident.$($field:tt)+) => {{
        let sock = $peer.sock();
        // SAFETY: the kernel lends the socket for the whole call, and this is a field of it.
        unsafe { read_volatile(&raw const (*sock).$($field)+) }
    }};
}

/// Writes a field of the context that the kernel lets programs of this kind write.
macro_rules! set_field {
    ($peer:ident.$($field:tt)+) => {
        // SAFETY: the kernel lends the context for the program's whole run, and this is a field of
        // it.
        |word: u32| unsafe { write_volatile(&raw mut (*$peer.0).$($field)+, word) }
    };
}

impl Peer {
    #[inline(always)]
    pub fn new(ctx: &SockAddrContext) -> Self {
        Self(ctx.sock_addr)
    }

    #[inline(always)]
    pub fn proto(self) -> Proto {
        // The served protocols are below 256.
        let proto = field!(self.protocol);
        if proto > 0xff {
            Proto::ANY
        } else {
            Proto(proto as u8)
        }
    }

    /// Returns the socket's cookie.
    #[inline(always)]
    pub fn cookie(self) -> u64 {
        // SAFETY: the helper takes the context of this call, which is the kernel's own.
        unsafe { bpf_get_socket_cookie(self.0.cast()) }
    }

    /// Returns the cookie of the socket's network namespace.
    #[inline(always)]
    pub fn netns(self) -> u64 {
        // SAFETY: the helper takes the context of this call, and only reads it.
        unsafe { bpf_get_netns_cookie(self.0.cast()) }
    }

    /// Returns the interface index to which the socket is bound (`SO_BINDTODEVICE`), or 0.
    #[inline(always)]
    pub fn device(self) -> u32 {
        sock_field!(self.bound_dev_if)
    }

    /// Returns true if an IPv4 socket has a source address.
    #[inline(always)]
    pub fn is_bound4(self) -> bool {
        sock_field!(self.src_ip4) != 0
    }

    /// Returns true if an IPv6 socket has a source address.
    #[inline(always)]
    pub fn is_bound6(self) -> bool {
        let word = |nth: usize| sock_field!(self.src_ip6[nth]);
        word(0) | word(1) | word(2) | word(3) != 0
    }

    #[inline(always)]
    pub fn sock(self) -> *mut bpf_sock {
        field!(self.__bindgen_anon_1.sk)
    }

    #[inline(always)]
    pub fn v4(self) -> SockAddr<Addr4> {
        SockAddr::new(Addr4::from_wire(field!(self.user_ip4)), self.port())
    }

    #[inline(always)]
    pub fn set_v4(self, at: &SockAddr<Addr4>) {
        set_field!(self.user_ip4)(at.addr.wire());
        self.set_port(at.port);
    }

    #[inline(always)]
    pub fn v6(self) -> SockAddr<Addr6> {
        let words = [self.word(0), self.word(1), self.word(2), self.word(3)];
        SockAddr::new(Addr6::from_wire(words), self.port())
    }

    #[inline(always)]
    pub fn set_v6(self, at: &SockAddr<Addr6>) {
        let [a, b, c, d] = at.addr.wire();
        self.set_word(0, a);
        self.set_word(1, b);
        self.set_word(2, c);
        self.set_word(3, d);
        self.set_port(at.port);
    }

    #[inline(always)]
    pub fn is_mapped(self) -> bool {
        // One comparison: after three, the verifier would check what follows once for each result.
        self.word(0) | self.word(1) | self.word(2) ^ MAPPED == 0
    }

    /// The IPv4 address that is mapped.
    #[inline(always)]
    pub fn mapped(self) -> SockAddr<Addr4> {
        SockAddr::new(Addr4::from_wire(self.word(3)), self.port())
    }

    #[inline(always)]
    pub fn set_mapped(self, at: &SockAddr<Addr4>) {
        self.set_word(3, at.addr.wire());
        self.set_port(at.port);
    }

    #[inline(always)]
    fn port(self) -> Port {
        // The port is in the lower half of the word's bytes.
        Port::from_wire(field!(self.user_port) as u16)
    }

    #[inline(always)]
    fn set_port(self, port: Port) {
        set_field!(self.user_port)(port.wire().into());
    }

    /// Reads a word of the IPv6 address.
    #[inline(always)]
    fn word(self, nth: usize) -> u32 {
        field!(self.user_ip6[nth])
    }

    #[inline(always)]
    fn set_word(self, nth: usize, word: u32) {
        set_field!(self.user_ip6[nth])(word);
    }
}

#[inline(always)]
pub fn own_netns() -> u64 {
    SOCKET_NETNS.get()
}

#[inline(always)]
pub fn flags() -> u32 {
    SOCKET_FLAGS.get()
}

/// Returns the id of the calling thread's cgroup, or of its ancestor, at this level below the root;
/// 0 if the thread's cgroup is above that level.
#[inline(always)]
pub fn cgroup_at(level: u32) -> u64 {
    // SAFETY: the helper takes a number, and reads the thread that makes this call.
    unsafe { bpf_get_current_ancestor_cgroup_id(level as i32) }
}

/// Sets the error of a call that the program refuses.
#[inline(always)]
pub fn fail(errno: i32) {
    // SAFETY: the helper takes a number. If it fails, the call has the kernel's default error.
    let _set = unsafe { bpf_set_retval(-errno) };
}

/// Returns true if a kernel worker dials for a network file system (NFS, Ceph, CIFS). Kernels
/// before Linux 6.6 overwrite the dialled address, and return to the same backend while the file
/// system is mounted. The packet path serves such workers, and any process of such a name.
#[inline(never)]
pub fn is_worker() -> bool {
    if flags() & NAMES == 0 {
        return false;
    }
    let mut name = [0_u64; 2];
    // SAFETY: the helper writes at most the given number of bytes.
    let error =
        unsafe { bpf_get_current_comm(name.as_mut_ptr().cast(), size_of_val(&name) as u32) };
    let is = |start: &[u8; 8]| name[0] == u64::from_ne_bytes(*start);
    error == 0 && (is(b"kworker/") || is(b"mount.ci") || is(b"cifsd\0\0\0"))
}
