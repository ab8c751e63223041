//! Decides whether packets of open connections bypass the network stack (`--fast-path`), and
//! explains why not.

use std::fmt;

use anyhow::{Context, Result, anyhow};
use ipnet::IpNet;
use proxy_common::device;
use proxy_datapath::Remaining;
use tracing::{info, warn};

use proxy_net::changes::Changes;
use proxy_net::foreign_rule::{self, ForeignRule};
use proxy_net::netfilter::Netfilter;
use proxy_net::{Handle, sysctl, xfrm};

use super::bypass_connections::{Bypass, Facts, Staying};
use super::leaving::Left;
use super::opened::Opened;

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
    /// The rules that packets of open connections would miss; `None` before the first evaluation.
    rules: Option<Vec<String>>,
    /// The reason why conntrack cannot be made liberal. It would mark later packets of connections
    /// on the fast path invalid.
    obstacle: Option<String>,
    bypass: Bypass,
    opened: Opened,
    staying: Staying,
    /// The value of `staying` when all other connections last moved to the stack. `None` if they
    /// must move again.
    left: Option<Staying>,
    /// The number of moved connections without a conntrack entry, and the last reason.
    unknown: Option<(usize, String)>,
    /// The chains with rules that let bypass connections pass.
    harmless: Vec<String>,
    /// Set if conntrack tracks connections here. It marks packets invalid if it has missed earlier
    /// packets, unless the connection is liberal.
    tracks: bool,
    /// Whether open connections bypass the stack.
    bypass_kept: Kept,
    /// The open connections with liberal conntrack entries: conntrack accepts any FIN or RST there.
    liberal_kept: Kept,
}

/// Connections that the programs must still handle, even if no more may open.
#[derive(Clone, Copy, Debug)]
struct Kept {
    are_there: bool,
    /// The number of consecutive sweeps that found no such connection.
    sweeps_without: u32,
}

impl Kept {
    /// Notes the result of a sweep. A connection may open while a sweep runs, so two sweeps must
    /// find none.
    fn swept(&mut self, are_there: bool) {
        self.sweeps_without = if are_there {
            0
        } else {
            self.sweeps_without.saturating_add(1)
        };
        self.are_there &= self.sweeps_without < SWEEPS;
    }
}

/// The sysctls that make conntrack liberal. Conntrack does not see packets of the fast path, so it
/// must neither check windows nor expect acknowledgements.
const LIBERAL: [&str; 2] = [
    "netfilter/nf_conntrack_tcp_be_liberal",
    "netfilter/nf_conntrack_tcp_ignore_invalid_rst",
];
const UNACKNOWLEDGED: &str = "netfilter/nf_conntrack_tcp_timeout_unacknowledged";
const ESTABLISHED: &str = "netfilter/nf_conntrack_tcp_timeout_established";

impl FastPathState {
    /// `keeps` is set if an earlier agent may have opened bypass connections.
    pub(super) fn new(asked: FastPath, keeps: bool) -> Self {
        let kept = Kept {
            are_there: keeps && asked != FastPath::Off,
            sweeps_without: 0,
        };
        Self {
            asked,
            rules: None,
            obstacle: None,
            bypass: Bypass::None(Vec::new()),
            opened: Opened::None(Vec::new()),
            staying: Staying::all(),
            left: None,
            unknown: None,
            harmless: Vec::new(),
            tracks: true,
            bypass_kept: kept,
            liberal_kept: kept,
        }
    }

    pub(super) fn flag(&self) -> u32 {
        use device::Node;
        let opens = if self.opens_flows() {
            self.bypass.flags()
        } else {
            0
        };
        let opened = if self.takes_opened() {
            self.opened.flags()
        } else {
            0
        };
        let flags = [
            (self.is_on_for_all(), Node::FAST_PATH),
            (
                self.bypass_kept.are_there || self.liberal_kept.are_there,
                Node::FAST_KEEP,
            ),
        ];
        flags
            .into_iter()
            .filter(|(is_set, _)| *is_set)
            .fold(opens | opened, |all, (_, flag)| all | flag)
    }

    /// Returns the networks between which the stack does not change packets; empty if the fast path
    /// depends on none.
    pub(super) fn unchanged(&self) -> Vec<IpNet> {
        if self.takes_opened() {
            self.opened.nets()
        } else {
            self.bypass.nets()
        }
    }

    /// Makes open connections go through the stack until the rules are evaluated for the current
    /// devices.
    pub(super) fn forget_pods(&mut self) {
        self.opened = Opened::None(vec![
            "the rules for a new device are not evaluated yet".to_owned(),
        ]);
    }

    /// Returns the rules that packets past the stack would miss; `None` before they are read.
    pub(super) fn rules(&self) -> Option<&[String]> {
        self.rules.as_deref()
    }

    fn finds_no_rules(&self) -> bool {
        self.rules.as_ref().is_some_and(Vec::is_empty)
    }

