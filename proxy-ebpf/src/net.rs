//! What differs between IPv4 and IPv6, and nothing else: two instances of one trait.

use core::mem::zeroed;
use core::ptr::{from_mut, from_ref, null_mut};

use aya_ebpf::bindings::{
    BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM, BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_NOT_FWDED,
    BPF_FIB_LKUP_RET_SUCCESS, bpf_fib_lookup as FibLookup,
};
use aya_ebpf::helpers::generated::{bpf_csum_diff, bpf_fib_lookup};
use proxy_common::addr::{Addr, Addr4, Addr6, Proto};
use proxy_common::counter::Reason;

use crate::maps::{self, Maps};
use crate::packet::{ETH_LEN, Header, Packet, Skb};
use crate::reject::{self, Exit};
use crate::{Answer, DROP};

/// An address family, to the packet path.
pub trait Net: Addr + Maps {
    /// In network order, as `__sk_buff.protocol` has it.
    const ETHERTYPE: u32;
    /// The kernel's number for the family.
    const AF: u8;
    /// Length of a header without options or extensions.
    const IP_LEN: u32;
    /// Offsets in a frame.
    const SRC_OFFSET: u32;
    const DST_OFFSET: u32;
    /// Protocol, type and code of "port unreachable": RFC 792 p. 4, RFC 4443 §3.1.
    const ICMP: Proto;
    const ICMP_TYPE: u8;
    const ICMP_CODE: u8;
    /// An IP header, in words.
    type IpHeader: Copy;
    /// What an ICMP error quotes of a packet: its IP header and 8 bytes, in words.
    type Quote: Copy;

    /// The address as aya-log takes it.
    #[cfg(feature = "log")]
    type Logged: aya_log_ebpf::macro_support::Argument + aya_log_ebpf::macro_support::IpFormatter;
    #[cfg(feature = "log")]
    fn log(self) -> Self::Logged;

    /// Reads and checks the IP header.
    fn header(skb: Skb) -> Result<Header<Self>, Reason>;
    fn store_addr(skb: Skb, offset: u32, from: Self, to: Self) -> Result<(), Reason>;
    /// Brings a transport checksum up to date with a changed address.
    fn replace_pseudo_checksum(skb: Skb, offset: u32, flags: u32, from: Self, to: Self) -> Result<(), Reason>;
    /// A header for a packet of the host's own making, with `len` bytes behind it.
    fn ip_header(src: Self, dst: Self, proto: Proto, len: u16) -> Self::IpHeader;
    /// Sum of the pseudo header (RFC 9293 §3.1, RFC 8200 §8.1).
    fn pseudo_sum(src: Self, dst: Self, proto: Proto, len: u16) -> u32;
    /// The same for ICMP: IPv4's has no pseudo header.
    fn icmp_pseudo_sum(src: Self, dst: Self, len: u16) -> u32;
    fn fib_addrs(fib: &mut FibLookup, src: Self, dst: Self);
    /// Answers a packet that is not served: a function of its own for each family.
    fn reject(skb: Skb, exit: Exit) -> Answer;

    /// Where the kernel would forward a packet from here to `dst`.
    #[inline(always)]
    fn route(packet: &Packet<Self>, dst: Self) -> Result<NextHop, Reason> {
        // SAFETY: a plain C structure of integers.
        let mut fib: FibLookup = unsafe { zeroed() };
        fib.family = Self::AF;
        fib.l4_protocol = packet.proto.0;
        fib.ifindex = packet.skb.ifindex();
        Self::fib_addrs(&mut fib, packet.src.addr, dst);
        // SAFETY: the structure is ours, and its size is its own. Without BPF_FIB_LOOKUP_OUTPUT, which would allow
        // only routes through the anchor.
        let result =
            unsafe { bpf_fib_lookup(packet.skb.as_ptr().cast(), from_mut(&mut fib), size_of::<FibLookup>() as i32, 0) };
        match result as u32 {
            // The neighbour is asked for on the way out.
            BPF_FIB_LKUP_RET_SUCCESS | BPF_FIB_LKUP_RET_NO_NEIGH => Ok(NextHop::Device(fib.ifindex)),
            // No forwarding: to the host itself, or nowhere. The lookup does not say which.
            BPF_FIB_LKUP_RET_NOT_FWDED if maps::addr_ifindex(&dst).is_some() => Ok(NextHop::Host),
            _ => Err(Reason::NoRoute),
        }
    }
}

/// Where a packet goes next.
#[derive(Clone, Copy)]
pub enum NextHop {
    /// Up, to a socket of the host.
    Host,
    /// Out through the device of this interface index.
    Device(u32),
}

/// RFC 791 §3.1.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Ipv4Header {
    version_ihl: u8,
    tos: u8,
    total_len: u16,
    id: u16,
    fragment: u16,
    ttl: u8,
    proto: u8,
    check: u16,
    src: u32,
    dst: u32,
}

