//! Decides whether packets of open connections skip the node's stack (`--fast-path`), and explains why not.

use std::fmt;

use anyhow::{Context, Result};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use proxy_common::device;
use tracing::{info, warn};

use proxy_net::changes::Changes;
use proxy_net::{forward, nat, sysctl, xfrm};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum FastPath {
    #[default]
    Off,
    /// On while netfilter has no rules for forwarded packets.
    Auto,
    On,
}

/// The operator's choice, and the state of this node.
#[derive(Clone, Debug)]
pub(super) struct FastPathState {
    asked: FastPath,
    /// The rules that packets would skip; None before the first check.
    rules: Option<Vec<String>>,
    /// The reason why conntrack cannot be configured for skipped packets: conntrack would call later packets of such
    /// connections invalid.
    obstacle: Option<String>,
    /// The connections that may skip the stack from their first packet on, while no rules are found.
    whole: Whole,
    /// Connections that were opened past the stack go on past it.
    keeps: bool,
}

/// The connections to which the stack does nothing at all.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Whole {
    /// None, for these reasons.
    None(Vec<String>),
    /// Those between the addresses of the Node object's podCIDRs.
    OfPodCidrs,
    All,
}

/// The parameters that make conntrack tolerate packets on the fast path, which it does not see. Conntrack must not take
/// a packet that it does see for one out of window, nor expect acknowledgements.
const LIBERAL: [&str; 2] = ["netfilter/nf_conntrack_tcp_be_liberal", "netfilter/nf_conntrack_tcp_ignore_invalid_rst"];
const UNACKNOWLEDGED: &str = "netfilter/nf_conntrack_tcp_timeout_unacknowledged";
const ESTABLISHED: &str = "netfilter/nf_conntrack_tcp_timeout_established";

impl FastPathState {
    /// `keeps`: connections of a predecessor may have been opened past the stack.
    pub(super) fn new(asked: FastPath, keeps: bool) -> Self {
        let keeps = keeps && asked != FastPath::Off;
        Self { asked, rules: None, obstacle: None, whole: Whole::None(Vec::new()), keeps }
    }

    /// Returns the flags of the programs' [`device::Node`].
    pub(super) fn flag(&self) -> u32 {
        use device::Node;
        let opens = match &self.whole {
            _ if !self.opens_flows() => 0,
            Whole::None(_) => 0,
            Whole::OfPodCidrs => Node::FAST_OPEN | Node::FAST_OPEN_PODS,
            Whole::All => Node::FAST_OPEN,
        };
        let flags = [(self.is_on(), Node::FAST_PATH), (self.keeps, Node::FAST_KEEP)];
        flags.into_iter().filter(|(is_set, _)| *is_set).fold(opens, |all, (_, flag)| all | flag)
    }

    /// Returns true if some connections skip the stack from their first packet on.
    fn opens_flows(&self) -> bool {
        self.is_on() && self.rules.as_ref().is_some_and(Vec::is_empty) && !matches!(self.whole, Whole::None(_))
    }

    /// Notes whether there are connections that were opened past the stack.
    pub(super) fn keep_whole_flows(&mut self, are_there: bool) {
        self.keeps &= are_there || self.opens_flows();
    }

    fn is_on(&self) -> bool {
        match (self.asked, &self.rules) {
            (FastPath::Off, _) | (_, None) => false,
            (FastPath::On, Some(_)) => self.obstacle.is_none(),
            (FastPath::Auto, Some(rules)) => rules.is_empty() && self.obstacle.is_none(),
        }
    }
}

impl fmt::Display for FastPathState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(obstacle) = &self.obstacle {
            return write!(f, "off, because {obstacle}");
        }
        let rules = self.rules.as_ref().map(|rules| rules.join("; ")).unwrap_or_default();
        match (self.asked, &self.rules) {
            (FastPath::Off, _) => f.write_str("off"),
            (_, None) => f.write_str("off until the devices are known"),
            (FastPath::On, _) if rules.is_empty() => write!(f, "on{}", self.whole),
            (FastPath::On, _) => write!(f, "on, past {rules}"),
            (FastPath::Auto, _) if rules.is_empty() => write!(f, "auto: on, no rules found{}", self.whole),
            (FastPath::Auto, _) => write!(f, "auto: off, because {rules}"),
        }
    }
}

impl fmt::Display for Whole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None(why) if why.is_empty() => Ok(()),
            Self::None(why) => write!(f, "; connections are opened through the stack, because {}", why.join("; ")),
            Self::OfPodCidrs => f.write_str("; whole connections between addresses of this node's podCIDRs"),
            Self::All => f.write_str("; whole connections between this node's pods"),
        }
    }
}

