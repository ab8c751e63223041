//! The context of an event of a TCP socket. As for [`Peer`](super::peer::Peer), the verifier accepts
//! only accesses to single words, so every access is volatile, and to one field.

use core::ptr::read_volatile;

use aya_ebpf::bindings::{BPF_TCP_CLOSE, BPF_TCP_SYN_SENT, bpf_sock, bpf_sock_ops};
use aya_ebpf::helpers::generated::bpf_sock_ops_cb_flags_set;
use aya_ebpf::programs::SockOpsContext;
use proxy_common::addr::{Addr4, Addr6, Port, SockAddr};

#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Event(*mut bpf_sock_ops);

/// Reads a field of the context, as one word.
macro_rules! field {
    ($event:ident.$($field:tt)+) => {
        // SAFETY: the kernel lends the context for the program's whole run, and this is a field of
        // it.
        unsafe { read_volatile(&raw const (*$event.0).$($field)+) }
    };
}

impl Event {
    #[inline(always)]
    pub fn new(ctx: &SockOpsContext) -> Self {
        Self(ctx.ops)
    }

    #[inline(always)]
    pub fn op(self) -> u32 {
        field!(self.op)
    }

    /// Returns null for a socket that is not full, such as a request socket.
    #[inline(always)]
    pub fn sock(self) -> *mut bpf_sock {
        field!(self.__bindgen_anon_2.sk)
    }

    /// Requests callbacks for this socket. Returns false if the kernel lacks one of them.
    #[inline(always)]
    pub fn request(self, callbacks: u32) -> bool {
        let all = field!(self.bpf_sock_ops_cb_flags) | callbacks;
        // SAFETY: the helper takes the context of this call, and sets flags of its socket.
        unsafe { bpf_sock_ops_cb_flags_set(self.0, all as i32) == 0 }
    }

    /// Returns true if the kernel gives up instead of sending another SYN.
    #[inline(always)]
    pub fn is_last_timeout(self) -> bool {
        field!(self.__bindgen_anon_1.args[2]) != 0
    }

    /// Returns true if the socket waits for the answer to its SYN. An event of a new state comes before
    /// the change.
    #[inline(always)]
    pub fn is_in_syn_sent(self) -> bool {
        field!(self.state) == BPF_TCP_SYN_SENT
    }

    /// Returns true if the new state is CLOSE.
    #[inline(always)]
    pub fn closes(self) -> bool {
        field!(self.__bindgen_anon_1.args[1]) == BPF_TCP_CLOSE
    }

    /// Returns true if a sent SYN is unacknowledged, and not yet purged.
    #[inline(always)]
    pub fn has_unacked(self) -> bool {
        field!(self.packets_out) != 0
    }

    /// Returns true if the socket has received a segment.
    #[inline(always)]
    pub fn has_received(self) -> bool {
        field!(self.segs_in) != 0
    }

    #[inline(always)]
    pub fn remote4(self) -> SockAddr<Addr4> {
        SockAddr::new(
            Addr4::from_wire(field!(self.remote_ip4)),
            self.remote_port(),
        )
    }

    #[inline(always)]
    pub fn remote6(self) -> SockAddr<Addr6> {
        let word = |nth: usize| field!(self.remote_ip6[nth]);
        let words = [word(0), word(1), word(2), word(3)];
        SockAddr::new(Addr6::from_wire(words), self.remote_port())
    }

    #[inline(always)]
    fn remote_port(self) -> Port {
        // On little-endian machines the kernel shifts the port, in network byte order, into the upper
        // half of the word.
        Port::from_wire((field!(self.remote_port) >> 16) as u16)
    }
}