impl Net for Addr4 {
    const ETHERTYPE: u32 = 0x0800_u16.to_be() as u32;
    const AF: u8 = 2;
    const IP_LEN: u32 = 20;
    const SRC_OFFSET: u32 = ETH_LEN + 12;
    const DST_OFFSET: u32 = ETH_LEN + 16;
    const ICMP: Proto = Proto(1);
    const ICMP_TYPE: u8 = 3;
    const ICMP_CODE: u8 = 3;
    type IpHeader = Ipv4Header;
    type Quote = [u32; 7];

    #[cfg(feature = "log")]
    type Logged = [u8; 4];
    #[cfg(feature = "log")]
    fn log(self) -> [u8; 4] {
        self.wire().to_ne_bytes()
    }

    #[inline(always)]
    fn header(skb: Skb) -> Result<Header<Self>, Reason> {
        const MORE_FRAGMENTS_OR_OFFSET: u16 = 0x3fff_u16.to_be();
        let ip: Ipv4Header = skb.load(ETH_LEN)?;
        let ip_len = u32::from(ip.version_ihl & 0x0f) * 4;
        let total_len = u32::from(u16::from_be(ip.total_len));
        // A total length of 0 is a packet of more than 64 KiB on its way to segmentation.
        let lies = total_len != 0 && (total_len < ip_len + 8 || total_len > skb.len() - ETH_LEN);
        if ip.version_ihl >> 4 != 4 || ip_len < Self::IP_LEN || lies {
            return Err(Reason::Malformed);
        }
        if ip.fragment & MORE_FRAGMENTS_OR_OFFSET != 0 {
            return Err(Reason::Fragment);
        }
        if !is_unicast4(ip.src) || !is_unicast4(ip.dst) {
            return Err(Reason::NotUnicast);
        }
        Ok(Header {
            src: Addr4::from_wire(ip.src),
            dst: Addr4::from_wire(ip.dst),
            proto: Proto(ip.proto),
            l4: ETH_LEN + ip_len,
        })
    }

    #[inline(always)]
    fn store_addr(skb: Skb, offset: u32, from: Self, to: Self) -> Result<(), Reason> {
        const CHECK_OFFSET: u32 = ETH_LEN + 10;
        skb.replace_l3_checksum(CHECK_OFFSET, from.wire(), to.wire(), size_of::<u32>() as u32)?;
        skb.store(offset, &to.wire(), 0)
    }

    #[inline(always)]
    fn replace_pseudo_checksum(skb: Skb, offset: u32, flags: u32, from: Self, to: Self) -> Result<(), Reason> {
        skb.replace_l4_checksum(offset, from.wire(), to.wire(), flags | BPF_F_PSEUDO_HDR | size_of::<u32>() as u32)
    }

    #[inline(always)]
    fn ip_header(src: Self, dst: Self, proto: Proto, len: u16) -> Ipv4Header {
        const DONT_FRAGMENT: u16 = 0x4000_u16.to_be();
        let mut ip = Ipv4Header {
            version_ihl: 0x45,
            tos: 0,
            total_len: (Self::IP_LEN as u16 + len).to_be(),
            id: 0,
            fragment: DONT_FRAGMENT,
            ttl: 64,
            proto: proto.0,
            check: 0,
            src: src.wire(),
            dst: dst.wire(),
        };
        ip.check = !fold(sum(&ip, 0));
        ip
    }

    #[inline(always)]
    fn pseudo_sum(src: Self, dst: Self, proto: Proto, len: u16) -> u32 {
        let proto_len = [0, proto.0, (len >> 8) as u8, len as u8];
        sum(&[src.wire(), dst.wire(), u32::from_ne_bytes(proto_len)], 0)
    }

    #[inline(always)]
    fn icmp_pseudo_sum(_src: Self, _dst: Self, _len: u16) -> u32 {
        0
    }

    #[inline(always)]
    fn fib_addrs(fib: &mut FibLookup, src: Self, dst: Self) {
        fib.__bindgen_anon_3.ipv4_src = src.wire();
        fib.__bindgen_anon_4.ipv4_dst = dst.wire();
    }

    #[inline(always)]
    fn reject(skb: Skb, exit: Exit) -> Answer {
        reject4(skb, exit)
    }
}

/// RFC 8200 §3.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Ipv6Header {
    version_class_label: u32,
    payload_len: u16,
    next_header: u8,
    hop_limit: u8,
    src: [u32; 4],
    dst: [u32; 4],
}

impl Net for Addr6 {
    const ETHERTYPE: u32 = 0x86dd_u16.to_be() as u32;
    const AF: u8 = 10;
    const IP_LEN: u32 = 40;
    const SRC_OFFSET: u32 = ETH_LEN + 8;
    const DST_OFFSET: u32 = ETH_LEN + 24;
    const ICMP: Proto = Proto(58);
    const ICMP_TYPE: u8 = 1;
    const ICMP_CODE: u8 = 4;
    type IpHeader = Ipv6Header;
    type Quote = [u32; 12];

    #[cfg(feature = "log")]
    type Logged = [u8; 16];
    #[cfg(feature = "log")]
    fn log(self) -> [u8; 16] {
        core::array::from_fn(|n| self.wire()[n / 4].to_ne_bytes()[n % 4])
    }

