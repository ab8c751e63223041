//! IPv4.

use aya_ebpf::bindings::{BPF_F_PSEUDO_HDR, bpf_fib_lookup as FibLookup};
use proxy_common::addr::{Addr4, Port, Proto, SockAddr};
use proxy_common::counter::Reason;
use proxy_common::device::Device;

use crate::checksum::{self, Checksums, fold, sum};
use crate::header::{self, Head, Header, Headers};
use crate::net::IpVersion;
use crate::skb::{ETH_LEN, FragmentPart, LinkHeader, Skb};

/// The offset of the checksum in the header.
const CHECK_OFFSET: u32 = 10;

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

/// The usual headers: IP without options, and the 8 bytes that every transport header has.
#[derive(Clone, Copy)]
#[repr(C)]
struct UsualHeaders {
    ip: Ipv4Header,
    ports: [u16; 2],
    more: u32,
}

impl IpVersion for Addr4 {
    const ETHERTYPE: u32 = 0x0800_u16.to_be() as u32;
    const IP_LEN: u32 = 20;
    const SRC_OFFSET: u32 = 12;
    const DST_OFFSET: u32 = 16;
    const ICMP: Proto = Proto(1);
    const ICMP_TYPE: u8 = 3;
    const ICMP_CODE: u8 = 3;
    const STRICT: u32 = Device::STRICT4;
    const ICMP_HAS_PSEUDO: bool = false;
    const CHOOSES_AGAIN: bool = false;
    const SHORT_WAYS_JUDGE: bool = true;

    #[cfg(feature = "log")]
    type Logged = [u8; 4];
    #[cfg(feature = "log")]
    fn log(self) -> [u8; 4] {
        self.wire().to_ne_bytes()
    }

    /// As in the kernel (`ip_route_input_slow`): all but 0.0.0.0, 127/8, multicast and
    /// 255.255.255.255. The kernel treats 240/4 and 169.254/16 as ordinary addresses.
    #[inline(always)]
    fn is_unicast(self) -> bool {
        let addr = u32::from_be(self.wire());
        // The range below 127/8 comes first, because most pods are in it. The other ranges are
        // below and above multicast.
        addr.wrapping_sub(1) < 0x7eff_ffff
            || addr.wrapping_sub(0x8000_0000) < 0x6000_0000
            || addr.wrapping_sub(0xf000_0000) < 0x0fff_ffff
    }

    /// RFC 1122 §3.2.1.3.
    #[inline(always)]
    fn is_loopback(self) -> bool {
        u32::from_be(self.wire()) >> 24 == 127
    }

    /// RFC 792: destination unreachable, time exceeded, parameter problem. (Without redirect, which
    /// concerns a route to the Service's address. Only this host has it.)
    #[inline(always)]
    fn is_icmp_error(kind: u8) -> bool {
        matches!(kind, 3 | 11 | 12)
    }

    /// RFC 792. Code 4 is about the packet's length (RFC 1191).
    #[inline(always)]
    fn is_unreachable(kind: u8, code: u8) -> bool {
        kind == 3 && code != 4
    }

    #[inline(always)]
    fn fib_addrs(fib: &mut FibLookup, src: Self, dst: Self) {
        fib.__bindgen_anon_3.ipv4_src = src.wire();
        fib.__bindgen_anon_4.ipv4_dst = dst.wire();
    }
}

impl Headers for Addr4 {
    type IpHeader = Ipv4Header;
    type Quote = [u32; 7];
    type SctpQuote = [u32; 10];

    #[inline(always)]
    fn read(skb: Skb, at: u32) -> Result<Header<Self>, Reason> {
        let ip: Ipv4Header = skb.load(at)?;
        let ip_len = u32::from(ip.version_ihl & 0x0f) * 4;
        if ip.version_ihl >> 4 != 4 || ip_len < Self::IP_LEN {
            return Err(Reason::Malformed);
        }
        let fragment = u16::from_be(ip.fragment);
        Ok(Header {
            at,
            src: Addr4::from_wire(ip.src),
            dst: Addr4::from_wire(ip.dst),
            proto: Proto(ip.proto),
            l4: at + ip_len,
            end: header::end(skb, at, ip.total_len),
            part: FragmentPart::of(fragment & 0x1fff, fragment & 0x2000),
            split: Proto(ip.proto),
            id: ip.id.into(),
        })
    }

