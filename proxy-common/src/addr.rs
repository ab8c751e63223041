//! Addresses, ports and protocols: network byte order inside, `core::net` types outside.

use core::fmt;
use core::hash::Hash;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::device::{Device, Node};
use crate::frontend::Namespace;

mod sock_addr;

pub use sock_addr::SockAddr;

/// An address of one family. Types with an address are generic over it and have two instances.
pub trait Addr: Copy + Eq + Ord + Hash + fmt::Debug + Send + Sync + 'static {
    /// `0.0.0.0` or `::`. Stands for "no address", because no peer of a packet has it.
    const UNSPECIFIED: Self;
    /// The kernel's number for the family.
    const AF: u8;
    const IS_IPV4: bool;
    /// The family's name in `status` and logs: `IPv4`, `IPv6`.
    const FAMILY: &'static str;
    /// The padding that values with an odd number of words need before 64-bit counters.
    type Pad: Copy + Eq + fmt::Debug + Send + Sync;
    const PAD: Self::Pad;

    fn from_ip(ip: IpAddr) -> Option<Self>;
    fn ip(self) -> IpAddr;
    fn of_device(device: &Device) -> Self;
    fn of_node(node: &Node) -> Self {
        *Self::at_node(node)
    }
    fn at_node(node: &Node) -> &Self;
    /// Returns true if the node can detect local pods by addresses of this family.
    fn is_detected_by(node: &Node) -> bool;
    /// Returns the /64 prefix of an IPv6 address if `is_asked`, because any host there has 2^64
    /// addresses (RFC 4291 §2.5.4). Returns IPv4 addresses unchanged.
    fn site_if(self, is_asked: bool) -> Self;
    /// Returns the multicast address that stands for a namespace in `CLIENTS`, whose other keys are
    /// unicast.
    fn of_namespace(namespace: Namespace) -> Self;
    /// Returns the address in four words in network byte order. An IPv4 address is the first word.
    fn words(self) -> [u32; 4];
    /// The inverse of [`Self::words`].
    fn of_words(words: [u32; 4]) -> Self;
    /// Returns the words in two registers, the first of two words in the lower half.
    #[inline(always)]
    fn registers(self) -> [u64; 2] {
        let [a, b, c, d] = self.words().map(u64::from);
        [a | b << 32, c | d << 32]
    }
    /// The inverse of [`Self::registers`].
    #[inline(always)]
    fn from_registers([first, second]: [u64; 2]) -> Self {
        Self::of_words([
            first as u32,
            (first >> 32) as u32,
            second as u32,
            (second >> 32) as u32,
        ])
    }
    /// Folds the words of the address, in wire order, into `seed`.
    fn fold_words(self, seed: u32, with: impl Fn(u32, u32) -> u32) -> u32;

    fn is_unspecified(self) -> bool {
        self == Self::UNSPECIFIED
    }
}

/// An IPv4 address in network byte order.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Addr4(u32);

/// An IPv6 address in network byte order, in words, because the BPF target has no unaligned loads.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Addr6([u32; 4]);

impl Addr4 {
    /// Takes four bytes of a packet, loaded as one native word.
    pub const fn from_wire(word: u32) -> Self {
        Self(word)
    }

    pub const fn wire(self) -> u32 {
        self.0
    }
}

impl Addr6 {
    /// Takes sixteen bytes of a packet, loaded as four native words.
    pub const fn from_wire(words: [u32; 4]) -> Self {
        Self(words)
    }

    pub const fn wire(self) -> [u32; 4] {
        self.0
    }
}

impl Addr for Addr4 {
    const UNSPECIFIED: Self = Self(0);
    const AF: u8 = 2;
    const IS_IPV4: bool = true;
    const FAMILY: &'static str = "IPv4";
    type Pad = u32;
    const PAD: u32 = 0;

    fn from_ip(ip: IpAddr) -> Option<Self> {
        match ip {
            IpAddr::V4(ip) => Some(ip.into()),
            IpAddr::V6(_) => None,
        }
    }

    fn ip(self) -> IpAddr {
        IpAddr::V4(self.into())
    }

    #[inline(always)]
    fn of_device(device: &Device) -> Self {
        device.addr4
    }

    #[inline(always)]
    fn at_node(node: &Node) -> &Self {
        &node.addr4
    }

    #[inline(always)]
    fn is_detected_by(node: &Node) -> bool {
        node.has(Node::DETECTS4)
    }

    #[inline(always)]
    fn site_if(self, _is_asked: bool) -> Self {
        self
    }

    #[inline(always)]
    fn of_namespace(namespace: Namespace) -> Self {
        Self((0xe000_0000 | namespace.number()).to_be())
    }

    #[inline(always)]
    fn words(self) -> [u32; 4] {
        [self.0, 0, 0, 0]
    }

    #[inline(always)]
    fn of_words([first, ..]: [u32; 4]) -> Self {
        Self(first)
    }

    #[inline(always)]
    fn fold_words(self, seed: u32, with: impl Fn(u32, u32) -> u32) -> u32 {
        with(seed, self.0)
    }
}

impl Addr for Addr6 {
    const UNSPECIFIED: Self = Self([0; 4]);
    const AF: u8 = 10;
    const IS_IPV4: bool = false;
    const FAMILY: &'static str = "IPv6";
    type Pad = ();
    const PAD: () = ();

