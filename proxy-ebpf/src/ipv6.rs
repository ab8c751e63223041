//! IPv6.

use aya_ebpf::bindings::{BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM, bpf_fib_lookup as FibLookup};
use proxy_common::addr::{Addr6, Port, Proto, SockAddr};
use proxy_common::counter::Reason;
use proxy_macros::global_fn;

use crate::checksum::{self, Checksums, diff, sum};
use crate::header::{self, Head, Header, Headers};
use crate::net::IpVersion;
use crate::setting::HANDS_OVER;
use crate::skb::{ETH_LEN, FragmentPart, LinkHeader, Skb};
use crate::{extension, fast_path, spoof};

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

/// See [`Headers::is_hidden_and_spoofed`]; the IPv6 header is at `at`. Conntrack looks for TCP behind
/// any extension headers, and a tunnel device for its outer header.
#[global_fn(kpx_hidden6)]
fn is_hidden_and_spoofed(skb: Skb, at: u32) -> bool {
    let Ok(ip) = skb.load::<Ipv6Header>(at) else {
        return false;
    };
    let src = Addr6::from_wire(ip.src);
    let dst = Addr6::from_wire(ip.dst);
    let is_followed = || {
        let start = at + Addr6::IP_LEN;
        extension::walk(skb, ip.next_header, start).result().is_ok()
    };
    (HANDS_OVER.get() != 0 || fast_path::is_on())
        && src.is_unicast()
        && dst.is_unicast()
        && !is_followed()
        && spoof::spoofed(skb, spoof::At::Here, &src, &dst)
}

/// The usual headers: IPv6 without extension headers, and the 8 bytes that every transport header
/// has.
#[derive(Clone, Copy)]
#[repr(C)]
struct UsualHeaders {
    ip: Ipv6Header,
    ports: [u16; 2],
    more: u32,
}

/// The fields of the usual headers that a rewrite changes.
#[derive(Clone, Copy)]
#[repr(C)]
struct Rewritten {
    src: [u32; 4],
    dst: [u32; 4],
    ports: u32,
}

impl IpVersion for Addr6 {
    const ETHERTYPE: u32 = 0x86dd_u16.to_be() as u32;
    const IP_LEN: u32 = 40;
    const SRC_OFFSET: u32 = 8;
    const DST_OFFSET: u32 = 24;
    const ICMP: Proto = Proto(58);
    const ICMP_TYPE: u8 = 1;
    const ICMP_CODE: u8 = 4;
    const STRICT: u32 = 0;
    const ICMP_HAS_PSEUDO: bool = true;
    const CHOOSES_AGAIN: bool = true;
    const SHORT_WAYS_JUDGE: bool = false;

    #[cfg(feature = "log")]
    type Logged = [u8; 16];
    #[cfg(feature = "log")]
    fn log(self) -> [u8; 16] {
        core::array::from_fn(|n| self.wire()[n / 4].to_ne_bytes()[n % 4])
    }

    /// All but unspecified, loopback, multicast (RFC 4291 §2.4) and link-local (fe80::/10)
    /// addresses. The kernel does not forward packets from a link-local address (`ip6_forward`),
    /// which names a host only together with a link, and flows have no link.
    #[inline(always)]
    fn is_unicast(self) -> bool {
        let addr = self.wire();
        let first = u32::from_be(addr[0]);
        // Two conditions instead of four: the verifier follows both outcomes of each.
        let is_small = addr[0] == 0 && addr[1] | addr[2] | addr[3] & !1_u32.to_be() == 0;
        first >> 24 != 0xff && first >> 22 != 0xfe80 >> 6 && !is_small
    }

    /// RFC 4291 §2.5.3.
    #[inline(always)]
    fn is_loopback(self) -> bool {
        let addr = self.wire();
        addr[0] | addr[1] | addr[2] | addr[3] ^ 1_u32.to_be() == 0
    }

    /// RFC 4443 §3: destination unreachable, packet too big, time exceeded, parameter problem.
    #[inline(always)]
    fn is_icmp_error(kind: u8) -> bool {
        matches!(kind, 1..=4)
    }

    /// RFC 4443 §3.1.
    #[inline(always)]
    fn is_unreachable(kind: u8, _code: u8) -> bool {
        kind == 1
    }

    #[inline(always)]
    fn fib_addrs(fib: &mut FibLookup, src: Self, dst: Self) {
        fib.__bindgen_anon_3.ipv6_src = src.wire();
        fib.__bindgen_anon_4.ipv6_dst = dst.wire();
    }
}

impl Headers for Addr6 {
    type IpHeader = Ipv6Header;
    type Quote = [u32; 12];
    type SctpQuote = [u32; 15];

