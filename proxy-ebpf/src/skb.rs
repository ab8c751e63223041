//! Access to a packet (`__sk_buff`). Writes go through the kernel's helpers, which handle nonlinear
//! packets and checksums that the device completes. So do all reads but [`Skb::peek`].

mod foreign;
mod found;
mod mark;

use core::mem::{MaybeUninit, transmute};
use core::ptr::null_mut;

use aya_ebpf::bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_NET;
use aya_ebpf::bindings::{__sk_buff, BPF_F_DONT_FRAGMENT, BPF_F_INGRESS, BPF_F_TUNINFO_IPV6};
use aya_ebpf::helpers::generated::{
    bpf_csum_update, bpf_redirect, bpf_redirect_neigh, bpf_redirect_peer, bpf_skb_adjust_room,
    bpf_skb_change_head, bpf_skb_change_tail, bpf_skb_get_tunnel_key, bpf_skb_load_bytes,
    bpf_skb_set_tunnel_key,
};
use aya_ebpf::programs::TcContext;
use aya_ebpf::programs::sk_buff::SkBuff;
use proxy_common::counter::Reason;
use proxy_common::device::{HANDED_OVER_MARK, INJECTED_MARK, INJECTED_MASK};
use proxy_common::hook::{HookId, PacketHook};

use self::mark::{MADE_HERE, MARKS};
use crate::outcome::{Action, Outcome};
use crate::setting::EXPOSES_PACKET_MARK;

pub use self::found::{Found, FragmentPart};
pub use self::mark::PacketMark;

/// Length of an Ethernet header.
pub const ETH_LEN: u32 = 14;

/// The link header, by kind of device, with its length in bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum LinkHeader {
    Ethernet = ETH_LEN,
    /// Tunnels and the like: packets start with their IP header.
    None = 0,
}

impl LinkHeader {
    #[inline(always)]
    pub fn len(self) -> u32 {
        self as u32
    }
}

/// IEEE 802.3.
#[derive(Clone, Copy)]
#[repr(C)]
struct EthernetHeader {
    dst: [u8; 6],
    src: [u8; 6],
    ethertype: u16,
}

/// The kernel's `struct bpf_tunnel_key`, without the local address of Linux 6.0.
#[derive(Clone, Copy)]
#[repr(C)]
struct TunnelKey {
    id: u32,
    /// An IPv4 address in host byte order, or an IPv6 address in network byte order.
    remote: [u32; 4],
    tos: u8,
    ttl: u8,
    ext: u16,
    label: u32,
}

impl TunnelKey {
    /// The hop limit of outer headers (RFC 1700 p. 64).
    const TTL: u8 = 64;

    #[inline(always)]
    fn to(remote: [u32; 4], is_v4: bool) -> Self {
        let remote = if is_v4 {
            [u32::from_be(remote[0]), 0, 0, 0]
        } else {
            remote
        };
        Self {
            id: 0,
            remote,
            tos: 0,
            ttl: Self::TTL,
            ext: 0,
            label: 0,
        }
    }

    #[inline(always)]
    fn remote(&self, is_v4: bool) -> [u32; 4] {
        if is_v4 {
            [self.remote[0].to_be(), 0, 0, 0]
        } else {
            self.remote
        }
    }
}

#[inline(always)]
fn tunnel_family(is_v4: bool) -> u64 {
    if is_v4 { 0 } else { BPF_F_TUNINFO_IPV6.into() }
}

/// Reads a field of the context. The compiler may merge this read with the read of another field.
macro_rules! field {
    ($skb:ident.$field:ident $([$n:literal])?) => {
        // SAFETY: the kernel lends the context for the program's whole run, and this is a field of
        // it.
        unsafe { (*$skb.0).$field$([$n])? }
    };
}

/// Reads a field of the context with a separate access. Otherwise the compiler would merge the read
/// with that of another field, and the verifier would reject the computed offset.
macro_rules! field_alone {
    ($skb:ident.$field:ident) => {
        // SAFETY: the kernel lends the context for the program's whole run, and this is a field of
        // it.
        unsafe { (&raw const (*$skb.0).$field).read_volatile() }
    };
}

