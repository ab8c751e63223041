//! Finds kube-proxy's rules: nftables' by netlink, including the rules of iptables-nft, and legacy
//! iptables' by its tools.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::process::{Command, Output};

use anyhow::{Context, Result};
use proxy_net::nft::{self, Family};

/// The name of the tables of kube-proxy's nftables mode, one per family.
const TABLE: &str = "kube-proxy";

/// The chains of kube-proxy's iptables and IPVS modes; `CHAIN_PREFIXES` has the names of its chains
/// per Service.
///
/// Other `KUBE-` chains do not belong to kube-proxy. The kubelet has some. kube-router's
/// NetworkPolicies, which k3s includes, use `KUBE-ROUTER-`, `KUBE-POD-FW-` and `KUBE-NWPLCY-`.
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

/// The tables in which kube-proxy's iptables and IPVS modes create chains.
const TABLES: [&str; 3] = ["nat", "filter", "mangle"];

/// The files with the names of legacy iptables' tables.
const LEGACY_TABLES: [&str; 2] = [
    "/proc/thread-self/net/ip_tables_names",
    "/proc/thread-self/net/ip6_tables_names",
];

/// The tools that list rules of legacy iptables, and the tools that change them. `iptables` may be
/// either variant.
const TOOLS: [(&str, &str); 4] = [
    ("iptables-legacy-save", "iptables-legacy"),
    ("ip6tables-legacy-save", "ip6tables-legacy"),
    ("iptables-save", "iptables"),
    ("ip6tables-save", "ip6tables"),
];

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KubeProxyRules {
    /// The families of nftables' tables named kube-proxy.
    pub tables: Vec<Family>,
    /// The chains of both variants of iptables.
    pub chains: Vec<Chains>,
    /// True if legacy iptables has a nat table here, and no installed tool lists it.
    pub unknown: bool,
}

/// kube-proxy's chains in a table of iptables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chains {
    /// The tool that changes the chains.
    pub tool: &'static str,
    /// The family of an nftables table; `None` for legacy iptables.
    pub family: Option<Family>,
    pub table: String,
    pub names: BTreeSet<String>,
    /// The rules of other legacy chains that jump to these chains, in the notation of
    /// `iptables-save`: `-A PREROUTING … -j KUBE-SERVICES`.
    pub jumps: Vec<String>,
}

impl KubeProxyRules {
    pub fn find() -> Result<Self> {
        let mut found = Self {
            tables: nft::families_of(TABLE)?,
            chains: by_netlink()?,
            unknown: has_legacy_nat()?,
        };
        for (save, tool_name) in TOOLS {
            let Some(saved) = tool(save)? else {
                continue;
            };
            found.unknown &= !shows_legacy(save)?;
            for chains in chains(tool_name, &saved) {
                // Plain `iptables` lists the rules of one variant again.
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

/// Returns the output of a tool; `None` if the tool is not installed. A tool that fails because its
/// kernel module is missing has no rules to list.
fn tool(name: &str) -> Result<Option<String>> {
    match Command::new(name).output() {
        Ok(Output { stdout, .. }) => Ok(Some(String::from_utf8_lossy(&stdout).into_owned())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("run {name}")),
    }
}

/// Returns true if an installed tool reads legacy tables: versions before 1.8 do, and later
/// versions print their variant.
fn shows_legacy(save: &str) -> Result<bool> {
    let version = Command::new(save).arg("--version").output();
    let version = version.with_context(|| format!("run {save} --version"))?;
    Ok(!String::from_utf8_lossy(&version.stdout).contains("nf_tables"))
}

/// Returns the chains of iptables-nft.
fn by_netlink() -> Result<Vec<Chains>> {
    let mut tables = BTreeMap::<_, BTreeSet<_>>::new();
    for chain in nft::chains()? {
        if TABLES.contains(&&*chain.table) && is_proxys(&chain.name) {
            let names = tables.entry((chain.family, chain.table)).or_default();
            names.insert(chain.name);
        }
    }
    let chains = tables.into_iter().map(|((family, table), names)| Chains {
        tool: match family {
            Family::Ip => "iptables-nft",
            Family::Ip6 => "ip6tables-nft",
        },
        family: Some(family),
        table,
        names,
        jumps: Vec::new(),
    });
    Ok(chains.collect())
}

/// Returns true if legacy iptables has a nat table. Reading its list does not create the table.
fn has_legacy_nat() -> Result<bool> {
    for path in LEGACY_TABLES {
        match fs::read_to_string(path) {
            Ok(names) if names.lines().any(|name| name == "nat") => return Ok(true),
            Ok(_) => {}
            // A kernel without legacy tables does not have the file.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("read {path}")),
        }
    }
    Ok(false)
}

fn is_proxys(name: &str) -> bool {
    CHAINS.contains(&name) || CHAIN_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Parses the output of `iptables-save`: `*nat`, then `:CHAIN POLICY`, then rules.
fn chains(tool: &'static str, saved: &str) -> Vec<Chains> {
    let mut tables: Vec<Chains> = Vec::new();
    for line in saved.lines() {
        if let Some(table) = line.strip_prefix('*') {
            tables.push(Chains {
                tool,
                family: None,
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