    /// Returns true if some connections may bypass the stack from their first packet on.
    pub(super) fn opens_flows(&self) -> bool {
        let is_none = matches!(self.bypass, Bypass::None(_));
        self.asked != FastPath::Off && self.obstacle.is_none() && self.rules.is_some() && !is_none
    }

    /// Returns true if packets of all open connections bypass the stack.
    fn is_on_for_all(&self) -> bool {
        match self.asked {
            FastPath::Off => false,
            FastPath::On => self.rules.is_some() && self.obstacle.is_none(),
            FastPath::Auto => self.finds_no_rules() && !self.tracks,
        }
    }

    /// Returns true if open connections between pods bypass the stack with liberal conntrack
    /// entries. If all connections bypass the stack, conntrack tracks nothing or is liberal as a
    /// whole.
    fn takes_opened(&self) -> bool {
        let is_asked =
            self.asked == FastPath::Auto && self.rules.is_some() && self.obstacle.is_none();
        is_asked && !self.is_on_for_all() && !self.opened.is_none()
    }

    fn is_on(&self) -> bool {
        self.is_on_for_all() || self.opens_flows() || self.takes_opened()
    }

    /// Notes how many bypass and liberal connections a sweep has found. Returns true if bypass
    /// connections remain although all had to move to the stack.
    pub(super) fn keep(&mut self, Remaining { bypass, liberal }: Remaining) -> bool {
        let opens = self.opens_flows();
        let takes = self.takes_opened();
        self.bypass_kept.swept(bypass > 0 || opens);
        self.liberal_kept.swept(liberal > 0 || takes);
        let has_strays = bypass > 0 && self.staying.is_none() && self.left.take().is_some();
        self.bypass_kept.are_there |= has_strays;
        has_strays
    }

    /// Returns true if conntrack may track connections here.
    pub(super) const fn tracks(&self) -> bool {
        self.tracks
    }

    /// Returns the connections that keep bypassing the stack, if the other bypass connections must
    /// move now.
    pub(super) fn staying(&self) -> Option<&Staying> {
        let is_due = self.bypass_kept.are_there && self.left.as_ref() != Some(&self.staying);
        Some(&self.staying).filter(|staying| is_due && !staying.is_all())
    }

    /// Notes that all other bypass connections have moved to the stack.
    pub(super) fn note_left(&mut self, left: Left) {
        let Left {
            connections,
            unknown,
        } = left;
        if connections > 0 {
            info!(
                connections,
                "connections that were opened past the stack take it now: rules may stop their packets"
            );
        }
        if let Some((connections, error)) = &unknown {
            warn!(
                connections,
                error,
                "connections that now take the stack have no conntrack entry, and conntrack may see them as new or invalid"
            );
        }
        self.unknown = unknown;
        // The moved connections have liberal entries too, so the programs keep validating their FIN
        // and RST.
        if connections > 0 {
            self.liberal_kept = Kept {
                are_there: true,
                sweeps_without: 0,
            };
        }
        self.bypass_kept.are_there &= !self.staying.is_none();
        self.left = Some(self.staying.clone());
    }
}

/// The second sweep finds a connection that opened during the first.
const SWEEPS: u32 = 2;

impl fmt::Display for FastPathState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(obstacle) = &self.obstacle {
            return write!(f, "off, because {obstacle}");
        }
        match (self.asked, &self.rules) {
            (FastPath::Off, _) => f.write_str("off"),
            (_, None) => f.write_str("off until the devices are listed"),
            (FastPath::On, Some(rules)) => {
                f.write_str("on")?;
                if !rules.is_empty() {
                    write!(f, ", past {}", rules.join("; "))?;
                }
                self.write_bypass(f)
            }
            (FastPath::Auto, _) => match &self.bypass {
                Bypass::None(why) if !self.is_on() => {
                    write!(f, "auto: off, because {}", why.join("; "))
                }
                _ => {
                    f.write_str(if self.finds_no_rules() && self.harmless.is_empty() {
                        "auto: on, no rules found"
                    } else {
                        "auto: on"
                    })?;
                    self.write_bypass(f)?;
                    if self.is_on_for_all() {
                        return Ok(());
                    }
                    fmt::Display::fmt(&self.opened, f)?;
                    f.write_str("; other connections take the stack, because conntrack tracks them")
                }
            },
        }?;
        if let Some((connections, error)) = &self.unknown {
            let number = if *connections == 1 {
                "1 connection that takes"
            } else {
                &format!("{connections} connections that take")
            };
            write!(
                f,
                "; conntrack has no entry for {number} the stack now: {error}"
            )?;
        }
        let goes_on = self.bypass_kept.are_there && !self.opens_flows();
        f.write_str(if goes_on {
            "; connections that were opened past the stack go on past it"
        } else {
            ""
        })
    }
}

impl FastPathState {
    fn write_bypass(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.bypass, f)?;
        let Bypass::Some { not_far, .. } = &self.bypass else {
            return Ok(());
        };
        if !self.harmless.is_empty() {
            write!(
                f,
                ", which these rules let pass: {}",
                self.harmless.join(", ")
            )?;
        }
        match not_far {
            Some(why) => write!(f, "; those to other nodes take the stack, because {why}"),
            None => Ok(()),
        }
    }
}

