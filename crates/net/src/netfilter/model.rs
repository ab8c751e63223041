//! The rules of netfilter as far as they decide what happens to a packet between pods.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The families of tables that nftables has for IP packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TableFamily {
    Inet,
    Ip,
    Ip6,
    Netdev,
}

/// The full name of a chain.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ChainName {
    pub(super) family: TableFamily,
    pub(super) table: String,
    pub(super) chain: String,
}

/// The hooks, those of forwarded packets in the packet's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Hook {
    /// The ingress or egress of devices.
    Device,
    Prerouting,
    Forward,
    Postrouting,
    /// The hook of packets to the host itself, and others.
    Input,
    Host,
}

/// The place at which the kernel calls a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Base {
    pub(super) hook: Hook,
    pub(super) priority: i32,
    pub(super) drops: bool,
    /// The chain changes addresses, and only a connection's first packet passes it.
    pub(super) is_nat: bool,
}

/// A chain; without a base, only other chains call it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) base: Option<Base>,
    /// The devices of a chain that hooks of devices call.
    pub(super) devices: Vec<String>,
    /// The number of the chain's users: of a base chain, that of its rules.
    pub(super) uses: u32,
    pub(super) rules: Vec<Rule>,
}

/// The chains of the kernel. Only tables with chains for forwarded packets also have their rules.
pub(super) type Ruleset = BTreeMap<ChainName, Chain>;

/// The parts of a rule in their order. The first condition that does not hold ends the rule.
pub(super) type Rule = Vec<Part>;

/// A part of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Condition(Condition),
    /// A condition that may or may not hold.
    Maybe,
    /// The source is none that the kernel would answer by the device of the packet; or it is one,
    /// unless `spoofed`.
    Sender {
        spoofed: bool,
    },
    /// None: to a mark that is not followed.
    SetMark(Option<MarkChange>),
    /// An effect of the packet or on it, in words that follow "may".
    Change(String),
    /// An end of the packet, in such words.
    Refuse(String),
    Verdict(Verdict),
}

/// A change of a mark: some bits stay, and then some are flipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MarkChange {
    pub(super) keep: u32,
    pub(super) flip: u32,
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
    /// The number of the protocol above IP.
    L4Proto,
    /// The kind of the route to the destination (`RTN_LOCAL` and others).
    DestinationKind,
    /// The name of a device, filled up with zeroes, on the packet's way in or out.
    InName,
    OutName,
    /// The state of the connection, as a bit (`NF_CT_STATE_BIT`).
    State,
}

/// A reason for which a packet may not arrive as it was sent, or may leave a trace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Obstacle {
    Rule {
        chain: ChainName,
        /// The rule's place in its chain, from 1 on.
        number: usize,
        what: String,
    },
    Policy(ChainName),
    /// A chain of devices, with the number of its rules.
    Device(ChainName, u32),
    TooMany,
}

/// The result of a walk.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) obstacles: BTreeSet<Obstacle>,
    /// The chains with rules that let all packets pass.
    pub(super) harmless: BTreeSet<ChainName>,
}

impl fmt::Display for TableFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inet => "inet",
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
            Self::Netdev => "netdev",
        })
    }
}

impl fmt::Display for ChainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            family,
            table,
            chain,
        } = self;
        write!(f, "chain {chain} of table {family} {table}")
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule {
                chain,
                number,
                what,
            } => write!(f, "rule {number} of {chain} may {what}"),
            Self::Policy(chain) => write!(f, "{chain} drops packets that its rules do not accept"),
            Self::Device(chain, rules) => write!(
                f,
                "{chain} may match packets at pods' devices, rules: {rules}"
            ),
            Self::TooMany => f.write_str("the rules are too many to follow"),
        }
    }
}
