//! The packets between pods, all at once: each field holds every value that a packet may still have there.

use std::collections::BTreeSet;
use std::iter;
use std::net::IpAddr;
use std::rc::Rc;

use ipnet::IpNet;
use nix::libc::{IPPROTO_ICMP, IPPROTO_ICMPV6};

use super::model::{Condition, Field, TableFamily};

/// The kind of a route to an address of the host (linux/rtnetlink.h).
pub(super) const RTN_LOCAL: u32 = 2;

/// The families of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    V4,
    V6,
}

/// The knowledge about the packets' mark. Of two, the greater knows less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Mark {
    Zero,
    Unknown,
}

/// The bits of connections' states (linux/netfilter/nf_conntrack_common.h). A packet of a connection that conntrack saw from the
/// start is not `INVALID`, and only packets of helpers are `RELATED`. An error about a connection that conntrack did not see is.
pub(super) const INVALID: u32 = 1;
pub(super) const ESTABLISHED: u32 = 2;
pub(super) const NEW: u32 = 8;

/// The packets that are asked about.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked<'a> {
    /// The networks of the packets' sources and destinations.
    pub(super) nets: &'a [IpNet],
    pub(super) mark: Mark,
    pub(super) states: &'a [u32],
    pub(super) protocols: &'a [u8],
    /// The networks of hosts that send ICMP errors about the connections, which conntrack does not know. Empty where it knows them.
    pub(super) reporters: &'a [IpNet],
    pub(super) others: Others<'a>,
}

/// The packets that reach a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packets<'a> {
    pub(super) family: Family,
    pub(super) source: Rc<[IpNet]>,
    pub(super) destination: Rc<[IpNet]>,
    pub(super) mark: Mark,
    /// The state of their connections. None before conntrack has looked.
    pub(super) state: Option<u32>,
    pub(super) protocol: u8,
    pub(super) others: Others<'a>,
}

/// The names of devices by which none of the packets comes, and by which none goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Others<'a> {
    pub(super) incoming: &'a BTreeSet<String>,
    pub(super) outgoing: &'a BTreeSet<String>,
}

/// The share of the packets for which a condition holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Share {
    All,
    None,
    /// A share that nothing tells: some, all or none.
    Some,
}

/// The bits of an address that a condition asks for.
struct Bits {
    mask: Vec<u8>,
    value: Vec<u8>,
}

impl Family {
    pub(super) fn of(net: &IpNet) -> Self {
        match net {
            IpNet::V4(_) => Self::V4,
            IpNet::V6(_) => Self::V6,
        }
    }

    /// Returns the number of ICMP.
    pub(super) fn icmp(self) -> u8 {
        match self {
            Self::V4 => IPPROTO_ICMP as u8,
            Self::V6 => IPPROTO_ICMPV6 as u8,
        }
    }

    /// Returns true if packets of this family pass the tables of that family.
    pub(super) fn passes(self, tables: TableFamily) -> bool {
        match tables {
            TableFamily::Inet | TableFamily::Netdev => true,
            TableFamily::Ip => self == Self::V4,
            TableFamily::Ip6 => self == Self::V6,
        }
    }

    /// Returns where the header has its addresses: the source's offset, the destination's, the length of each.
    fn addresses(self) -> (usize, usize, usize) {
        match self {
            Self::V4 => (12, 16, 4),
            Self::V6 => (8, 24, 16),
        }
    }

    /// Returns the offset of the protocol's number in the header. Packets with extension headers take the stack.
    fn protocol_at(self) -> usize {
        match self {
            Self::V4 => 9,
            Self::V6 => 6,
        }
    }

    fn nf_proto(self) -> u8 {
        match self {
            Self::V4 => 2,
            Self::V6 => 10,
        }
    }

    fn ether_type(self) -> u16 {
        match self {
            Self::V4 => 0x0800,
            Self::V6 => 0x86dd,
        }
    }
}