/// Writes a field of the context that the kernel lets tc programs write.
macro_rules! set_field {
    ($skb:ident.$field:ident $([$n:literal])?, $value:expr) => {{
        let value = $value;
        // SAFETY: the kernel lends the context for the program's whole run, and this is a field of
        // it.
        unsafe { (*$skb.0).$field$([$n])? = value };
    }};
}

#[inline(always)]
fn is_kept_in_mark() -> bool {
    EXPOSES_PACKET_MARK.get() != 0
}

/// A packet: a pointer to the program's context.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Skb(*mut __sk_buff);

impl Skb {
    #[inline(always)]
    pub fn new(ctx: &TcContext) -> Self {
        Self(ctx.skb.skb)
    }

    #[inline(always)]
    pub fn from_ptr(skb: *mut __sk_buff) -> Self {
        Self(skb)
    }

    /// The protocol, in network order.
    #[inline(always)]
    pub fn ethertype(self) -> u32 {
        field!(self.protocol)
    }

    /// Returns true if the packet is in a VLAN. The kernel treats a tag with identifier 0, which
    /// holds only a priority, as no tag (IEEE 802.1Q §6.9).
    #[inline(always)]
    pub fn is_in_vlan(self) -> bool {
        const IDENTIFIER: u32 = 0x0fff;
        field!(self.vlan_present) != 0 && field!(self.vlan_tci) & IDENTIFIER != 0
    }

    /// Returns true if the packet came in through a device, and false if the host made it.
    #[inline(always)]
    pub fn came_in(self) -> bool {
        if is_kept_in_mark() {
            return self.mark() & MADE_HERE == 0;
        }
        field!(self.ingress_ifindex) != 0
    }

    /// Interface index of the device through which the packet came in; 0 if it was made here.
    #[inline(always)]
    pub fn ingress_ifindex(self) -> u32 {
        field_alone!(self.ingress_ifindex)
    }

    /// Returns the mark that earlier hooks of this host have left on the packet.
    #[inline(always)]
    pub fn packet_mark(self) -> PacketMark {
        let made_here = if self.came_in() { 0 } else { MADE_HERE };
        PacketMark(self.noted() & MARKS | made_here)
    }

    #[inline(always)]
    fn noted(self) -> u32 {
        let noted = field!(self.tc_index);
        if is_kept_in_mark() {
            noted | self.mark()
        } else {
            noted
        }
    }

    /// Sets the mark for later hooks. Its bits may hold another value before: the kernel stores the
    /// class of another program's filter there, inside pods as well, and it survives veth.
    #[inline(always)]
    pub fn set_packet_mark(self, mark: PacketMark) {
        set_field!(self.tc_index, field!(self.tc_index) & !MARKS | mark.0);
        if is_kept_in_mark() {
            self.set_mark(self.mark() & !MARKS | mark.0);
        }
    }

    /// Removes the mark. It survives veth, and the next host must not find it.
    #[inline(always)]
    pub fn clear_packet_mark(self) {
        self.clear(MARKS);
    }

    #[inline(always)]
    fn clear(self, bits: u32) {
        set_field!(self.tc_index, field!(self.tc_index) & !bits);
        if is_kept_in_mark() {
            self.set_mark(self.mark() & !bits);
        }
    }

    #[inline(always)]
    pub fn ifindex(self) -> u32 {
        field!(self.ifindex)
    }

    #[inline(always)]
    pub fn len(self) -> u32 {
        field!(self.len)
    }

    /// Returns the number of packets on the wire: the kernel segments large packets late (GSO), and
    /// has merged received packets (GRO).
    #[inline(always)]
    pub fn segments(self) -> u32 {
        match field!(self.gso_segs) {
            0 => 1,
            segments => segments,
        }
    }

    /// Reads the value at `offset` without a helper. `None` unless all of it is in the linear part.
    #[inline(always)]
    pub fn peek<T: Copy>(self, offset: u32) -> Option<T> {
        let start = field!(self.data) as usize;
        let end = field!(self.data_end) as usize;
        let at = start + offset as usize;
        // SAFETY: the value is within the packet, where any bits are a `T`. (The kernel aligns
        // headers so that their words can be read.)
        (at + size_of::<T>() <= end).then(|| unsafe { (at as *const T).read() })
    }

