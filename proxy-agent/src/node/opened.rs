//! Finds the connections that may skip the stack once they are open, where conntrack follows them.

use std::fmt;

use ipnet::IpNet;
use proxy_common::device::Node;
use proxy_net::netfilter::Netfilter;

use super::whole::{Among, Facts, Whole};

/// The connections between pods of this node that may skip the stack once conntrack tolerates it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// None, for these reasons.
    None(Vec<String>),
    Some(Among),
}

impl Opened {
    /// Looks what the rules do to packets of open connections. `heeds_marks`: a routing rule asks for marks.
    pub(super) fn judge(netfilter: &Netfilter, facts: &Facts, whole: &Whole, heeds_marks: bool) -> Self {
        // The rules do nothing to any packet of whole connections.
        if let Whole::Some { among, .. } = whole {
            return Self::Some(among.clone());
        }
        let Some(pods) = &facts.pods else {
            return Self::None(vec!["a pod's device belongs to another device".to_owned()]);
        };
        let mut against = Vec::new();
        for among in facts.candidates() {
            against = netfilter.judge_opened(&among.nets(), pods, heeds_marks).against;
            if against.is_empty() {
                return Self::Some(among);
            }
        }
        Self::None(against)
    }

    /// Returns the flags of the programs' [`Node`].
    pub(super) fn flags(&self) -> u32 {
        match self {
            Self::None(_) => 0,
            Self::Some(Among::All) => Node::FAST_OPENED,
            Self::Some(_) => Node::FAST_OPENED | Node::FAST_OPEN_PODS,
        }
    }

    /// Returns the networks that [`Node::FAST_OPEN_PODS`] is about.
    pub(super) fn nets(&self) -> Vec<IpNet> {
        match self {
            Self::None(_) | Self::Some(Among::All) => Vec::new(),
            Self::Some(among) => among.nets(),
        }
    }

    pub(super) fn is_none(&self) -> bool {
        matches!(self, Self::None(_))
    }
}

impl fmt::Display for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None(why) if why.is_empty() => Ok(()),
            Self::None(why) => write!(f, "; the stack sees other open connections, because {}", why.join("; ")),
            Self::Some(among) => {
                write!(f, "; open connections between this node's pods{among}, if conntrack tolerates it")
            }
        }
    }
}