    fn from_ip(ip: IpAddr) -> Option<Self> {
        match ip {
            IpAddr::V4(_) => None,
            IpAddr::V6(ip) => Some(ip.into()),
        }
    }

    fn ip(self) -> IpAddr {
        IpAddr::V6(self.into())
    }

    #[inline(always)]
    fn of_device(device: &Device) -> Self {
        device.addr6
    }

    #[inline(always)]
    fn at_node(node: &Node) -> &Self {
        &node.addr6
    }

    #[inline(always)]
    fn is_detected_by(node: &Node) -> bool {
        node.has(Node::DETECTS6)
    }

    #[inline(always)]
    fn site_if(self, is_asked: bool) -> Self {
        // A mask instead of a branch, which would multiply the verifier's work.
        let mask = u32::from(is_asked).wrapping_sub(1);
        let [first, second, third, fourth] = self.0;
        Self([first, second, third & mask, fourth & mask])
    }

    #[inline(always)]
    fn of_namespace(namespace: Namespace) -> Self {
        Self([0xff00_0000_u32.to_be(), 0, 0, namespace.number().to_be()])
    }

    #[inline(always)]
    fn words(self) -> [u32; 4] {
        self.0
    }

    #[inline(always)]
    fn of_words(words: [u32; 4]) -> Self {
        Self(words)
    }

    #[inline(always)]
    fn fold_words(self, seed: u32, with: impl Fn(u32, u32) -> u32) -> u32 {
        let [a, b, c, d] = self.0;
        with(with(with(with(seed, a), b), c), d)
    }
}

impl From<Ipv4Addr> for Addr4 {
    fn from(ip: Ipv4Addr) -> Self {
        Self(u32::from_ne_bytes(ip.octets()))
    }
}

impl From<Addr4> for Ipv4Addr {
    fn from(addr: Addr4) -> Self {
        Self::from(addr.0.to_ne_bytes())
    }
}

impl From<Ipv6Addr> for Addr6 {
    fn from(ip: Ipv6Addr) -> Self {
        let bytes = ip.octets();
        let word =
            |i: usize| u32::from_ne_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        Self([word(0), word(4), word(8), word(12)])
    }
}

impl From<Addr6> for Ipv6Addr {
    fn from(addr: Addr6) -> Self {
        let mut bytes = [0; 16];
        for (four, word) in bytes.chunks_exact_mut(4).zip(addr.0) {
            four.copy_from_slice(&word.to_ne_bytes());
        }
        Self::from(bytes)
    }
}

// Numeric order, independent of this machine's endianness: tables and dumps are sorted by address.
impl Ord for Addr4 {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        u32::from_be(self.0).cmp(&u32::from_be(other.0))
    }
}

impl PartialOrd for Addr4 {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Addr6 {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        self.0.map(u32::from_be).cmp(&other.0.map(u32::from_be))
    }
}

impl PartialOrd for Addr6 {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Debug for Addr4 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.ip(), f)
    }
}

impl fmt::Debug for Addr6 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.ip(), f)
    }
}

/// A transport port in network byte order.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Port(u16);

impl Port {
    /// The wildcard port of whole-address rows.
    pub const ANY: Self = Self(0);

    pub const fn new(port: u16) -> Self {
        Self(port.to_be())
    }

    pub const fn get(self) -> u16 {
        u16::from_be(self.0)
    }

    /// Takes two bytes of a packet, loaded as one native half-word.
    pub const fn from_wire(half: u16) -> Self {
        Self(half)
    }

    pub const fn wire(self) -> u16 {
        self.0
    }
}

impl Ord for Port {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        self.get().cmp(&other.get())
    }
}

impl PartialOrd for Port {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.get(), f)
    }
}

/// An IP protocol number (IANA "Assigned Internet Protocol Numbers").
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Proto(pub u8);

impl Proto {
    /// The wildcard protocol of whole-address rows. (0 is IPv6 hop-by-hop, not a transport.)
    pub const ANY: Self = Self(0);
    pub const TCP: Self = Self(6);
    pub const UDP: Self = Self(17);
    pub const SCTP: Self = Self(132);
}

impl fmt::Display for Proto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::ANY => f.write_str("any"),
            Self::TCP => f.write_str("tcp"),
            Self::UDP => f.write_str("udp"),
            Self::SCTP => f.write_str("sctp"),
            Self(number) => fmt::Display::fmt(&number, f),
        }
    }
}

impl fmt::Debug for Proto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_order_is_network_order() {
        let addr: Addr4 = Ipv4Addr::new(10, 96, 0, 10).into();
        assert_eq!(addr.wire().to_ne_bytes(), [10, 96, 0, 10]);
        let addr: Addr6 = Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0xa).into();
        assert_eq!(addr.wire()[0].to_ne_bytes(), [0xfd, 0x00, 0x00, 0x10]);
        assert_eq!(addr.ip().to_string(), "fd00:10:96::a");
        assert_eq!(Port::new(80).wire().to_ne_bytes(), [0, 80]);
    }

    #[test]
    fn order_is_that_of_the_written_address() {
        let low: Addr4 = Ipv4Addr::new(10, 0, 0, 200).into();
        let high: Addr4 = Ipv4Addr::new(10, 0, 1, 1).into();
        assert!(low < high);
        assert!(Port::new(255) < Port::new(256));
    }
}