    #[inline(always)]
    pub fn load<T: Copy>(self, offset: u32) -> Result<T, Reason> {
        self.buff()
            .load(offset as usize)
            .map_err(|_| Reason::Malformed)
    }

    /// Loads a value and lends it in place. The compiler would copy a large return value byte by
    /// byte.
    #[inline(always)]
    pub fn lend<T: Copy, R>(
        self,
        offset: u32,
        borrow: impl FnOnce(&mut T) -> R,
    ) -> Result<R, Reason> {
        let mut place = MaybeUninit::<T>::uninit();
        let to = place.as_mut_ptr().cast();
        let len = size_of::<T>() as u32;
        // SAFETY: the kernel writes all of the value, and nothing behind it.
        match unsafe { bpf_skb_load_bytes(self.0.cast(), offset, to, len) } {
            // SAFETY: the kernel has written the value, and any bits are valid for the types in
            // packets.
            0 => Ok(borrow(unsafe { place.assume_init_mut() })),
            _ => Err(Reason::Malformed),
        }
    }

    /// Overwrites bytes, with the flags of `bpf_skb_store_bytes`.
    #[inline(always)]
    pub fn store<T: Copy>(self, offset: u32, value: &T, flags: u32) -> Result<(), Reason> {
        self.buff()
            .store(offset as usize, value, u64::from(flags))
            .map_err(|_| Reason::Rewrite)
    }

    #[inline(always)]
    pub fn replace_l3_checksum(
        self,
        offset: u32,
        from: u32,
        to: u32,
        size: u32,
    ) -> Result<(), Reason> {
        self.buff()
            .l3_csum_replace(offset as usize, from.into(), to.into(), size.into())
            .map_err(|_| Reason::Rewrite)
    }

    #[inline(always)]
    pub fn replace_l4_checksum(
        self,
        offset: u32,
        from: u32,
        to: u32,
        flags: u32,
    ) -> Result<(), Reason> {
        self.buff()
            .l4_csum_replace(offset as usize, from.into(), to.into(), flags.into())
            .map_err(|_| Reason::Rewrite)
    }

    /// Adds a difference to the device's sum over the whole packet (CHECKSUM_COMPLETE), if there is
    /// one.
    #[inline(always)]
    pub fn add_to_sum(self, diff: u32) {
        // SAFETY: the helper takes the context and a number. It fails without such a sum.
        let _sum = unsafe { bpf_csum_update(self.0, diff) };
    }

    #[inline(always)]
    pub fn set_destination_mac(self, mac: &[u8; 6]) -> Result<(), Reason> {
        self.store(0, mac, 0)
    }

    /// Prepends an Ethernet header to a packet without link header.
    #[inline(always)]
    pub fn add_ethernet(self, dst: &[u8; 6], ethertype: u32) -> Result<(), Reason> {
        let header = EthernetHeader {
            dst: *dst,
            src: [0; 6],
            ethertype: ethertype as u16,
        };
        // SAFETY: the helper takes the context and numbers.
        match unsafe { bpf_skb_change_head(self.0, ETH_LEN, 0) } {
            0 => self.store(0, &header, 0),
            _ => Err(Reason::Rewrite),
        }
    }

    /// Reads the parsed headers from the control block: see [`Found`].
    #[inline(always)]
    pub fn found(self) -> Found {
        // SAFETY: the context is lent, and its control block is an array of five words. Volatile,
        // so that the compiler reloads a value that it wrote: in a register, the verifier would
        // keep the value's bounds.
        let word = |n: usize| unsafe { (&raw const (*self.0).cb[n]).read_volatile() };
        // SAFETY: five words are as long as a `Found`, any bits are one, and its fields are
        // integers.
        unsafe { transmute([word(0), word(1), word(2), word(3), word(4)]) }
    }

    #[inline(always)]
    pub fn set_found(self, found: Found) {
        // SAFETY: a `Found` is as long as five words, and none of its bytes is padding.
        let words: [u32; 5] = unsafe { transmute(found) };
        // SAFETY: the context is lent, and its control block, an array of five words, is the
        // program's own while it runs.
        let set = |n: usize| unsafe { (&raw mut (*self.0).cb[n]).write_volatile(words[n]) };
        set(0);
        set(1);
        set(2);
        set(3);
        set(4);
    }