/// The effect of this host's rules on packets, if these bypassed the stack.
struct Verdict {
    /// The rules that packets of open connections would miss.
    rules: Vec<String>,
    bypass: Bypass,
    opened: Opened,
    staying: Staying,
    harmless: Vec<String>,
    tracks: bool,
}

impl Verdict {
    async fn find(netfilter: &Result<Netfilter>, handle: &Handle, facts: &Facts) -> Self {
        Self::try_find(netfilter, handle, facts)
            .await
            .unwrap_or_else(|error| {
                let why = vec![format!("the rules cannot be read: {error:#}")];
                let bypass = Bypass::None(why.clone());
                let opened = Opened::None(why.clone());
                Self {
                    rules: why,
                    bypass,
                    opened,
                    staying: Staying::none(),
                    harmless: Vec::new(),
                    tracks: true,
                }
            })
    }

    async fn try_find(
        netfilter: &Result<Netfilter>,
        handle: &Handle,
        facts: &Facts,
    ) -> Result<Self> {
        let netfilter = netfilter.as_ref().map_err(|error| anyhow!("{error:#}"))?;
        let (others, heeds_marks) = others(handle).await?;
        let (bypass, harmless) = Bypass::judge(netfilter, facts);
        let bypass = match bypass {
            Bypass::None(why) => Bypass::None([why, others.clone()].concat()),
            _ if !others.is_empty() => Bypass::None(others.clone()),
            bypass => bypass,
        };
        let (opened, staying) = match &others[..] {
            [] => (
                Opened::judge(netfilter, facts, &bypass, heeds_marks),
                Staying::judge(netfilter, facts, heeds_marks),
            ),
            others => (Opened::None(others.to_vec()), Staying::none()),
        };
        let rules = [netfilter.judge_open().against, others].concat();
        Ok(Self {
            rules,
            bypass,
            opened,
            staying,
            harmless,
            tracks: netfilter.may_follow_connections(),
        })
    }
}

impl FastPathState {
    /// Evaluates this host's rules for forwarded packets, and switches the fast path accordingly.
    /// Unreadable rules may have any effect. `changes` records changes of this host that outlive
    /// the agent.
    pub(super) async fn judge(
        &mut self,
        netfilter: &Result<Netfilter>,
        changes: Option<&Changes>,
        handle: &Handle,
        facts: &Facts,
    ) {
        if self.asked == FastPath::Off {
            return;
        }
        let Verdict {
            rules,
            bypass,
            opened,
            staying,
            harmless,
            tracks,
        } = Verdict::find(netfilter, handle, facts).await;
        let before = self.clone();
        (self.rules, self.bypass, self.opened) = (Some(rules), bypass, opened);
        self.staying = staying;
        if self.staying.is_all() {
            (self.left, self.unknown) = (None, None);
        }
        (self.harmless, self.tracks) = (harmless, tracks);
        self.obstacle = None;
        if self.asked == FastPath::On {
            self.obstacle = relax_conntrack(changes)
                .err()
                .map(|error| format!("{error:#}"));
        }
        self.bypass_kept.are_there |= self.opens_flows();
        self.liberal_kept.are_there |= self.takes_opened();
        self.log(&before);
    }

    #[expect(
        clippy::cognitive_complexity,
        reason = "one of three lines; the lint counts what the log's macros expand to"
    )]
    fn log(&self, before: &Self) {
        if let Some(error) = &self.obstacle {
            if before.obstacle.as_ref() != Some(error) {
                warn!(
                    error,
                    "packets of open connections take the stack: conntrack would take some for invalid"
                );
            }
        } else if before.to_string() != self.to_string() {
            let rules = self
                .rules
                .as_ref()
                .map(|rules| rules.join("; "))
                .unwrap_or_default();
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

/// Returns the rules outside netfilter that bypassing packets miss (IPsec policies, routing rules),
/// and whether a routing rule matches marks.
async fn others(handle: &Handle) -> Result<(Vec<String>, bool)> {
    let policies = xfrm::forwarding_policies().await?;
    let policies = policies
        .first()
        .map(|first| format!("{} IPsec policies, first {first}", policies.len()));
    let routing = foreign_rule::unasked(handle)
        .await
        .context("list the routing rules")?;
    let heeds_marks = routing.iter().any(ForeignRule::asks_for_mark);
    let routing = routing
        .iter()
        .filter(|rule| rule.is_missed_past_stack())
        .map(ToString::to_string);
    Ok((policies.into_iter().chain(routing).collect(), heeds_marks))
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

/// Sets a sysctl, if the kernel tracks connections.
fn set_if_there(key: &str, value: &str, changes: Option<&Changes>) -> Result<()> {
    match (sysctl::read(key)?, changes) {
        (None, _) => Ok(()),
        (_, Some(changes)) => changes.set_sysctl(key, value),
        (_, None) => sysctl::write(key, value),
    }
}

#[cfg(test)]
mod tests;
