//! The tables of legacy iptables that apply to forwarded packets, and the state of conntrack.

mod ask;

use std::fmt;
use std::fs;
use std::io::ErrorKind;

use anyhow::{Context, Result, bail, ensure};
use nix::libc;
use tracing::debug;

use self::ask::{Asker, GET_ENTRIES, GET_INFO};
use super::TRIES;
use super::packet::Family;
use crate::sysctl;

/// The number of connections that conntrack tracks.
const TRACKED: &str = "netfilter/nf_conntrack_count";
/// The iptables table, and the nftables chain type, that translates addresses. Only the first
/// packet of a connection traverses it.
pub(super) const NAT: &str = "nat";

/// The files that list the existing tables, by family. Any other query creates a missing table.
const LISTS: [(Family, &str); 2] = [
    (Family::V4, "/proc/thread-self/net/ip_tables_names"),
    (Family::V6, "/proc/thread-self/net/ip6_tables_names"),
];

/// The length of a table's name at the start of each request.
const NAME_LEN: usize = 32;
/// The offsets in `struct ipt_getinfo`: a bit set of the hooks with a chain; for each hook the
/// start of its chain and the offset of the chain's policy; the number of entries and their size in
/// bytes.
const HOOKS_AT: usize = 32;
const BEGINNINGS_AT: usize = 36;
const POLICIES_AT: usize = 56;
const NUMBER_AT: usize = 76;
const SIZE_AT: usize = 80;
const INFO_LEN: usize = 84;
/// The offset of the entries in `struct ipt_get_entries`, after name, size and padding.
const ENTRIES_AT: usize = 40;
/// The length of `struct xt_entry_target`, which precedes the verdict, and the verdict of a policy
/// that accepts.
const TARGET_LEN: usize = 32;
const ACCEPT: i32 = -2;

/// The chains by hook number, and the three that forwarded packets traverse.
const CHAINS: [&str; 5] = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];
const FORWARDED: [usize; 3] = [0, 2, 4];
pub(super) const INPUT: usize = 1;
pub(super) const FORWARD: usize = 2;

/// The maximum bytes of entries that kpx reads for the policies: at each check for changes (every
/// second), and for an evaluation.
const MOST_OFTEN: usize = 1 << 16;
const MOST_ONCE: usize = 1 << 26;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table {
    family: Family,
    name: String,
    has_rules: bool,
    /// True if a chain for forwarded packets has a rule. Such a rule may have any effect.
    has_rules_for_forwarded: bool,
    /// The hooks of chains that drop packets unless a rule accepts them; `None` if not read.
    dropping: Option<Vec<usize>>,
}

/// The kernel's description of a table (`struct ipt_getinfo`).
struct Info(Vec<u8>);

impl Table {
    /// Reads a table. Returns `None` if the table is gone.
    fn read(asker: &Asker, family: Family, name: &str, is_often: bool) -> Result<Option<Self>> {
        let of = |info: &Info, dropping| {
            let has_rules = info.has_rules();
            let has_rules_for_forwarded = info.has_rules_for_forwarded();
            Some(Self {
                family,
                name: name.to_owned(),
                has_rules,
                has_rules_for_forwarded,
                dropping,
            })
        };
        for _ in 0..TRIES {
            let mut info = question(name, INFO_LEN)?;
            match asker.ask(GET_INFO, &mut info) {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                answer => answer.with_context(|| format!("read table {name}"))?,
            }
            let info = Info(info);
            let most = if is_often { MOST_OFTEN } else { MOST_ONCE };
            if is_often && info.has_rules_for_forwarded() || info.size() > most {
                return Ok(of(&info, None));
            }
            let mut entries = question(name, ENTRIES_AT + info.size())?;
            entries[NAME_LEN..][..4].copy_from_slice(&info.0[SIZE_AT..]);
            match asker.ask(GET_ENTRIES, &mut entries) {
                // The table changed between the two requests.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                answer => {
                    answer.with_context(|| format!("read the entries of table {name}"))?;
                    return Ok(of(&info, info.dropping(family, &entries[ENTRIES_AT..])));
                }
            }
        }
        bail!("other programs keep changing table {name}")
    }

    /// A table that the kernel does not describe: it may have any effect.
    fn unread(family: Family, name: &str) -> Self {
        let name = name.to_owned();
        Self {
            family,
            name,
            has_rules: true,
            has_rules_for_forwarded: true,
            dropping: None,
        }
    }

    /// Returns the table's possible effects on forwarded packets.
    fn obstacles(&self) -> Vec<String> {
        match &self.dropping {
            Some(dropping) if !self.has_rules_for_forwarded => {
                let dropping = dropping.iter().filter(|hook| FORWARDED.contains(*hook));
                dropping.map(|hook| self.policy(*hook)).collect()
            }
            _ => vec![self.to_string()],
        }
    }

    fn policy(&self, hook: usize) -> String {
        format!(
            "chain {} of {self} drops packets that its rules do not accept",
            CHAINS[hook]
        )
    }

    pub(super) fn tool(&self) -> &'static str {
        if self.family == Family::V4 {
            "iptables-legacy"
        } else {
            "ip6tables-legacy"
        }
    }
}

impl Info {
    /// Returns the number at `at`, or the `nth` number of an array at `at`.
    fn number(&self, at: usize, nth: usize) -> u32 {
        let at = at + 4 * nth;
        u32::from_ne_bytes([self.0[at], self.0[at + 1], self.0[at + 2], self.0[at + 3]])
    }

    fn size(&self) -> usize {
        self.number(SIZE_AT, 0) as usize
    }

    fn hooks(&self) -> impl Iterator<Item = usize> {
        let hooks = self.number(HOOKS_AT, 0);
        (0..CHAINS.len()).filter(move |hook| hooks & 1 << hook != 0)
    }