    /// Stores the hook and the outcome of its fast path in the control block, for the program that
    /// the hook tail-calls.
    #[inline(always)]
    pub fn hand_over(self, hook: PacketHook, outcome: &Outcome) {
        set_field!(self.cb[0], u32::from(hook.id().0));
        set_field!(self.cb[1], outcome.0 as u32);
    }

    #[inline(always)]
    pub fn handed_over(self) -> Option<(PacketHook, Outcome)> {
        let hook = HookId(field!(self.cb[0]) as u8).known()?;
        Some((hook, Outcome(field!(self.cb[1]) as i32)))
    }

    // Separate functions: otherwise the compiler would merge several accesses, and the verifier
    // would reject the computed offset.

    #[inline(never)]
    fn mark(self) -> u32 {
        field!(self.mark)
    }

    #[inline(never)]
    fn set_mark(self, mark: u32) {
        set_field!(self.mark, mark);
    }

    /// Returns true if the frame is addressed to this host.
    #[inline(always)]
    pub fn is_ours(self) -> bool {
        const PACKET_HOST: u32 = 0;
        field_alone!(self.pkt_type) == PACKET_HOST
    }

    /// Returns true if the device has classified the frame as addressed to another host.
    #[inline(always)]
    pub fn is_anothers(self) -> bool {
        const PACKET_OTHERHOST: u32 = 3;
        field_alone!(self.pkt_type) == PACKET_OTHERHOST
    }

    /// Returns true if the packet has an IEEE 802.1Q tag. The stack removes a tag that holds only a
    /// priority; a packet that bypasses the stack would keep it.
    #[inline(never)]
    pub fn is_tagged(self) -> bool {
        field!(self.vlan_present) != 0
    }

    /// Returns the payload of each GSO segment in bytes; 0 if the kernel will not segment the
    /// packet.
    #[inline(never)]
    pub fn gso_size(self) -> u32 {
        field!(self.gso_size)
    }

    /// Removes the `len` bytes that follow the fixed part of the IP header. The kernel's offsets
    /// into the bytes behind them stay valid, including that of a checksum to be completed.
    #[inline(always)]
    pub fn cut(self, len: u32) -> Result<(), Reason> {
        // SAFETY: the helper takes the context and numbers, and refuses to cut more than there is.
        match unsafe { bpf_skb_adjust_room(self.0, -(len as i32), BPF_ADJ_ROOM_NET, 0) } {
            0 => Ok(()),
            _ => Err(Reason::Rewrite),
        }
    }

    /// Cuts or grows the packet to `len` bytes.
    #[inline(always)]
    pub fn resize(self, len: u32) -> Result<(), Reason> {
        // SAFETY: the helper takes the context and a length, which it checks.
        match unsafe { bpf_skb_change_tail(self.0, len, 0) } {
            0 => Ok(()),
            _ => Err(Reason::Rewrite),
        }
    }

    /// Sends the packet out of a device or, with `BPF_F_INGRESS`, into it.
    #[inline(always)]
    pub fn redirect(self, ifindex: u32, flags: u64) -> Action {
        // SAFETY: the helper takes numbers only; a device that does not exist costs the packet.
        Action(unsafe { bpf_redirect(ifindex, flags) } as i32)
    }

    /// Puts the packet, with an Ethernet header, into a device, as if it had come from its network.
    #[inline(always)]
    pub fn into_ingress(self, ifindex: u32) -> Action {
        self.redirect(ifindex, u64::from(BPF_F_INGRESS))
    }

    /// Redirects the packet to the peer of a paired device, in the peer's network namespace.
    #[inline(always)]
    pub fn into_peer(self, ifindex: u32) -> Action {
        // SAFETY: the helper takes numbers only; a device that is gone costs the packet.
        Action(unsafe { bpf_redirect_peer(ifindex, 0) } as i32)
    }

    /// Returns true if the packet is longer than `mtu` bytes (0: unknown), and the kernel will not
    /// segment it.
    #[inline(always)]
    pub fn is_longer_than(self, mtu: u32) -> bool {
        mtu != 0 && self.segments() == 1 && self.len() > ETH_LEN + mtu
    }