impl Whole {
    /// Looks what the stack does to connections between pods, `pod_cidrs` being where this node's have their addresses.
    async fn judge(pod_cidrs: &[IpNet]) -> Self {
        match Self::try_judge(pod_cidrs).await {
            Ok(whole) => whole,
            Err(error) => Self::None(vec![format!("the rules cannot be read: {error:#}")]),
        }
    }

    async fn try_judge(pod_cidrs: &[IpNet]) -> Result<Self> {
        let policies = xfrm::outgoing_policies().await.context("list IPsec policies")?;
        if !policies.is_empty() {
            return Ok(Self::None(vec!["IPsec policies may concern packets to pods".to_owned()]));
        }
        let everywhere = [IpNet::V4(Ipv4Net::default()), IpNet::V6(Ipv6Net::default())];
        if nat::nat_rules(&everywhere).await?.is_empty() {
            return Ok(Self::All);
        }
        let nets = if pod_cidrs.is_empty() { &everywhere } else { pod_cidrs };
        let rules = nat::nat_rules(nets).await?;
        Ok(if rules.is_empty() { Self::OfPodCidrs } else { Self::None(rules) })
    }
}

impl FastPathState {
    /// Looks what netfilter has for packets that are forwarded, and switches accordingly. Where that cannot be told, there
    /// may be anything. `changes`: where changes of this host are noted, if they outlive the agent.
    pub(super) async fn judge(&mut self, changes: Option<&Changes>, pod_cidrs: &[IpNet]) {
        if self.asked == FastPath::Off {
            return;
        }
        let rules = forward::rules().await.unwrap_or_else(|error| vec![format!("the rules cannot be read: {error:#}")]);
        let before = self.clone();
        self.whole = if rules.is_empty() { Whole::judge(pod_cidrs).await } else { Whole::None(Vec::new()) };
        self.rules = Some(rules);
        self.obstacle = None;
        if self.is_on() {
            self.obstacle = relax_conntrack(changes).err().map(|error| format!("{error:#}"));
        }
        self.keeps |= self.opens_flows();
        self.log(&before);
    }

    fn log(&self, before: &Self) {
        if let Some(error) = &self.obstacle {
            if before.obstacle.as_ref() != Some(error) {
                warn!(error, "packets of open connections take the stack: conntrack would take some for invalid");
            }
        } else if before.rules != self.rules || before.obstacle.is_some() || before.whole != self.whole {
            let rules = self.rules.as_ref().map(|rules| rules.join("; ")).unwrap_or_default();
            match (self.is_on(), rules.is_empty()) {
                (true, true) => {
                    let whole = self.whole.to_string();
                    info!(whole, "packets of open connections skip the stack: no rules were found that they would miss")
                }
                (true, false) => {
                    warn!(
                        rules,
                        "packets of open connections skip the stack, and these rules, which see connections only open and end"
                    );
                }
                (false, _) => {
                    info!(rules, "packets of open connections take the stack, because of rules that they would miss")
                }
            }
        }
    }
}

fn relax_conntrack(changes: Option<&Changes>) -> Result<()> {
    for key in LIBERAL {
        set_if_there(key, "1", changes)?;
    }
    match sysctl::read(ESTABLISHED)? {
        Some(secs) => set_if_there(UNACKNOWLEDGED, &secs, changes),
        None => Ok(()),
    }
}

/// Sets a parameter, unless the kernel tracks no connections.
fn set_if_there(key: &str, value: &str, changes: Option<&Changes>) -> Result<()> {
    match (sysctl::read(key)?, changes) {
        (None, _) => Ok(()),
        (_, Some(changes)) => changes.set_sysctl(key, value),
        (_, None) => sysctl::write(key, value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_is_on_without_rules() {
        let rules = |rules: &[&str]| Some(rules.iter().map(|rule| (*rule).to_owned()).collect::<Vec<_>>());
        let cases = [
            (FastPath::Off, rules(&[]), false, "off"),
            (FastPath::On, None, false, "off until the devices are known"),
            (FastPath::On, rules(&[]), true, "on"),
            (FastPath::On, rules(&["chain a"]), true, "on, past chain a"),
            (FastPath::Auto, None, false, "off until the devices are known"),
            (FastPath::Auto, rules(&[]), true, "auto: on, no rules found"),
            (FastPath::Auto, rules(&["chain a", "chain b"]), false, "auto: off, because chain a; chain b"),
        ];
        for (asked, rules, is_on, text) in cases {
            let state = FastPathState { rules, ..FastPathState::new(asked, false) };
            assert_eq!((state.is_on(), state.to_string().as_str()), (is_on, text));
        }
        for asked in [FastPath::Auto, FastPath::On] {
            let obstacle = Some("it is read-only".to_owned());
            let state = FastPathState { rules: rules(&[]), obstacle, ..FastPathState::new(asked, false) };
            assert_eq!((state.is_on(), state.to_string().as_str()), (false, "off, because it is read-only"));
        }
    }
}