    #[inline(always)]
    fn read(skb: Skb, at: u32) -> Result<Header<Self>, Reason> {
        let ip: Ipv6Header = skb.load(at)?;
        if u32::from_be(ip.version_class_label) >> 28 != 6 {
            return Err(Reason::Malformed);
        }
        let start = at + Self::IP_LEN;
        let mut header = Header {
            at,
            src: Addr6::from_wire(ip.src),
            dst: Addr6::from_wire(ip.dst),
            proto: Proto(ip.next_header),
            l4: start,
            end: header::end(skb, start, ip.payload_len),
            part: FragmentPart::WHOLE,
            split: Proto::ANY,
            id: 0,
        };
        if !matches!(
            header.proto,
            Proto::TCP | Proto::UDP | Proto::SCTP | Self::ICMP
        ) {
            let headers = extension::walk(skb, ip.next_header, start).result()?;
            (header.proto, header.l4, header.part, header.split) = (
                headers.proto(),
                headers.l4(),
                headers.part(),
                headers.split(),
            );
            if header.part != FragmentPart::WHOLE {
                header.id = skb.load(headers.fragment() + 4)?;
            }
        }
        Ok(header)
    }

    #[inline(always)]
    fn peek(skb: Skb) -> Option<Head<Self>> {
        let UsualHeaders {
            ip,
            ports: [sport, dport],
            ..
        } = skb.peek(ETH_LEN)?;
        let len = u32::from(u16::from_be(ip.payload_len));
        let proto = Proto(ip.next_header);
        if u32::from_be(ip.version_class_label) >> 28 != 6
            || ETH_LEN + Self::IP_LEN + len > skb.len()
        {
            return None;
        }
        let (flags, numbers) = header::flags_and_numbers(skb, proto, ETH_LEN + Self::IP_LEN, len)?;
        Some(Head {
            src: SockAddr::new(Addr6::from_wire(ip.src), Port::from_wire(sport)),
            dst: SockAddr::new(Addr6::from_wire(ip.dst), Port::from_wire(dport)),
            proto,
            flags,
            numbers,
            check: 0,
            len,
        })
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
    fn is_hidden_and_spoofed(skb: Skb, link: LinkHeader) -> bool {
        is_hidden_and_spoofed(skb, link.len())
    }
}

impl Checksums for Addr6 {
    /// IPv6 has no header checksum to compensate for the new addresses in a device's sum over the
    /// whole packet (CHECKSUM_COMPLETE), so the rewrite updates that sum.
    #[inline(always)]
    fn rewrite(
        skb: Skb,
        head: &Head<Self>,
        src: &SockAddr<Self>,
        dst: &SockAddr<Self>,
    ) -> Result<(), Reason> {
        let ports = checksum::word(src.port, dst.port);
        let new = Rewritten {
            src: src.addr.wire(),
            dst: dst.addr.wire(),
            ports,
        };
        let sum = u64::from(checksum::diff_words(&head.src.addr.wire(), &new.src))
            + u64::from(checksum::diff_words(&head.dst.addr.wire(), &new.dst));
        let diff = ((sum & 0xffff_ffff) + (sum >> 32)) as u32;
        checksum::replace_checksum(skb, head, ports, diff)?;
        skb.add_to_sum(diff);
        skb.store(ETH_LEN + Self::SRC_OFFSET, &new, 0)
    }

    #[inline(always)]
    fn store_quoted_addr(
        skb: Skb,
        at: u32,
        place: u32,
        check: u32,
        from: Self,
        to: Self,
    ) -> Result<(), Reason> {
        skb.replace_l4_checksum(check, 0, diff(&from.wire(), &to.wire()), 0)?;
        skb.store(at + place, &to.wire(), 0)
    }

    /// IPv6 has no header checksum to compensate for the new address in a device's sum over the
    /// whole packet, so `BPF_F_RECOMPUTE_CSUM` updates that sum.
    #[inline(always)]
    fn store_addr(skb: Skb, at: u32, place: u32, _from: Self, to: Self) -> Result<(), Reason> {
        skb.store(at + place, &to.wire(), BPF_F_RECOMPUTE_CSUM)
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
            0,
            diff(&from.wire(), &to.wire()),
            flags | BPF_F_PSEUDO_HDR,
        )
    }

    #[inline(always)]
    fn pseudo_sum(src: Self, dst: Self, proto: Proto, len: u16) -> u32 {
        sum(
            &src.wire(),
            sum(
                &dst.wire(),
                sum(&[u32::from(len).to_be(), u32::from(proto.0).to_be()], 0),
            ),
        )
    }
}