impl Packets<'_> {
    /// Returns the share for which a condition holds, and narrows the packets to those.
    pub(super) fn keep(&mut self, condition: &Condition) -> Share {
        let Condition { field, equal, .. } = condition;
        let share = match field {
            Field::Mark => match self.mark {
                Mark::Zero => condition.of_constant(&[0; 4]),
                Mark::Unknown => Share::Some,
            },
            Field::NfProto => condition.of_constant(&[self.family.nf_proto()]),
            Field::Protocol => condition.of_constant(&self.family.ether_type().to_be_bytes()),
            Field::L4Proto => condition.of_constant(&[self.protocol]),
            Field::State => self.state.map_or(Share::Some, |state| condition.of_constant(&state.to_ne_bytes())),
            Field::InName => condition.of_device(self.others.incoming),
            Field::OutName => condition.of_device(self.others.outgoing),
            Field::DestinationKind => return self.destination_kind(condition),
            Field::Header(offset) => {
                let (share, source, destination) = self.header(*offset, condition);
                if *equal {
                    (self.source, self.destination) = (source, destination);
                }
                share
            }
        };
        match share {
            Share::All if !equal => Share::None,
            Share::None if !equal => Share::All,
            share => share,
        }
    }

    /// Returns [`Share::None`] for the question of a local destination: pods' addresses are none of the host.
    fn destination_kind(&self, condition: &Condition) -> Share {
        let asks_local = condition.value == RTN_LOCAL.to_ne_bytes() && condition.mask == [0xff; 4];
        if asks_local && condition.equal { Share::None } else { Share::Some }
    }

    /// Returns the share for which bytes of the IP header are as asked, and the addresses that those packets have.
    fn header(&self, offset: usize, condition: &Condition) -> (Share, Rc<[IpNet]>, Rc<[IpNet]>) {
        let (source_at, destination_at, len) = self.family.addresses();
        let (of_source, source) = kept(&self.source, &condition.bits(offset, source_at, len));
        let (of_destination, destination) = kept(&self.destination, &condition.bits(offset, destination_at, len));
        let protocol_at = self.family.protocol_at();
        let protocol = condition.bits(offset, protocol_at, 1);
        let is_protocol = [self.protocol & protocol.mask[0]] == protocol.value[..];
        let of_protocol = if is_protocol { Share::All } else { Share::None };
        let is_known = |at: usize| {
            let is_address = |start: usize| (start..start + len).contains(&at);
            at == protocol_at || is_address(source_at) || is_address(destination_at)
        };
        let mut asked = (offset..).zip(&condition.mask);
        let of_others = if asked.any(|(at, mask)| *mask != 0 && !is_known(at)) { Share::Some } else { Share::All };
        let share = [of_source, of_destination, of_protocol, of_others].into_iter().fold(Share::All, Share::and);
        (share, source, destination)
    }
}

impl Share {
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::None, _) | (_, Self::None) => Self::None,
            (Self::All, Self::All) => Self::All,
            (Self::Some, _) | (_, Self::Some) => Self::Some,
        }
    }
}

impl Condition {
    /// Returns the share of equality for a field that all packets have alike.
    fn of_constant(&self, bytes: &[u8]) -> Share {
        if bytes.len() < self.value.len() {
            return Share::Some;
        }
        let mut bits = bytes.iter().zip(iter::zip(&self.mask, &self.value));
        if bits.all(|(byte, (mask, value))| byte & mask == *value) { Share::All } else { Share::None }
    }

    /// Returns the share of packets by a device of the name that is asked for. A name may be that of any device but `others`.
    fn of_device(&self, others: &BTreeSet<String>) -> Share {
        if self.exact_name().is_some_and(|name| others.contains(name)) { Share::None } else { Share::Some }
    }

    /// Returns the name of a device that is asked for as a whole, to the zero that ends it.
    fn exact_name(&self) -> Option<&str> {
        let end = self.value.iter().position(|byte| *byte == 0)?;
        let is_whole = self.mask.get(..=end)?.iter().all(|mask| *mask == 0xff);
        str::from_utf8(self.value.get(..end)?).ok().filter(|_| is_whole)
    }

    /// Returns the bits of a field in the header. The comparison begins at `offset`, the field at `at`.
    fn bits(&self, offset: usize, at: usize, len: usize) -> Bits {
        let byte = |from: &[u8], at: usize| at.checked_sub(offset).and_then(|at| from.get(at)).copied().unwrap_or(0);
        let all = |from: &[u8]| (at..at + len).map(|at| byte(from, at)).collect();
        Bits { mask: all(&self.mask), value: all(&self.value) }
    }
}

/// Returns the share of addresses with these bits, and the networks of those addresses.
fn kept(nets: &Rc<[IpNet]>, bits: &Bits) -> (Share, Rc<[IpNet]>) {
    if bits.mask.iter().chain(&bits.value).all(|byte| *byte == 0) {
        return (Share::All, Rc::clone(nets));
    }
    let leading = bits.mask.iter().map(|byte| byte.leading_ones()).collect::<Vec<_>>();
    let whole = leading.iter().take_while(|ones| **ones == 8).count();
    let len = 8 * whole as u32 + leading.get(whole).copied().unwrap_or(0);
    let is_prefix = bits.mask.iter().map(|byte| byte.count_ones()).sum::<u32>() == len;
    if iter::zip(&bits.value, &bits.mask).any(|(value, mask)| value & !mask != 0) {
        return (Share::None, Rc::new([]));
    }
    let Some(asked) = net(&bits.value, len) else { return (Share::Some, Rc::clone(nets)) };
    let kept: Vec<_> = nets.iter().filter_map(|net| common(net, &asked)).collect();
    let share = match kept.is_empty() {
        true => Share::None,
        false if is_prefix && kept[..] == nets[..] => Share::All,
        false => Share::Some,
    };
    (share, kept.into())
}

/// Returns the network of the leading bits of an address.
fn net(addr: &[u8], len: u32) -> Option<IpNet> {
    let addr = match addr.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(addr).ok()?),
        _ => IpAddr::from(<[u8; 16]>::try_from(addr).ok()?),
    };
    Some(IpNet::new(addr, u8::try_from(len).ok()?).ok()?.trunc())
}

/// Returns the addresses that two networks have in common: those of the smaller one, or none.
fn common(one: &IpNet, other: &IpNet) -> Option<IpNet> {
    if other.contains(one) { Some(*one) } else { one.contains(other).then_some(*other) }
}
