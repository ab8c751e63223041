//! Whether packets of open connections skip the node's stack (`--fast-path`), and what speaks against it.

use std::fmt;

use anyhow::Result;
use proxy_common::device;
use tracing::{info, warn};

use super::Node;
use crate::net::{forward, sysctl};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum FastPath {
    #[default]
    Off,
    /// As long as netfilter has no rules for what is forwarded.
    Auto,
    On,
}

/// What was asked for, and what was found.
#[derive(Clone, Debug)]
pub(super) struct FastPathState {
    asked: FastPath,
    /// Rules that packets would skip; None before anybody has looked.
    rules: Option<Vec<String>>,
    /// Why conntrack cannot be told that packets skip it. It would call invalid what it still sees of them.
    obstacle: Option<String>,
}

/// Conntrack does not see what passes fast. So it must not take a packet that it does see for one out of window, nor expect
/// acknowledgements.
const LIBERAL: [&str; 2] = ["netfilter/nf_conntrack_tcp_be_liberal", "netfilter/nf_conntrack_tcp_ignore_invalid_rst"];
const UNACKNOWLEDGED: &str = "netfilter/nf_conntrack_tcp_timeout_unacknowledged";
const ESTABLISHED: &str = "netfilter/nf_conntrack_tcp_timeout_established";

impl FastPathState {
    pub(super) fn new(asked: FastPath) -> Self {
        Self { asked, rules: None, obstacle: None }
    }

    /// As a flag of the programs' [`device::Node`].
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

impl Node {
    /// Of this node: `off`, `on`, or what was found.
    pub fn fast_path(&self) -> String {
        self.fast_path.to_string()
    }

    /// Looks what netfilter has for packets that are forwarded, and switches accordingly. Where that cannot be told, there
    /// may be anything.
    pub(super) async fn judge_fast_path(&mut self) -> Result<()> {
        if self.fast_path.asked == FastPath::Off {
            return Ok(());
        }
        let rules = forward::rules().await.unwrap_or_else(|error| vec![format!("the rules cannot be read: {error:#}")]);
        let before = self.fast_path.clone();
        self.fast_path.rules = Some(rules.clone());
        self.fast_path.obstacle = None;
        if self.fast_path.is_on() {
            self.fast_path.obstacle = self.relax_conntrack().err().map(|error| format!("{error:#}"));
        }
        if let Some(error) = &self.fast_path.obstacle {
            if before.obstacle.as_ref() != Some(error) {
                warn!(error, "packets of open connections take the stack: conntrack would take some for invalid");
            }
        } else if before.rules.as_ref() != Some(&rules) || before.obstacle.is_some() {
            let (is_on, rules) = (self.fast_path.is_on(), rules.join("; "));
            match (is_on, rules.is_empty()) {
                (true, true) => {
                    info!("packets of open connections skip the stack: no rules were found that they would miss")
                }
                (true, false) => {
                    warn!(
                        rules,
                        "packets of open connections skip the stack, and these rules: they see connections open and end, no more"
                    );
                }
                (false, _) => {
                    info!(rules, "packets of open connections take the stack, because of rules that they would miss")
                }
            }
        }
        if before.flag() == self.fast_path.flag() {
            return Ok(());
        }
        self.write_node().inspect_err(|_| self.fast_path = before) // So that the next look tries again.
    }

    fn relax_conntrack(&self) -> Result<()> {
        for key in LIBERAL {
            self.set_if_there(key, "1")?;
        }
        match sysctl::read(ESTABLISHED)? {
            Some(secs) => self.set_if_there(UNACKNOWLEDGED, &secs),
            None => Ok(()),
        }
    }

    /// Where nothing is tracked there is nothing to set.
    fn set_if_there(&self, key: &str, value: &str) -> Result<()> {
        match (sysctl::read(key)?, self.attachments.changes()) {
            (None, _) => Ok(()),
            (_, Some(changes)) => changes.set_sysctl(key, value),
            (_, None) => sysctl::write(key, value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_is_on_where_no_rules_were_found() {
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
