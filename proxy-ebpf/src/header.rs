//! The headers of packets: the IP header, and the usual headers together.

use proxy_common::addr::{Addr, Proto, SockAddr};
use proxy_common::counter::Reason;
use proxy_common::flow::Signals;

use crate::net::{IpVersion, are_fit};
use crate::skb::{FragmentPart, LinkHeader, Skb};
use crate::tcp::{self, Numbers, TcpHeader, TcpStart};
use crate::udp::UDP_LEN;

/// The headers of an address family.
pub trait Headers: IpVersion {
    /// An IP header, in words.
    type IpHeader: Copy;
    /// The part of a packet that an ICMP error quotes: its IP header and 8 bytes, in words.
    type Quote: Copy;
    /// The same for SCTP: the IP header and 20 bytes.
    type SctpQuote: Copy;

    /// Reads the IP header at offset `at`, and its options or extension headers.
    fn read(skb: Skb, at: u32) -> Result<Header<Self>, Reason>;
    /// Reads the usual headers in place. `None` for any other headers: see `established.rs`.
    fn peek(skb: Skb) -> Option<Head<Self>>;
    /// Returns the header of a packet that this host generates, with `len` bytes of payload.
    fn ip_header(src: Self, dst: Self, proto: Proto, len: u16) -> Self::IpHeader;
    /// Returns true for a spoofed packet that may hide its transport header from kpx, but not from
    /// conntrack.
    fn is_hidden_and_spoofed(skb: Skb, link: LinkHeader) -> bool;

    /// Reads and checks a packet's IP header. Returns [`Reason::NotUnicast`] or [`Reason::Malformed`]
    /// for a header that no flow has.
    #[inline(always)]
    fn header(skb: Skb, link: LinkHeader) -> Result<Header<Self>, Reason> {
        let header = Self::whole_header(skb, link)?;
        if !are_fit(&header.src, &header.dst, false) {
            return Err(Reason::NotUnicast);
        }
        Ok(header)
    }

    /// The same for a packet with any addresses.
    #[inline(always)]
    fn whole_header(skb: Skb, link: LinkHeader) -> Result<Header<Self>, Reason> {
        let header = Self::read(skb, link.len())?;
        if header.l4 > header.end || header.end > skb.len() {
            return Err(Reason::Malformed);
        }
        Ok(header)
    }
}

/// The fields of an IP header, and the start of the transport header.
#[derive(Clone, Copy)]
pub struct Header<A> {
    /// The offset of the IP header in the packet, in bytes.
    pub at: u32,
    pub src: A,
    pub dst: A,
    pub proto: Proto,
    /// The offset of the transport header in the packet, in bytes.
    pub l4: u32,
    /// The end of the packet, by the length in its IP header.
    pub end: u32,
    pub part: FragmentPart,
    /// The protocol and the identification, in network byte order, that a packet's fragments share.
    pub split: Proto,
    pub id: u32,
}

/// Returns the end of a packet, from `start` and the length in its IP header (in network byte
/// order). A length of 0 belongs to a packet of more than 64 KiB that the kernel will segment.
#[inline(always)]
pub fn end(skb: Skb, start: u32, len: u16) -> u32 {
    if len == 0 && skb.len() > u16::MAX.into() {
        skb.len()
    } else {
        start + u32::from(u16::from_be(len))
    }
}

/// The usual headers of a packet: TCP or UDP directly after an IP header without options.
#[derive(Clone, Copy)]
pub struct Head<A: Addr> {
    pub src: SockAddr<A>,
    pub dst: SockAddr<A>,
    pub proto: Proto,
    /// The flags of TCP; 0 for UDP.
    pub flags: u8,
    pub numbers: Numbers,
    /// The 32-bit word of an IPv4 header that ends with the checksum.
    pub check: u32,
    /// The bytes of transport header and payload.
    pub len: u32,
}

impl<A: IpVersion> Head<A> {
    /// Returns the packet's signals for its flow's state.
    #[inline(always)]
    pub fn signals(&self) -> Signals {
        // A datagram has no flags.
        tcp::signals(self.flags)
    }

    // Copied field by field: a copy of a whole struct, or a reference for a helper, would put all
    // of `Head` into memory.

    #[inline(always)]
    pub fn src(&self) -> SockAddr<A> {
        SockAddr::new(self.src.addr, self.src.port)
    }

    #[inline(always)]
    pub fn dst(&self) -> SockAddr<A> {
        SockAddr::new(self.dst.addr, self.dst.port)
    }

    /// Returns true if SYN, FIN and RST are unset.
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        self.flags & (tcp::SYN | tcp::FIN | tcp::RST) == 0
    }

    /// Returns true if both addresses are unicast. Only such packets have entries.
    #[inline(always)]
    pub fn is_between_hosts(&self) -> bool {
        self.src.addr.is_unicast() && self.dst.addr.is_unicast()
    }
}

/// Reads TCP's flags and numbers, or those of UDP, from the transport header at offset `at`. `len`
/// counts header and payload. Returns `None` for another protocol or a truncated header.
#[inline(always)]
pub fn flags_and_numbers(skb: Skb, proto: Proto, at: u32, len: u32) -> Option<(u8, Numbers)> {
    match proto {
        Proto::TCP if len >= tcp::TCP_LEN => {
            let TcpStart { flags, numbers, .. } = skb.peek::<TcpHeader>(at)?.start;
            Some((flags, numbers))
        }
        Proto::UDP if len >= UDP_LEN => Some((0, Numbers::NONE)),
        _ => None,
    }
}
