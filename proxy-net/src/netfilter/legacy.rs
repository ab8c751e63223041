//! The tables of legacy iptables, of which kpx sees the names alone, and the state of conntrack.

use std::fs;
use std::io::ErrorKind;

use anyhow::{Context, Result};

use super::packet::Family;
use crate::sysctl;

/// The parameter that counts the connections that conntrack follows.
const TRACKED: &str = "netfilter/nf_conntrack_count";
/// The kind of chain, and the table of iptables, that changes addresses; only a connection's first packet passes it.
pub(super) const NAT: &str = "nat";

/// The tables of legacy iptables, by family. Only a process that may open raw sockets can read whether they have rules,
/// and an agent may not. An unused table does not exist, so a table's presence counts.
const LISTS: [(&str, &str); 2] =
    [("iptables", "/proc/net/ip_tables_names"), ("ip6tables", "/proc/net/ip6_tables_names")];

/// The names of the tables, one on each line.
#[derive(Debug, Default)]
pub(super) struct Legacy([String; 2]);

impl Legacy {
    pub(super) fn read() -> Result<Self> {
        let [v4, v6] = tables();
        Ok(Self([v4?, v6?]))
    }

    #[cfg(test)]
    pub(super) fn of(tables: [&str; 2]) -> Self {
        Self(tables.map(str::to_owned))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(String::is_empty)
    }

    /// Describes the tables of a family that packets meet.
    pub(super) fn tables(&self, family: Family, is_met: impl Fn(&str) -> bool) -> Vec<String> {
        let place = usize::from(family == Family::V6);
        let ((tool, _), tables) = (LISTS[place], &self.0[place]);
        let met = tables.lines().filter(|table| is_met(table));
        met.map(|table| format!("table {table} of {tool}-legacy")).collect()
    }
}

/// Returns the names of the tables for IPv4 and for IPv6, one on each line. A kernel without such tables has no list.
pub(crate) fn tables() -> [Result<String>; 2] {
    LISTS.map(|(_, path)| match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        tables => tables.with_context(|| format!("read {path}")),
    })
}

/// Returns true if conntrack follows a connection.
pub(crate) fn follows_connections() -> Result<bool> {
    Ok(sysctl::read(TRACKED)?.is_some_and(|number| number != "0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_table_in_use_counts() {
        let legacy = Legacy::of(["filter\nnat\n", "mangle\n"]);
        let all = ["table filter of iptables-legacy", "table nat of iptables-legacy"];
        assert_eq!(legacy.tables(Family::V4, |_| true), all);
        assert_eq!(legacy.tables(Family::V4, |table| table != NAT), all[..1]);
        assert_eq!(legacy.tables(Family::V6, |_| true), ["table mangle of ip6tables-legacy"]);
        assert_eq!(Legacy::default().tables(Family::V4, |_| true), [""; 0]);
    }
}
