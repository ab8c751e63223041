//! The rules of netfilter, reduced to their effects on packets between pods.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The nftables families for IP packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TableFamily {
    Inet,
    Ip,
    Ip6,
    Netdev,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ChainName {
    pub(super) family: TableFamily,
    pub(super) table: String,
    pub(super) chain: String,
}

/// The hooks. The hooks of forwarded packets are in traversal order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Hook {
    /// The ingress or egress hook of devices.
    Device,
    Prerouting,
    Forward,
    Postrouting,
    /// The hook for packets to the host itself.
    Input,
    /// Every other hook.
    Host,
}

/// The hook and priority of a base chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Base {
    pub(super) hook: Hook,
    pub(super) priority: i32,
    pub(super) drops: bool,
    /// True for a chain that translates addresses; only a connection's first packet traverses it.
    pub(super) is_nat: bool,
}

/// A chain. Without a base it runs only when other chains call it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) base: Option<Base>,
    /// The devices of a chain at a device hook.
    pub(super) devices: Vec<String>,
    /// The kernel's use count; for a base chain, the number of its rules.
    pub(super) uses: u32,
    pub(super) rules: Vec<Rule>,
}

/// The kernel's chains. Rules are read only for tables with chains for forwarded packets.
pub(super) type Ruleset = BTreeMap<ChainName, Chain>;

/// The parts of a rule in order. The first condition that fails ends the rule.
pub(super) type Rule = Vec<Part>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Condition(Condition),
    /// A condition that may or may not hold.
    Maybe,
    /// A reverse-path match. It holds for packets with a spoofed source if `spoofed`, else for
    /// packets with a valid source.
    Sender {
        spoofed: bool,
    },
    /// `None` if the new mark is unknown.
    SetMark(Option<MarkChange>),
    /// An effect, in words that follow "may".
    Change(String),
    /// A refusal, in words that follow "may".
    Refuse(String),
    Verdict(Verdict),
}

/// A change of a mark: clear the bits outside `keep`, then flip the bits `flip`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MarkChange {
    pub(super) keep: u32,
    pub(super) flip: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Accept,
    Return,
    Jump(String),
    Goto(String),
    /// Continue with the next rule.
    Break,
}

/// A comparison: whether the field's masked bits equal the value, or differ from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Condition {
    pub(super) field: Field,
    pub(super) mask: Vec<u8>,
    pub(super) value: Vec<u8>,
    pub(super) equal: bool,
}

/// A packet field that a rule compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    /// The bytes of the IP header, starting at this offset.
    Header(usize),
    Mark,
    /// The netfilter number of the family (one byte).
    NfProto,
    Protocol,
    /// The transport protocol number.
    L4Proto,
    /// The type of the route to the destination, such as `RTN_LOCAL`.
    DestinationKind,
    /// The zero-padded name of the incoming or outgoing device.
    InName,
    OutName,
    /// The conntrack state, as a bit (`NF_CT_STATE_BIT`).
    State,
}

/// A reason why a packet may be refused, changed or recorded.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Obstacle {
    Rule {
        chain: ChainName,
        /// The rule's position in its chain, from 1.
        number: usize,
        what: String,
    },
    Policy(ChainName),
    /// A chain at a device hook, with the number of its rules.
    Device(ChainName, u32),
    TooMany,
}

/// The result of tracing packets through the chains.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) obstacles: BTreeSet<Obstacle>,
    /// The chains whose rules accept all packets unchanged.
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
