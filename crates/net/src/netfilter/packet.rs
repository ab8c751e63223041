//! Models a set of packets between pods: each field holds all values that the packets may still
//! have at a rule.

use std::collections::BTreeSet;
use std::iter;
use std::net::IpAddr;
use std::rc::Rc;

use ipnet::IpNet;
use nix::libc::{IPPROTO_ICMP, IPPROTO_ICMPV6};

use super::model::{Condition, Field, MarkChange, TableFamily};

pub(super) const RTN_LOCAL: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    V4,
    V6,
}

/// The known bits of the packets' mark, and their values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    known: u32,
    value: u32,
}

/// Bits of conntrack states (linux/netfilter/nf_conntrack_common.h). Packets of a connection that
/// conntrack tracked from the start are never `INVALID`; only packets of helpers are `RELATED`. An
/// ICMP error about an untracked connection is `INVALID`.
pub(super) const INVALID: u32 = 1;
pub(super) const ESTABLISHED: u32 = 2;
pub(super) const RELATED: u32 = 4;
pub(super) const NEW: u32 = 8;

/// The packets for which the rules are evaluated.
#[derive(Clone, Debug)]
pub(super) struct Asked<'a> {
    pub(super) sources: &'a [IpNet],
    pub(super) destinations: &'a [IpNet],
    pub(super) mark: Mark,
    pub(super) states: &'a [u32],
    pub(super) protocols: &'a [u8],
    /// The networks that send ICMP errors about the connections; empty if such errors go through
    /// the network stack.
    pub(super) reporters: &'a [IpNet],
    /// The conntrack state of these ICMP errors.
    pub(super) reports: u32,
    pub(super) devices: Devices<'a>,
    /// True if a mark that a rule sets affects the packets.
    pub(super) heeds_marks: bool,
    /// True if marks are tracked. Then a rule affects the packets only if it changes the mark.
    pub(super) knows_marks: bool,
    /// True if the sources are valid: packets come from the device through which the kernel would
    /// reply.
    pub(super) knows_senders: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packets<'a> {
    pub(super) family: Family,
    pub(super) source: Rc<[IpNet]>,
    pub(super) destination: Rc<[IpNet]>,
    pub(super) mark: Mark,
    /// The conntrack state; `None` before conntrack's hook.
    pub(super) state: Option<u32>,
    pub(super) protocol: u8,
    pub(super) devices: Devices<'a>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Devices<'a> {
    pub(super) incoming: Names<'a>,
    pub(super) outgoing: Names<'a>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Names<'a> {
    AnyBut(&'a BTreeSet<String>),
    Only(Rc<BTreeSet<String>>),
}

/// The share of a set of packets that matches a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Share {
    All,
    None,
    /// Unknown: some, all or none.
    Some,
}

/// The bits of an address that a condition compares.
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

    pub(super) fn icmp(self) -> u8 {
        match self {
            Self::V4 => IPPROTO_ICMP as u8,
            Self::V6 => IPPROTO_ICMPV6 as u8,
        }
    }

    /// Returns true if packets of this family traverse tables of the family `tables`.
    pub(super) fn passes(self, tables: TableFamily) -> bool {
        match tables {
            TableFamily::Inet | TableFamily::Netdev => true,
            TableFamily::Ip => self == Self::V4,
            TableFamily::Ip6 => self == Self::V6,
        }
    }

    /// Returns the offsets of the source and destination addresses in the IP header, and their
    /// length.
    fn addresses(self) -> (usize, usize, usize) {
        match self {
            Self::V4 => (12, 16, 4),
            Self::V6 => (8, 24, 16),
        }
    }

    /// Returns the offset of the protocol number in the IP header. Packets with extension headers
    /// go through the network stack.
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

impl<'a> Asked<'a> {
    /// Returns the packets of open connections among these networks, without ICMP errors.
    pub(super) fn new(
        nets: &'a [IpNet],
        mark: Mark,
        protocols: &'a [u8],
        devices: Devices<'a>,
    ) -> Self {
        let states = &[ESTABLISHED][..];
        let reporters = &[][..];
        Self {
            sources: nets,
            destinations: nets,
            mark,
            states,
            protocols,
            reporters,
            reports: INVALID,
            devices,
            heeds_marks: true,
            knows_marks: false,
            knows_senders: false,
        }
    }
}

impl Mark {
    pub(super) const ZERO: Self = Self {
        known: u32::MAX,
        value: 0,
    };
    pub(super) const UNKNOWN: Self = Self { known: 0, value: 0 };

    /// Returns the bits that are known and equal in both marks.
    pub(super) fn or(self, other: Self) -> Self {
        let known = self.known & other.known & !(self.value ^ other.value);
        Self {
            known,
            value: self.value & known,
        }
    }

    /// Returns the mark after a rule has kept the bits `keep` and flipped the bits `flip`.
    pub(super) fn changed(self, MarkChange { keep, flip }: MarkChange) -> Self {
        Self {
            known: self.known | !keep,
            value: (self.value & keep) ^ (flip & (self.known | !keep)),
        }
    }

    /// Returns the share of packets whose mark equals the condition's value.
    fn compared(self, condition: &Condition) -> Share {
        let bits = |bytes: &[u8]| bytes.try_into().map(u32::from_ne_bytes);
        let (Ok(mask), Ok(value)) = (bits(&condition.mask), bits(&condition.value)) else {
            return Share::Some;
        };
        if value & !mask != 0 || (self.value ^ value) & mask & self.known != 0 {
            Share::None
        } else if mask & !self.known == 0 {
            Share::All
        } else {
            Share::Some
        }
    }
}

impl Names<'_> {
    /// Returns the share of packets that match a condition on the device name, their devices, and
    /// the remaining devices.
    fn split(&self, condition: &Condition) -> (Share, Self, Self) {
        let names = match self {
            Self::AnyBut(others) => {
                return (condition.of_device(others), self.clone(), self.clone());
            }
            Self::Only(names) => names,
        };
        let (with, without): (BTreeSet<_>, BTreeSet<_>) = names
            .iter()
            .cloned()
            .partition(|name| condition.is_of_name(name));
        let share = match (with.is_empty(), without.is_empty()) {
            (true, _) => Share::None,
            (false, true) => Share::All,
            (false, false) => Share::Some,
        };
        (
            share,
            Self::Only(Rc::new(with)),
            Self::Only(Rc::new(without)),
        )
    }

    fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Only(one), Self::Only(other)) if one == other => Self::Only(one),
            (Self::Only(one), Self::Only(other)) => Self::Only(Rc::new(&*one | &*other)),
            (any @ Self::AnyBut(_), _) | (_, any) => any,
        }
    }

    pub(super) fn has(&self, name: &String) -> bool {
        match self {
            Self::AnyBut(others) => !others.contains(name),
            Self::Only(names) => names.contains(name),
        }
    }
}