    #[inline(always)]
    fn peek(skb: Skb) -> Option<Head<Self>> {
        const FRAGMENT: u16 = 0x3fff_u16.to_be();
        let UsualHeaders {
            ip,
            ports: [sport, dport],
            ..
        } = skb.peek(ETH_LEN)?;
        let len = u32::from(u16::from_be(ip.total_len));
        let proto = Proto(ip.proto);
        if ip.version_ihl != 0x45 || ip.fragment & FRAGMENT != 0 || ETH_LEN + len > skb.len() {
            return None;
        }
        let len = len.checked_sub(Self::IP_LEN)?;
        let [high, low] = ip.check.to_ne_bytes();
        let (flags, numbers) = header::flags_and_numbers(skb, proto, ETH_LEN + Self::IP_LEN, len)?;
        Some(Head {
            src: SockAddr::new(Addr4::from_wire(ip.src), Port::from_wire(sport)),
            dst: SockAddr::new(Addr4::from_wire(ip.dst), Port::from_wire(dport)),
            proto,
            flags,
            numbers,
            check: u32::from_ne_bytes([ip.ttl, ip.proto, high, low]),
            len,
        })
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
    fn is_hidden_and_spoofed(_: Skb, _: LinkHeader) -> bool {
        false
    }
}

impl Checksums for Addr4 {
    /// The IP header's checksum compensates for the new addresses in a device's sum over the whole
    /// packet (CHECKSUM_COMPLETE). One store covers all bytes from that checksum to the ports.
    #[inline(always)]
    fn rewrite(
        skb: Skb,
        head: &Head<Self>,
        src: &SockAddr<Self>,
        dst: &SockAddr<Self>,
    ) -> Result<(), Reason> {
        let ports = checksum::word(src.port, dst.port);
        let src = src.addr.wire();
        let dst = dst.addr.wire();
        let diff = checksum::diff_words(&[head.src.addr.wire(), head.dst.addr.wire()], &[src, dst]);
        checksum::replace_checksum(skb, head, ports, diff)?;
        let [ttl, proto, high, low] = head.check.to_ne_bytes();
        // RFC 1624 §3.
        let sum = u32::from(!u16::from_ne_bytes([high, low])) + (diff & 0xffff) + (diff >> 16);
        let [high, low] = if diff == checksum::NO_DIFF {
            [high, low]
        } else {
            (!fold(sum)).to_ne_bytes()
        };
        skb.store(
            ETH_LEN + CHECK_OFFSET - 2,
            &[u32::from_ne_bytes([ttl, proto, high, low]), src, dst, ports],
            0,
        )
    }

    /// The quoted header's own checksum compensates for the new address, so the ICMP checksum
    /// stays.
    #[inline(always)]
    fn store_quoted_addr(
        skb: Skb,
        at: u32,
        place: u32,
        _check: u32,
        from: Self,
        to: Self,
    ) -> Result<(), Reason> {
        Self::store_addr(skb, at, place, from, to)
    }

    #[inline(always)]
    fn store_addr(skb: Skb, at: u32, place: u32, from: Self, to: Self) -> Result<(), Reason> {
        skb.replace_l3_checksum(
            at + CHECK_OFFSET,
            from.wire(),
            to.wire(),
            size_of::<u32>() as u32,
        )?;
        skb.store(at + place, &to.wire(), 0)
    }

    #[inline(always)]
    fn replace_pseudo_checksum(
        skb: Skb,
        offset: u32,
        flags: u32,
        from: Self,
        to: Self,
    ) -> Result<(), Reason> {
        skb.replace_l4_checksum(
            offset,
            from.wire(),
            to.wire(),
            flags | BPF_F_PSEUDO_HDR | size_of::<u32>() as u32,
        )
    }

    #[inline(always)]
    fn pseudo_sum(src: Self, dst: Self, proto: Proto, len: u16) -> u32 {
        let proto_len = [0, proto.0, (len >> 8) as u8, len as u8];
        sum(&[src.wire(), dst.wire(), u32::from_ne_bytes(proto_len)], 0)
    }
}