    /// Returns true if a chain for forwarded packets has rules. Chains without a hook run only when
    /// these chains call them.
    fn has_rules_for_forwarded(&self) -> bool {
        let mut forwarded = self.hooks().filter(|hook| FORWARDED.contains(hook));
        forwarded.any(|hook| self.number(BEGINNINGS_AT, hook) != self.number(POLICIES_AT, hook))
    }

    /// Returns true if the table has entries besides the policies and its final entry.
    fn has_rules(&self) -> bool {
        self.number(NUMBER_AT, 0) != self.number(HOOKS_AT, 0).count_ones() + 1
    }

    /// Returns the hooks of chains whose policy drops; `None` if a policy cannot be read.
    fn dropping(&self, family: Family, entries: &[u8]) -> Option<Vec<usize>> {
        let policy = |hook| {
            Some((
                hook,
                policy(family, entries, self.number(POLICIES_AT, hook) as usize)?,
            ))
        };
        let policies: Option<Vec<_>> = self.hooks().map(policy).collect();
        Some(
            policies?
                .into_iter()
                .filter(|(_, verdict)| *verdict != ACCEPT)
                .map(|(hook, _)| hook)
                .collect(),
        )
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "table {} of {}", self.name, self.tool())
    }
}

/// Reads the verdict of the entry at this offset (`struct ipt_entry`, `struct ip6t_entry`).
fn policy(family: Family, entries: &[u8], at: usize) -> Option<i32> {
    let target_at = match family {
        Family::V4 => 88,
        Family::V6 => 140,
    };
    let entry = entries.get(at..)?;
    let target = usize::from(u16::from_ne_bytes(
        entry.get(target_at..target_at + 2)?.try_into().ok()?,
    ));
    let verdict = entry.get(target + TARGET_LEN..)?.get(..4)?;
    Some(i32::from_ne_bytes(verdict.try_into().ok()?))
}

/// Returns a buffer that starts with a table's name.
fn question(name: &str, len: usize) -> Result<Vec<u8>> {
    ensure!(
        name.len() < NAME_LEN,
        "the name of table {name} is too long"
    );
    let mut bytes = name.as_bytes().to_vec();
    bytes.resize(len, 0);
    Ok(bytes)
}

/// A chain that drops packets unless a rule accepts them.
pub(super) struct Dropping {
    pub(super) tool: &'static str,
    pub(super) chain: &'static str,
    pub(super) why: String,
    pub(super) has_rules: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Legacy(Vec<Table>);

impl Legacy {
    /// Reads the existing tables without creating any. `is_often` skips expensive reads.
    pub(crate) fn read(is_often: bool) -> Result<Self> {
        let mut tables = Vec::new();
        for (family, path) in LISTS {
            let names = names(path)?;
            if names.is_empty() {
                continue;
            }
            let asker = Asker::new(family).context("open a socket for legacy iptables tables")?;
            for name in names.lines() {
                tables.extend(Table::read(&asker, family, name, is_often).unwrap_or_else(
                    |error| {
                        debug!("legacy iptables: {error:#}");
                        Some(Table::unread(family, name))
                    },
                ));
            }
        }
        Ok(Self(tables))
    }

    #[cfg(test)]
    pub(super) fn of(tables: [&str; 2]) -> Self {
        let of = |(family, names): (Family, &str)| {
            names
                .lines()
                .map(move |name| Table::unread(family, name))
                .collect::<Vec<_>>()
        };
        Self(
            [Family::V4, Family::V6]
                .into_iter()
                .zip(tables)
                .flat_map(of)
                .collect(),
        )
    }

    /// Returns true if any chain has a rule, which may activate conntrack.
    pub(super) fn has_rules(&self) -> bool {
        self.0.iter().any(|table| table.has_rules)
    }

    /// Returns a family's chains at a hook that drop packets unless a rule accepts them.
    pub(super) fn dropping(&self, family: Family, hook: usize) -> impl Iterator<Item = Dropping> {
        let drops = move |table: &&Table| {
            table.family == family
                && table
                    .dropping
                    .as_ref()
                    .is_some_and(|hooks| hooks.contains(&hook))
        };
        self.0.iter().filter(drops).map(move |table| Dropping {
            tool: table.tool(),
            chain: CHAINS[hook],
            why: table.policy(hook),
            has_rules: table.has_rules_for_forwarded,
        })
    }

    /// Returns the possible effects of a family's tables on forwarded packets.
    pub(super) fn obstacles(&self, family: Family, is_met: impl Fn(&str) -> bool) -> Vec<String> {
        let met = self
            .0
            .iter()
            .filter(|table| table.family == family && is_met(&table.name));
        met.flat_map(Table::obstacles).collect()
    }
}

/// Returns the names in a list, one per line; empty if the kernel has no such tables.
fn names(path: &str) -> Result<String> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        names => names.with_context(|| format!("read {path}")),
    }
}

/// Returns true if conntrack tracks at least one connection.
pub(crate) fn tracks_connections() -> Result<bool> {
    Ok(sysctl::read(TRACKED)?.is_some_and(|number| number != "0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_unread_table_counts() {
        let legacy = Legacy::of(["filter\nnat\n", "mangle\n"]);
        let all = [
            "table filter of iptables-legacy",
            "table nat of iptables-legacy",
        ];
        assert_eq!(legacy.obstacles(Family::V4, |_| true), all);
        assert_eq!(legacy.obstacles(Family::V4, |table| table != NAT), all[..1]);
        assert_eq!(
            legacy.obstacles(Family::V6, |_| true),
            ["table mangle of ip6tables-legacy"]
        );
        assert_eq!(Legacy::default().obstacles(Family::V4, |_| true), [""; 0]);
    }
}
