//! Finds kube-proxy's rules, as far as the installed tools show them.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::process::{Command, Output};

use anyhow::{Context, Result};
use serde_json::Value;

/// The name of kube-proxy's tables in mode nftables, one per family.
const TABLE: &str = "kube-proxy";

/// The chains of kube-proxy's modes iptables and ipvs; `CHAIN_PREFIXES` has the names that it makes
/// for each Service.
///
/// No other `KUBE-` chain belongs to kube-proxy. The kubelet has some. kube-router's
/// NetworkPolicies, which k3s has built in, use `KUBE-ROUTER-`, `KUBE-POD-FW-` and `KUBE-NWPLCY-`.
const CHAINS: [&str; 13] = [
    "KUBE-SERVICES",
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-NODEPORTS",
    "KUBE-POSTROUTING",
    "KUBE-MARK-MASQ",
    "KUBE-FORWARD",
    "KUBE-PROXY-FIREWALL",
    "KUBE-PROXY-CANARY",
    "KUBE-LOAD-BALANCER",
    "KUBE-NODE-PORT",
    "KUBE-IPVS-FILTER",
    "KUBE-IPVS-OUT-FILTER",
    "KUBE-SOURCE-RANGES-FIREWALL",
];
const CHAIN_PREFIXES: [&str; 6] = [
    "KUBE-SVC-",
    "KUBE-SVL-",
    "KUBE-EXT-",
    "KUBE-XLB-",
    "KUBE-FW-",
    "KUBE-SEP-",
];

/// The tools that show iptables' rules, and those that change them. `iptables` may be either of the
/// variants.
const TOOLS: [(&str, &str); 6] = [
    ("iptables-legacy-save", "iptables-legacy"),
    ("ip6tables-legacy-save", "ip6tables-legacy"),
    ("iptables-nft-save", "iptables-nft"),
    ("ip6tables-nft-save", "ip6tables-nft"),
    ("iptables-save", "iptables"),
    ("ip6tables-save", "ip6tables"),
];

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KubeProxyRules {
    /// The families of nftables' tables called kube-proxy: `ip`, `ip6`.
    pub tables: Vec<String>,
    /// The chains of iptables, from all installed variants.
    pub chains: Vec<Chains>,
    /// True if neither nft nor any iptables is installed.
    pub unknown: bool,
}

/// The chains of kube-proxy in one of iptables' tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chains {
    /// The tool that changes the chains.
    pub tool: &'static str,
    pub table: String,
    pub names: BTreeSet<String>,
    /// The rules of other chains that jump to these, as `iptables-save` prints them:
    /// `-A PREROUTING … -j KUBE-SERVICES`.
    pub jumps: Vec<String>,
}

impl KubeProxyRules {
    pub fn find() -> Result<Self> {
        let nft = tool("nft", &["-j", "list", "tables"])?;
        let tables = nft.as_deref().map(tables).transpose()?.unwrap_or_default();
        let mut found = Self {
            tables,
            chains: Vec::new(),
            unknown: nft.is_none(),
        };
        for (save, tool_name) in TOOLS {
            let Some(saved) = tool(save, &[])? else {
                continue;
            };
            found.unknown = false;
            for chains in chains(tool_name, &saved) {
                // Plain `iptables` shows again the rules of one of its variants.
                let known = !tool_name.contains('-')
                    && found.chains.iter().any(|other| {
                        (&other.table, &other.names) == (&chains.table, &chains.names)
                            && other.tool.starts_with("ip6") == chains.tool.starts_with("ip6")
                    });
                if !known {
                    found.chains.push(chains);
                }
            }
        }
        Ok(found)
    }

    pub fn is_empty(&self) -> bool {
        self.tables.is_empty() && self.chains.is_empty()
    }
}

/// Returns the output of a tool; None if the tool is not installed. A tool fails if its kernel part
/// is missing, and then has no rules to show.
fn tool(name: &str, arguments: &[&str]) -> Result<Option<String>> {
    match Command::new(name).args(arguments).output() {
        Ok(Output { stdout, .. }) => Ok(Some(String::from_utf8_lossy(&stdout).into_owned())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("run {name}")),
    }
}

/// Parses the output of `nft -j list tables`.
fn tables(json: &str) -> Result<Vec<String>> {
    if json.trim().is_empty() {
        return Ok(Vec::new());
    }
    let listed: Value = serde_json::from_str(json).context("read nft's list of tables")?;
    let tables = listed["nftables"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|item| &item["table"]);
    let ours = tables.filter(|table| table["name"] == TABLE);
    Ok(ours
        .filter_map(|table| table["family"].as_str().map(str::to_owned))
        .collect())
}

/// Parses the output of `iptables-save`: `*nat`, then `:CHAIN POLICY`, then rules.
fn chains(tool: &'static str, saved: &str) -> Vec<Chains> {
    let mut tables: Vec<Chains> = Vec::new();
    let is_proxys = |name: &str| {
        CHAINS.contains(&name) || CHAIN_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
    };
    for line in saved.lines() {
        if let Some(table) = line.strip_prefix('*') {
            tables.push(Chains {
                tool,
                table: table.to_owned(),
                names: BTreeSet::new(),
                jumps: Vec::new(),
            });
        }
        let Some(table) = tables.last_mut() else {
            continue;
        };
        if let Some(chain) = line.strip_prefix(':') {
            let name = chain.split(' ').next().unwrap_or_default();
            table.names.extend(is_proxys(name).then(|| name.to_owned()));
        }
        let mut words = line.split(' ');
        if words.next() == Some("-A") && !words.next().is_some_and(is_proxys) {
            let target = line
                .split_once(" -j ")
                .map(|(_, target)| target.split(' ').next().unwrap_or_default());
            table
                .jumps
                .extend(target.is_some_and(is_proxys).then(|| line.to_owned()));
        }
    }
    tables.retain(|table| !table.names.is_empty());
    tables
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nft_list_yields_tables_of_mode_nftables() {
        let json = r#"{"nftables": [{"metainfo": {"version": "1.0.6"}}, {"table": {"family": "ip", "name": "kube-proxy",
            "handle": 1}}, {"table": {"family": "ip6", "name": "kube-proxy", "handle": 2}}, {"table": {"family": "inet",
            "name": "filter", "handle": 3}}]}"#;
        assert_eq!(tables(json).unwrap(), ["ip", "ip6"]);
        assert_eq!(tables("").unwrap(), [""; 0], "a kernel without nftables");
        assert!(tables("nonsense").is_err());
    }

    #[test]
    fn iptables_save_yields_chains_of_kube_proxy_only() {
        let saved = "\
# Generated
*filter
:INPUT ACCEPT [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-ROUTER-INPUT - [0:0]
:KUBE-POD-FW-ABC - [0:0]
:KUBE-NWPLCY-DEFAULT - [0:0]
-A INPUT -m comment --comment \"kube-router netpol\" -j KUBE-ROUTER-INPUT
-A INPUT -j KUBE-FIREWALL
-A KUBE-ROUTER-INPUT -d 10.42.0.5/32 -j KUBE-POD-FW-ABC
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-ABC - [0:0]
-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A PREROUTING -j CNI-HOSTPORT-DNAT
-A KUBE-SERVICES -d 10.96.0.1/32 -j KUBE-SVC-ABC
COMMIT
";
        let found = chains("iptables", saved);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].table, "nat");
        assert_eq!(
            Vec::from_iter(&found[0].names),
            ["KUBE-SERVICES", "KUBE-SVC-ABC"]
        );
        assert_eq!(
            found[0].jumps,
            ["-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES"]
        );
    }
}
