//! Decides whether packets of open connections skip the node's stack (`--fast-path`), and explains why not.

use std::fmt;

use anyhow::Result;
use proxy_common::device;
use tracing::{info, warn};

use proxy_net::changes::Changes;
use proxy_net::{forward, sysctl};

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
}

/// The parameters that make conntrack tolerate packets on the fast path, which it does not see. Conntrack must not take
/// a packet that it does see for one out of window, nor expect acknowledgements.
const LIBERAL: [&str; 2] = ["netfilter/nf_conntrack_tcp_be_liberal", "netfilter/nf_conntrack_tcp_ignore_invalid_rst"];
const UNACKNOWLEDGED: &str = "netfilter/nf_conntrack_tcp_timeout_unacknowledged";
const ESTABLISHED: &str = "netfilter/nf_conntrack_tcp_timeout_established";

impl FastPathState {
    pub(super) fn new(asked: FastPath) -> Self {
        Self { asked, rules: None, obstacle: None }
    }

    /// Returns the flag of the programs' [`device::Node`].
    pub(super) fn flag(&self) -> u32 {
        if self.is_on() { device::Node::FAST_PATH } else { 0 }
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
            (FastPath::On, _) if rules.is_empty() => f.write_str("on"),
            (FastPath::On, _) => write!(f, "on, past {rules}"),
            (FastPath::Auto, _) if rules.is_empty() => f.write_str("auto: on, no rules found"),
            (FastPath::Auto, _) => write!(f, "auto: off, because {rules}"),
        }
    }
}

impl FastPathState {
    /// Looks what netfilter has for packets that are forwarded, and switches accordingly. Where that cannot be told, there
    /// may be anything. `changes`: where changes of this host are noted, if they outlive the agent.
    pub(super) async fn judge(&mut self, changes: Option<&Changes>) {
        if self.asked == FastPath::Off {
            return;
        }
        let rules = forward::rules().await.unwrap_or_else(|error| vec![format!("the rules cannot be read: {error:#}")]);
        let before = self.clone();
        self.rules = Some(rules);
        self.obstacle = None;
        if self.is_on() {
            self.obstacle = relax_conntrack(changes).err().map(|error| format!("{error:#}"));
        }
        self.log(&before);
    }

    fn log(&self, before: &Self) {
        if let Some(error) = &self.obstacle {
            if before.obstacle.as_ref() != Some(error) {
                warn!(error, "packets of open connections take the stack: conntrack would take some for invalid");
            }
        } else if before.rules != self.rules || before.obstacle.is_some() {
            let rules = self.rules.as_ref().map(|rules| rules.join("; ")).unwrap_or_default();
            match (self.is_on(), rules.is_empty()) {
                (true, true) => {
                    info!("packets of open connections skip the stack: no rules were found that they would miss")
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
            let state = FastPathState { asked, rules, obstacle: None };
            assert_eq!((state.is_on(), state.to_string().as_str()), (is_on, text));
        }
        for asked in [FastPath::Auto, FastPath::On] {
            let state = FastPathState { asked, rules: rules(&[]), obstacle: Some("it is read-only".to_owned()) };
            assert_eq!((state.is_on(), state.to_string().as_str()), (false, "off, because it is read-only"));
        }
    }
}