    /// Removes the route that the host chose for its packet. So the kernel routes the packet again
    /// after it comes in through lo, and fragments it as its own. Lo's MTU is larger than that of
    /// the device by which the packet leaves.
    ///
    /// The helper replaces the route by tunnel metadata, which the kernel's input path does not
    /// accept as a route (`skb_valid_dst`) and discards.
    #[inline(always)]
    pub fn route_again(self) -> Result<(), Reason> {
        // Identifier and remote address of a tunnel, the shortest form of `struct bpf_tunnel_key`.
        let mut key = [0_u32; 2];
        let size = size_of::<[u32; 2]>() as u32;
        // SAFETY: the key is ours and of that size; the kernel only reads it.
        match unsafe { bpf_skb_set_tunnel_key(self.0, (&raw mut key).cast(), size, 0) } {
            0 => Ok(()),
            _ => Err(Reason::Rewrite),
        }
    }

    /// Sets the addressee of the outer header that a tunnel device of kpx adds. The kernel
    /// fragments the outer packet unless `keeps_whole`.
    #[inline(always)]
    pub fn set_tunnel(self, to: [u32; 4], is_v4: bool, keeps_whole: bool) -> Result<(), Reason> {
        let mut key = TunnelKey::to(to, is_v4);
        let flags = tunnel_family(is_v4)
            | if keeps_whole {
                u64::from(BPF_F_DONT_FRAGMENT)
            } else {
                0
            };
        let size = size_of::<TunnelKey>() as u32;
        // SAFETY: the key is ours and of that size; the kernel only reads it.
        match unsafe { bpf_skb_set_tunnel_key(self.0, (&raw mut key).cast(), size, flags) } {
            0 => Ok(()),
            _ => Err(Reason::Rewrite),
        }
    }

    /// Returns the source of the outer header that a tunnel device of kpx has removed.
    #[inline(always)]
    pub fn tunnel_source(self, is_v4: bool) -> Option<[u32; 4]> {
        let mut key = TunnelKey::to([0; 4], is_v4);
        let size = size_of::<TunnelKey>() as u32;
        let flags = tunnel_family(is_v4);
        // SAFETY: the key is ours and of that size; the kernel writes nothing behind it.
        let result = unsafe { bpf_skb_get_tunnel_key(self.0, (&raw mut key).cast(), size, flags) };
        (result == 0).then(|| key.remote(is_v4))
    }

    #[inline(always)]
    pub fn mark_as_handed_over(self) {
        self.set_mark(self.mark() & !INJECTED_MASK | HANDED_OVER_MARK);
    }

    /// Removes the mark. Returns true if the packet had it.
    #[inline(always)]
    pub fn take_handed_over(self) -> bool {
        let is_marked = self.mark() & INJECTED_MASK == HANDED_OVER_MARK;
        if is_marked {
            self.set_mark(self.mark() & !INJECTED_MASK);
        }
        is_marked
    }

    /// Puts the packet into a device, as if it had arrived there for the host.
    #[inline(always)]
    pub fn inject(self, ifindex: u32) -> Action {
        self.set_mark(self.mark() & !INJECTED_MASK | INJECTED_MARK);
        self.redirect(ifindex, u64::from(BPF_F_INGRESS))
    }

    /// Sends the packet out through a device, to the neighbour that the route there names; the
    /// kernel resolves its link address.
    ///
    /// Passing a next hop explicitly would fail, because the packet would keep its route to the
    /// anchor. If it had to wait for the neighbour, the kernel would then take the link address
    /// from that route.
    #[inline(always)]
    pub fn redirect_neigh(self, ifindex: u32) -> Action {
        // SAFETY: the structure is null, and its size 0.
        Action(unsafe { bpf_redirect_neigh(ifindex, null_mut(), 0, 0) } as i32)
    }

    #[inline(always)]
    pub fn as_ptr(self) -> *mut __sk_buff {
        self.0
    }

    #[inline(always)]
    fn buff(self) -> SkBuff {
        SkBuff { skb: self.0 }
    }
}