impl Devices<'_> {
    pub(super) fn or(self, other: Self) -> Self {
        Self {
            incoming: self.incoming.or(other.incoming),
            outgoing: self.outgoing.or(other.outgoing),
        }
    }

    /// Restricts the devices to those of packets that match the condition, or that do not.
    fn keep(&mut self, condition: &Condition, holds: bool) -> Option<Share> {
        let names = match condition.field {
            Field::InName => &mut self.incoming,
            Field::OutName => &mut self.outgoing,
            _ => return None,
        };
        let (share, with, without) = names.split(condition);
        *names = if holds == condition.equal {
            with
        } else {
            without
        };
        Some(share)
    }

    pub(super) fn without(&self, condition: &Condition) -> Self {
        let mut rest = self.clone();
        rest.keep(condition, false);
        rest
    }
}

impl Packets<'_> {
    /// Returns the share of packets that match a condition, and restricts the set to them.
    pub(super) fn keep(&mut self, condition: &Condition) -> Share {
        let Condition { field, equal, .. } = condition;
        let share = match field {
            Field::Mark => self.mark.compared(condition),
            Field::NfProto => condition.of_constant(&[self.family.nf_proto()]),
            Field::Protocol => condition.of_constant(&self.family.ether_type().to_be_bytes()),
            Field::L4Proto => condition.of_constant(&[self.protocol]),
            Field::State => self.state.map_or(Share::Some, |state| {
                condition.of_constant(&state.to_ne_bytes())
            }),
            Field::InName | Field::OutName => {
                self.devices.keep(condition, true).unwrap_or(Share::Some)
            }
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

    /// Returns [`Share::None`] for a condition on local destinations: addresses of pods and of
    /// their clients are not the host's.
    fn destination_kind(&self, condition: &Condition) -> Share {
        let asks_local = condition.value == RTN_LOCAL.to_ne_bytes() && condition.mask == [0xff; 4];
        if asks_local && condition.equal {
            Share::None
        } else {
            Share::Some
        }
    }

    /// Returns the share of packets with a matching IP header, and the matching source and
    /// destination networks.
    fn header(&self, offset: usize, condition: &Condition) -> (Share, Rc<[IpNet]>, Rc<[IpNet]>) {
        let (source_at, destination_at, len) = self.family.addresses();
        let (of_source, source) = kept(&self.source, &condition.bits(offset, source_at, len));
        let (of_destination, destination) = kept(
            &self.destination,
            &condition.bits(offset, destination_at, len),
        );
        let protocol_at = self.family.protocol_at();
        let protocol = condition.bits(offset, protocol_at, 1);
        let is_protocol = [self.protocol & protocol.mask[0]] == protocol.value[..];
        let of_protocol = if is_protocol { Share::All } else { Share::None };
        let is_known = |at: usize| {
            let is_address = |start: usize| (start..start + len).contains(&at);
            at == protocol_at || is_address(source_at) || is_address(destination_at)
        };
        let mut asked = (offset..).zip(&condition.mask);
        let of_others = if asked.any(|(at, mask)| *mask != 0 && !is_known(at)) {
            Share::Some
        } else {
            Share::All
        };
        let share = [of_source, of_destination, of_protocol, of_others]
            .into_iter()
            .fold(Share::All, Share::and);
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
    /// Returns the share for a field that has the same value in all packets.
    fn of_constant(&self, bytes: &[u8]) -> Share {
        if bytes.len() < self.value.len() {
            return Share::Some;
        }
        let mut bits = bytes.iter().zip(iter::zip(&self.mask, &self.value));
        if bits.all(|(byte, (mask, value))| byte & mask == *value) {
            Share::All
        } else {
            Share::None
        }
    }

    /// Returns the share for a condition on the device name, which may be any name except `others`.
    fn of_device(&self, others: &BTreeSet<String>) -> Share {
        if self.exact_name().is_some_and(|name| others.contains(name)) {
            Share::None
        } else {
            Share::Some
        }
    }

    /// Returns true if this name, padded with zeroes, matches the condition.
    fn is_of_name(&self, name: &str) -> bool {
        let mut asked = iter::zip(&self.mask, &self.value);
        let mut bytes = name.bytes().chain(iter::repeat(0));
        asked.all(|(mask, value)| bytes.next().is_some_and(|byte| byte & mask == *value))
    }

    /// Returns the device name of a condition that compares the whole name and its terminator.
    fn exact_name(&self) -> Option<&str> {
        let end = self.value.iter().position(|byte| *byte == 0)?;
        let is_whole = self.mask.get(..=end)?.iter().all(|mask| *mask == 0xff);
        str::from_utf8(self.value.get(..end)?)
            .ok()
            .filter(|_| is_whole)
    }

    /// Returns the condition's bits of the header field at `at`. The comparison starts at `offset`.
    fn bits(&self, offset: usize, at: usize, len: usize) -> Bits {
        let byte = |from: &[u8], at: usize| {
            at.checked_sub(offset)
                .and_then(|at| from.get(at))
                .copied()
                .unwrap_or(0)
        };
        let all = |from: &[u8]| (at..at + len).map(|at| byte(from, at)).collect();
        Bits {
            mask: all(&self.mask),
            value: all(&self.value),
        }
    }
}

/// Returns the share of the networks' addresses that match these bits, and the matching networks.
fn kept(nets: &Rc<[IpNet]>, bits: &Bits) -> (Share, Rc<[IpNet]>) {
    if bits.mask.iter().chain(&bits.value).all(|byte| *byte == 0) {
        return (Share::All, Rc::clone(nets));
    }
    let leading = bits
        .mask
        .iter()
        .map(|byte| byte.leading_ones())
        .collect::<Vec<_>>();
    let whole = leading.iter().take_while(|ones| **ones == 8).count();
    let len = 8 * whole as u32 + leading.get(whole).copied().unwrap_or(0);
    let is_prefix = bits.mask.iter().map(|byte| byte.count_ones()).sum::<u32>() == len;
    if iter::zip(&bits.value, &bits.mask).any(|(value, mask)| value & !mask != 0) {
        return (Share::None, Rc::new([]));
    }
    let Some(asked) = net(&bits.value, len) else {
        return (Share::Some, Rc::clone(nets));
    };
    let kept: Vec<_> = nets.iter().filter_map(|net| common(net, &asked)).collect();
    let share = match kept.is_empty() {
        true => Share::None,
        false if is_prefix && kept[..] == nets[..] => Share::All,
        false => Share::Some,
    };
    (share, kept.into())
}

/// Returns the network of the first `len` bits of an address.
fn net(addr: &[u8], len: u32) -> Option<IpNet> {
    let addr = match addr.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(addr).ok()?),
        _ => IpAddr::from(<[u8; 16]>::try_from(addr).ok()?),
    };
    Some(IpNet::new(addr, u8::try_from(len).ok()?).ok()?.trunc())
}

fn common(one: &IpNet, other: &IpNet) -> Option<IpNet> {
    if other.contains(one) {
        Some(*one)
    } else {
        one.contains(other).then_some(*other)
    }
}
