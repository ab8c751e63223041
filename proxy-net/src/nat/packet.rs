//! The packets between pods, all at once: each field holds every value that a packet may still have there.

use std::iter;
use std::net::IpAddr;

use ipnet::IpNet;

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

/// The packets that reach a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packets {
    pub(super) family: Family,
    pub(super) source: Vec<IpNet>,
    pub(super) destination: Vec<IpNet>,
    pub(super) mark: Mark,
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

    /// Returns true if packets of this family pass the tables of that family.
    pub(super) fn passes(self, tables: TableFamily) -> bool {
        match tables {
            TableFamily::Inet => true,
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

impl Packets {
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
    fn header(&self, offset: usize, condition: &Condition) -> (Share, Vec<IpNet>, Vec<IpNet>) {
        let (source_at, destination_at, len) = self.family.addresses();
        let (of_source, source) = kept(&self.source, &condition.bits(offset, source_at, len));
        let (of_destination, destination) = kept(&self.destination, &condition.bits(offset, destination_at, len));
        let is_address = |at: usize| {
            (source_at..source_at + len).contains(&at) || (destination_at..destination_at + len).contains(&at)
        };
        let mut asked = (offset..).zip(&condition.mask);
        let of_others = if asked.any(|(at, mask)| *mask != 0 && !is_address(at)) { Share::Some } else { Share::All };
        let share = [of_source, of_destination, of_others].into_iter().fold(Share::All, Share::and);
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

    /// Returns the bits of an address in the header. The comparison begins at `offset`, the address at `at`.
    fn bits(&self, offset: usize, at: usize, len: usize) -> Bits {
        let byte = |from: &[u8], at: usize| at.checked_sub(offset).and_then(|at| from.get(at)).copied().unwrap_or(0);
        let all = |from: &[u8]| (at..at + len).map(|at| byte(from, at)).collect();
        Bits { mask: all(&self.mask), value: all(&self.value) }
    }
}

/// Returns the share of addresses with these bits, and the networks of those addresses.
fn kept(nets: &[IpNet], bits: &Bits) -> (Share, Vec<IpNet>) {
    let leading = bits.mask.iter().map(|byte| byte.leading_ones()).collect::<Vec<_>>();
    let whole = leading.iter().take_while(|ones| **ones == 8).count();
    let len = 8 * whole as u32 + leading.get(whole).copied().unwrap_or(0);
    let is_prefix = bits.mask.iter().map(|byte| byte.count_ones()).sum::<u32>() == len;
    if iter::zip(&bits.value, &bits.mask).any(|(value, mask)| value & !mask != 0) {
        return (Share::None, Vec::new());
    }
    let Some(asked) = net(&bits.value, len) else { return (Share::Some, nets.to_vec()) };
    let kept: Vec<_> = nets.iter().filter_map(|net| common(net, &asked)).collect();
    let share = match kept.is_empty() {
        true => Share::None,
        false if is_prefix && kept == nets => Share::All,
        false => Share::Some,
    };
    (share, kept)
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
