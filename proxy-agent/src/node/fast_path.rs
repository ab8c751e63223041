//! Decides whether packets of open connections skip the node's stack (`--fast-path`), and explains why not.

use std::fmt;

use anyhow::{Context, Result};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use proxy_common::device;
use tracing::{info, warn};

use proxy_net::changes::Changes;
use proxy_net::{Handle, foreign_rule, forward, nat, sysctl, xfrm};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum FastPath {
    Off,
    /// On while no rule is found that packets would miss.
    #[default]
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
    /// Conntrack follows connections here. It takes packets for wrong ones if it misses some, unless it is told to be liberal.
    tracks: bool,
    /// Connections that were opened past the stack go on past it.
    keeps: bool,
    /// Sweeps in a row that have found no such connection.
    sweeps_without: u32,
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
        Self {
            asked,
            rules: None,
            obstacle: None,
            whole: Whole::None(Vec::new()),
            tracks: true,
            keeps,
            sweeps_without: 0,
        }
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
        let flags = [(self.is_on_for_all(), Node::FAST_PATH), (self.keeps, Node::FAST_KEEP)];
        flags.into_iter().filter(|(is_set, _)| *is_set).fold(opens, |all, (_, flag)| all | flag)
    }

    fn finds_no_rules(&self) -> bool {
        self.rules.as_ref().is_some_and(Vec::is_empty)
    }

    /// Returns true if some connections skip the stack from their first packet on.
    fn opens_flows(&self) -> bool {
        let is_none = matches!(self.whole, Whole::None(_));
        self.asked != FastPath::Off && self.obstacle.is_none() && self.finds_no_rules() && !is_none
    }

    /// Returns true if packets of all open connections skip the stack.
    fn is_on_for_all(&self) -> bool {
        match self.asked {
            FastPath::Off => false,
            FastPath::On => self.rules.is_some() && self.obstacle.is_none(),
            FastPath::Auto => self.finds_no_rules() && !self.tracks,
        }
    }

    fn is_on(&self) -> bool {
        self.is_on_for_all() || self.opens_flows()
    }

    /// Notes whether a sweep has found connections that were opened past the stack. One may have been opened behind the sweep, so two
    /// have to find none.
    pub(super) fn keep_whole_flows(&mut self, are_there: bool) {
        self.sweeps_without = if are_there || self.opens_flows() { 0 } else { self.sweeps_without.saturating_add(1) };
        self.keeps &= self.sweeps_without < SWEEPS;
    }
}

/// A connection that was opened while one sweep was under way, the next one finds.
const SWEEPS: u32 = 2;

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
            (FastPath::Auto, _) if rules.is_empty() => {
                let is_on = if self.is_on() { "on" } else { "off" };
                let others =
                    if self.tracks { "; the stack sees other connections, because conntrack follows them" } else { "" };
                write!(f, "auto: {is_on}, no rules found{}{others}", self.whole)
            }
            (FastPath::Auto, _) => write!(f, "auto: off, because {rules}"),
        }?;
        let goes_on = self.keeps && !self.opens_flows();
        f.write_str(if goes_on { "; connections that were opened past the stack go on past it" } else { "" })
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
    pub(super) async fn judge(&mut self, changes: Option<&Changes>, handle: &Handle, pod_cidrs: &[IpNet]) {
        if self.asked == FastPath::Off {
            return;
        }
        let rules = missed(handle).await.unwrap_or_else(|error| vec![format!("the rules cannot be read: {error:#}")]);
        let before = self.clone();
        self.whole = if rules.is_empty() { Whole::judge(pod_cidrs).await } else { Whole::None(Vec::new()) };
        self.rules = Some(rules);
        self.obstacle = None;
        self.tracks = forward::may_be_tracked().await.unwrap_or(true);
        if self.asked == FastPath::On {
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
        } else if before.to_string() != self.to_string() {
            let rules = self.rules.as_ref().map(|rules| rules.join("; ")).unwrap_or_default();
            match (self.asked, rules.is_empty()) {
                (FastPath::On, false) => warn!(
                    rules,
                    "packets of open connections skip the stack, and these rules, which see connections only open and end"
                ),
                _ => info!(state = %self, "which packets skip the stack"),
            }
        }
    }
}

/// Returns the rules that packets past the stack miss: chains of netfilter, IPsec policies, routing rules.
async fn missed(handle: &Handle) -> Result<Vec<String>> {
    let mut rules = forward::rules().await?;
    let policies = xfrm::forwarding_policies().await?;
    rules.extend(policies.first().map(|first| format!("{} IPsec policies, first {first}", policies.len())));
    let routing = foreign_rule::unasked(handle).await.context("list the routing rules")?;
    rules.extend(routing.iter().filter(|rule| rule.is_missed_past_stack()).map(ToString::to_string));
    Ok(rules)
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
            let state = FastPathState { rules, tracks: false, ..FastPathState::new(asked, false) };
            assert_eq!((state.is_on(), state.to_string().as_str()), (is_on, text));
        }
        for asked in [FastPath::Auto, FastPath::On] {
            let obstacle = Some("it is read-only".to_owned());
            let state = FastPathState { rules: rules(&[]), obstacle, ..FastPathState::new(asked, false) };
            assert_eq!((state.is_on(), state.to_string().as_str()), (false, "off, because it is read-only"));
        }
    }

    #[test]
    fn conntrack_leaves_whole_connections_to_auto() {
        use device::Node;
        let other = "; the stack sees other connections, because conntrack follows them";
        let cases = [
            (
                Whole::All,
                Node::FAST_OPEN,
                format!("auto: on, no rules found; whole connections between this node's pods{other}"),
            ),
            (
                Whole::OfPodCidrs,
                Node::FAST_OPEN | Node::FAST_OPEN_PODS,
                format!("auto: on, no rules found; whole connections between addresses of this node's podCIDRs{other}"),
            ),
            (
                Whole::None(vec!["rule 1".to_owned()]),
                0,
                format!("auto: off, no rules found; connections are opened through the stack, because rule 1{other}"),
            ),
        ];
        for (whole, flag, text) in cases {
            let state = FastPathState { rules: Some(Vec::new()), whole, ..FastPathState::new(FastPath::Auto, false) };
            assert_eq!((state.flag(), state.to_string()), (flag, text));
        }
    }

    #[test]
    fn whole_connections_are_kept_while_there_are_any() {
        let mut state = FastPathState::new(FastPath::Auto, true);
        state.rules = Some(vec!["chain a".to_owned()]);
        state.keep_whole_flows(true);
        assert_eq!(state.flag(), device::Node::FAST_KEEP);
        state.keep_whole_flows(false);
        state.keep_whole_flows(true);
        state.keep_whole_flows(false);
        assert_eq!(state.flag(), device::Node::FAST_KEEP, "one sweep may have missed it");
        assert!(state.to_string().ends_with("; connections that were opened past the stack go on past it"));
        state.keep_whole_flows(false);
        assert_eq!(state.flag(), 0);
        assert_eq!(FastPathState::new(FastPath::Off, true).flag(), 0, "its programs are not loaded");
    }
}
