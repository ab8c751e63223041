//! The rules of netfilter as far as they decide what happens to a packet between pods.

use std::collections::BTreeMap;
use std::fmt;

/// The families of tables that nftables has for IP packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TableFamily {
    Inet,
    Ip,
    Ip6,
}

/// The full name of a chain.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ChainName {
    pub(super) family: TableFamily,
    pub(super) table: String,
    pub(super) chain: String,
}

/// The hooks of NAT that a forwarded packet passes, in the packet's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Hook {
    Prerouting,
    Postrouting,
}

/// The place at which the kernel calls a chain of type `nat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Base {
    pub(super) hook: Hook,
    pub(super) priority: i32,
    pub(super) drops: bool,
}

/// A chain; without a base, only other chains call it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) base: Option<Base>,
    pub(super) rules: Vec<Rule>,
}

/// The chains of the kernel. Only tables with NAT also have their rules.
pub(super) type Ruleset = BTreeMap<ChainName, Chain>;

/// The parts of a rule in their order. The first condition that does not hold ends the rule.
pub(super) type Rule = Vec<Part>;

/// A part of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Condition(Condition),
    /// A condition that may or may not hold.
    Maybe,
    SetMark,
    /// An effect on the packet, in words that follow "may".
    Change(String),
    Verdict(Verdict),
}

/// An end of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Accept,
    Return,
    Jump(String),
    Goto(String),
    /// The next rule comes.
    Break,
}

/// A comparison: the field's bits under the mask are the value, or are not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Condition {
    pub(super) field: Field,
    pub(super) mask: Vec<u8>,
    pub(super) value: Vec<u8>,
    pub(super) equal: bool,
}

/// A field of a packet that a rule compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    /// The bytes of the IP header from this offset on.
    Header(usize),
    Mark,
    /// The family as netfilter numbers it, in one byte.
    NfProto,
    /// The EtherType.
    Protocol,
    /// The kind of the route to the destination (`RTN_LOCAL` and others).
    DestinationKind,
}

/// A reason for which a packet may not arrive as it was sent.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Obstacle {
    Rule {
        chain: ChainName,
        /// The rule's place in its chain, from 1 on.
        number: usize,
        what: String,
    },
    Policy(ChainName),
    TooMany,
}

impl fmt::Display for TableFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inet => "inet",
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
        })
    }
}

impl fmt::Display for ChainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { family, table, chain } = self;
        write!(f, "chain {chain} of table {family} {table}")
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule { chain, number, what } => write!(f, "rule {number} of {chain} may {what}"),
            Self::Policy(chain) => write!(f, "{chain} drops what its rules do not accept"),
            Self::TooMany => f.write_str("the NAT rules are too many to follow"),
        }
    }
}