    #[inline(always)]
    fn header(skb: Skb) -> Result<Header<Self>, Reason> {
        const FRAGMENT: u8 = 44;
        let ip: Ipv6Header = skb.load(ETH_LEN)?;
        let payload_len = u32::from(u16::from_be(ip.payload_len));
        // A payload length of 0 is a packet of more than 64 KiB on its way to segmentation.
        let lies = payload_len != 0 && (payload_len < 8 || payload_len > skb.len() - ETH_LEN - Self::IP_LEN);
        if u32::from_be(ip.version_class_label) >> 28 != 6 || lies {
            return Err(Reason::Malformed);
        }
        if ip.next_header == FRAGMENT {
            return Err(Reason::Fragment);
        }
        if !is_unicast6(&ip.src) || !is_unicast6(&ip.dst) {
            return Err(Reason::NotUnicast);
        }
        Ok(Header {
            src: Addr6::from_wire(ip.src),
            dst: Addr6::from_wire(ip.dst),
            proto: Proto(ip.next_header),
            l4: ETH_LEN + Self::IP_LEN,
        })
    }

    /// IPv6 has no header checksum, so nothing makes up for the changed address in a checksum that the device took over
    /// the whole packet: `BPF_F_RECOMPUTE_CSUM` does.
    #[inline(always)]
    fn store_addr(skb: Skb, offset: u32, _from: Self, to: Self) -> Result<(), Reason> {
        skb.store(offset, &to.wire(), BPF_F_RECOMPUTE_CSUM)
    }

    #[inline(always)]
    fn replace_pseudo_checksum(skb: Skb, offset: u32, flags: u32, from: Self, to: Self) -> Result<(), Reason> {
        let (from, to) = (from.wire(), to.wire());
        let size = size_of::<[u32; 4]>() as u32;
        // SAFETY: both buffers are ours and of that size, a multiple of four.
        let diff = unsafe { bpf_csum_diff(from.as_ptr().cast_mut(), size, to.as_ptr().cast_mut(), size, 0) };
        skb.replace_l4_checksum(offset, 0, diff as u32, flags | BPF_F_PSEUDO_HDR)
    }

    #[inline(always)]
    fn ip_header(src: Self, dst: Self, proto: Proto, len: u16) -> Ipv6Header {
        Ipv6Header {
            version_class_label: 0x6000_0000_u32.to_be(),
            payload_len: len.to_be(),
            next_header: proto.0,
            hop_limit: 64,
            src: src.wire(),
            dst: dst.wire(),
        }
    }

    #[inline(always)]
    fn pseudo_sum(src: Self, dst: Self, proto: Proto, len: u16) -> u32 {
        sum(&src.wire(), sum(&dst.wire(), sum(&[u32::from(len).to_be(), u32::from(proto.0).to_be()], 0)))
    }

    #[inline(always)]
    fn icmp_pseudo_sum(src: Self, dst: Self, len: u16) -> u32 {
        Self::pseudo_sum(src, dst, Self::ICMP, len)
    }

    #[inline(always)]
    fn fib_addrs(fib: &mut FibLookup, src: Self, dst: Self) {
        fib.__bindgen_anon_3.ipv6_src = src.wire();
        fib.__bindgen_anon_4.ipv6_dst = dst.wire();
    }

    #[inline(always)]
    fn reject(skb: Skb, exit: Exit) -> Answer {
        reject6(skb, exit)
    }
}

#[inline(never)]
fn reject4(skb: Skb, exit: Exit) -> Answer {
    reject::run::<Addr4>(skb, exit).unwrap_or(DROP)
}

#[inline(never)]
fn reject6(skb: Skb, exit: Exit) -> Answer {
    reject::run::<Addr6>(skb, exit).unwrap_or(DROP)
}

/// Neither 0/8, 127/8, 169.254/16 nor multicast, reserved or broadcast (RFC 6890).
#[inline(always)]
fn is_unicast4(addr: u32) -> bool {
    let addr = u32::from_be(addr);
    let first = addr >> 24;
    first != 0 && first != 127 && first < 224 && addr >> 16 != 0xa9fe
}

/// Neither unspecified, loopback, link-local (fe80::/10) nor multicast (RFC 4291 §2.4).
#[inline(always)]
fn is_unicast6(addr: &[u32; 4]) -> bool {
    let first = u32::from_be(addr[0]);
    let is_small = addr[0] == 0 && addr[1] == 0 && addr[2] == 0 && u32::from_be(addr[3]) < 2;
    first >> 24 != 0xff && first >> 22 != 0xfe80 >> 6 && !is_small
}

/// One's complement sum (RFC 1071) of a value whose size is a multiple of four, added to `seed`.
#[inline(always)]
pub fn sum<T: Copy>(value: &T, seed: u32) -> u32 {
    // SAFETY: the buffer is ours and of that size; the kernel only reads it.
    unsafe { bpf_csum_diff(null_mut(), 0, from_ref(value).cast_mut().cast(), size_of::<T>() as u32, seed) as u32 }
}

/// Folds a sum to the 16 bits of a checksum field, not yet inverted.
#[inline(always)]
pub fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    (sum + (sum >> 16)) as u16
}
