//! Finds the connections that may bypass the stack once they are open, on hosts with conntrack.

use std::fmt;

use ipnet::IpNet;
use proxy_common::device::Node;
use proxy_net::netfilter::Netfilter;

use super::bypass_connections::{Among, Bypass, Facts};

/// The connections to pods of this node that may bypass the stack once their conntrack entry is
/// liberal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// No connection may, for these reasons.
    None(Vec<String>),
    Some {
        among: Among,
        /// Why UDP exchanges with clients outside go through the network stack. `None` if they may
        /// bypass it.
        not_outside: Option<String>,
    },
}

impl Opened {
    /// Evaluates the rules for packets of open connections. `heeds_marks` is set if a routing rule
    /// matches marks.
    pub(super) fn judge(
        netfilter: &Netfilter,
        facts: &Facts,
        bypass: &Bypass,
        heeds_marks: bool,
    ) -> Self {
        // Rules that have no effect on bypass connections have none on their later packets.
        if let Bypass::Some { among, .. } = bypass {
            return Self::with_outside(netfilter, facts, among.clone(), heeds_marks);
        }
        let Some(pods) = &facts.pods else {
            return Self::None(vec!["a pod's device belongs to another device".to_owned()]);
        };
        let mut against = Vec::new();
        for among in facts.candidates() {
            against = netfilter
                .judge_opened(&among.nets(), pods, heeds_marks)
                .against;
            if against.is_empty() {
                return Self::with_outside(netfilter, facts, among, heeds_marks);
            }
        }
        Self::None(against)
    }

    /// Evaluates whether UDP exchanges with clients outside may bypass the stack as well.
    fn with_outside(netfilter: &Netfilter, facts: &Facts, among: Among, heeds_marks: bool) -> Self {
        let not_outside = match &facts.pods {
            None => Some("a pod's device belongs to another device".to_owned()),
            Some(_) if facts.ways.is_empty() => Some("no uplink is of a kind for that".to_owned()),
            Some(pods) => {
                let judgement =
                    netfilter.judge_opened_outside(&among.nets(), pods, &facts.ways, heeds_marks);
                judgement.against.into_iter().next()
            }
        };
        Self::Some { among, not_outside }
    }

    pub(super) fn flags(&self) -> u32 {
        let Self::Some { among, not_outside } = self else {
            return 0;
        };
        let flags = [
            (*among != Among::All, Node::FAST_OPEN_PODS),
            (not_outside.is_none(), Node::FAST_OPENED_OUTSIDE),
        ];
        flags
            .into_iter()
            .filter(|(is_set, _)| *is_set)
            .fold(Node::FAST_OPENED, |all, (_, flag)| all | flag)
    }

    /// Returns the networks of [`Node::FAST_OPEN_PODS`].
    pub(super) fn nets(&self) -> Vec<IpNet> {
        match self {
            Self::None(_)
            | Self::Some {
                among: Among::All, ..
            } => Vec::new(),
            Self::Some { among, .. } => among.nets(),
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
            Self::None(why) => write!(
                f,
                "; other open connections take the stack, because {}",
                why.join("; ")
            ),
            Self::Some { among, not_outside } => {
                write!(
                    f,
                    "; open connections between this node's pods{among}, if conntrack tolerates it"
                )?;
                match not_outside {
                    None => f.write_str(", and UDP exchanges of clients outside with them"),
                    Some(why) => write!(
                        f,
                        "; UDP exchanges of clients outside take the stack, because {why}"
                    ),
                }
            }
        }
    }
}
