//! Finds the connections that may bypass the network stack from their first packet on, because the
//! stack has no effect on them.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use proxy_common::device::Node;
use proxy_net::netfilter::{Judgement, Netfilter};

/// The connections that may bypass the stack from their first packet on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Bypass {
    /// No connection may, for these reasons.
    None(Vec<String>),
    /// Connections of this node's pods between these addresses.
    Some {
        among: Among,
        /// Why connections to pods of other nodes go through the network stack. `None` if they
        /// bypass it too.
        not_far: Option<String>,
    },
}

/// The bypass connections that may stay, by the networks of both endpoints. The rules accept
/// established connections between these networks, and have no other effect on them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Staying {
    /// For connections between pods of this node.
    near: Vec<IpNet>,
    /// For connections to pods of other nodes.
    far: Vec<IpNet>,
}

/// The networks that contain both endpoints of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Among {
    All,
    /// The networks of the cluster's pods (`--cluster-cidr`) and of the Node object's podCIDRs.
    Cluster(Vec<IpNet>),
    /// The Node object's podCIDRs.
    PodCidrs(Vec<IpNet>),
}

/// The facts of this node for which the rules are evaluated.
pub(super) struct Facts {
    /// The networks of the cluster's pods, if configured.
    pub(super) cluster: Vec<IpNet>,
    /// The Node object's podCIDRs.
    pub(super) pod_cidrs: Vec<IpNet>,
    /// The devices that are on no path between pods of this node.
    pub(super) no_pods: BTreeSet<String>,
    /// The devices of `no_pods` that are on no path to a pod of another node either.
    pub(super) no_ways: BTreeSet<String>,
    /// The pods' devices that bypass connections may use; `None` if netfilter may match other
    /// names.
    pub(super) pods: Option<BTreeSet<String>>,
    /// The uplinks where packets of clients outside, and their replies, may bypass the stack.
    pub(super) ways: BTreeSet<String>,
}

impl Among {
    pub(super) fn nets(&self) -> Vec<IpNet> {
        match self {
            Self::All => Netfilter::everywhere().to_vec(),
            Self::Cluster(nets) | Self::PodCidrs(nets) => nets.clone(),
        }
    }
}

impl Facts {
    /// Returns the candidates, from the widest to the narrowest.
    pub(super) fn candidates(&self) -> Vec<Among> {
        let Self {
            cluster, pod_cidrs, ..
        } = self;
        let cluster = (!cluster.is_empty())
            .then(|| Among::Cluster([cluster.clone(), pod_cidrs.clone()].concat()));
        let pods = (!pod_cidrs.is_empty()).then(|| Among::PodCidrs(pod_cidrs.clone()));
        [Some(Among::All), cluster, pods]
            .into_iter()
            .flatten()
            .collect()
    }
}

impl Bypass {
    /// Evaluates the rules for connections of pods, and returns the names of the chains without an
    /// effect. Prefers networks that also qualify for pods of other nodes, then the widest
    /// networks.
    pub(super) fn judge(netfilter: &Netfilter, facts: &Facts) -> (Self, Vec<String>) {
        let mut against = Vec::new();
        let mut near = None;
        let mut not_far = None;
        for among in facts.candidates() {
            let nets = among.nets();
            let judgement = netfilter.judge_bypass(&nets, &facts.no_pods, false);
            if !judgement.against.is_empty() {
                not_far = judgement
                    .against
                    .first()
                    .filter(|_| matches!(among, Among::Cluster(_)))
                    .cloned()
                    .or(not_far);
                against = judgement.against;
                continue;
            }
            // No pod of another node has an address of this node's podCIDRs.
            if !matches!(among, Among::PodCidrs(_)) {
                let Judgement { against, harmless } =
                    netfilter.judge_bypass(&nets, &facts.no_ways, true);
                if against.is_empty() {
                    return (
                        Self::Some {
                            among,
                            not_far: None,
                        },
                        harmless,
                    );
                }
                not_far = against.into_iter().next();
            }
            near.get_or_insert((among, judgement.harmless));
        }
        let Some((among, harmless)) = near else {
            return (Self::None(against), Vec::new());
        };
        let not_far =
            not_far.unwrap_or_else(|| "no --cluster-cidr names their networks".to_owned());
        (
            Self::Some {
                among,
                not_far: Some(not_far),
            },
            harmless,
        )
    }

    pub(super) fn flags(&self) -> u32 {
        let Self::Some { among, not_far } = self else {
            return 0;
        };
        let flags = [
            (*among != Among::All, Node::FAST_OPEN_PODS),
            (not_far.is_none(), Node::FAST_OPEN_FAR),
        ];
        flags
            .into_iter()
            .filter(|(is_set, _)| *is_set)
            .fold(Node::FAST_OPEN, |all, (_, flag)| all | flag)
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
}

impl Staying {
    pub(super) fn all() -> Self {
        let everywhere = || Netfilter::everywhere().to_vec();
        Self {
            near: everywhere(),
            far: everywhere(),
        }
    }

    pub(super) const fn none() -> Self {
        Self {
            near: Vec::new(),
            far: Vec::new(),
        }
    }

    /// Evaluates the rules for packets of open bypass connections. `heeds_marks` is set if a
    /// routing rule matches marks.
    pub(super) fn judge(netfilter: &Netfilter, facts: &Facts, heeds_marks: bool) -> Self {
        let nets = |others, is_far| {
            let mut nets = facts.candidates().into_iter().map(|among| among.nets());
            let passes = |nets: &Vec<IpNet>| {
                netfilter
                    .judge_open_bypass(nets, others, is_far, heeds_marks)
                    .against
                    .is_empty()
            };
            nets.find(passes).unwrap_or_default()
        };
        Self {
            near: nets(&facts.no_pods, false),
            far: nets(&facts.no_ways, true),
        }
    }

    /// Returns true if an open connection between these addresses keeps bypassing the stack.
    /// `is_far`: to a pod of another node.
    pub(super) fn has(&self, ends: [IpAddr; 2], is_far: bool) -> bool {
        let nets = if is_far { &self.far } else { &self.near };
        ends.iter()
            .all(|end| nets.iter().any(|net| net.contains(end)))
    }

    pub(super) fn is_all(&self) -> bool {
        *self == Self::all()
    }

    pub(super) fn is_none(&self) -> bool {
        *self == Self::none()
    }
}

impl fmt::Display for Bypass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None(why) if why.is_empty() => Ok(()),
            Self::None(why) => write!(
                f,
                "; connections are opened through the stack, because {}",
                why.join("; ")
            ),
            Self::Some { among, not_far } => {
                let whose = if not_far.is_none() {
                    "of this node's pods to pods"
                } else {
                    "between this node's pods"
                };
                write!(f, "; bypass for connections {whose}{among}")
            }
        }
    }
}

impl fmt::Display for Among {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::All => "",
            Self::Cluster(_) => " with addresses of the cluster's networks",
            Self::PodCidrs(_) => " with addresses of its podCIDRs",
        })
    }
}
