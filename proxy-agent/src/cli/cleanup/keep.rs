//! What goes on translating connections that kube-proxy opened once its rules are gone. The kernel does it, but only as
//! long as any rule of the same tool wants NAT and connection tracking: on a node where kube-proxy's were the only ones,
//! it would cut them all.

use std::process::Command;

use anyhow::Result;

use super::Removed;
use super::kube_proxy::{run, words};
use crate::cli::check::KubeProxyRules;

/// Name of our table, and comment of our rule.
const KEEP: &str = "kpx-keep";

/// Tools whose rules may be ours, and those that change them.
const TOOLS: [(&str, &str); 4] = [
    ("iptables-legacy-save", "iptables-legacy"),
    ("ip6tables-legacy-save", "ip6tables-legacy"),
    ("iptables-nft-save", "iptables-nft"),
    ("ip6tables-nft-save", "ip6tables-nft"),
];

/// A table of nftables' that changes nothing: what is new passes its chain, and what is open never meets it.
pub(super) fn keep_by_nft(family: &str) -> Result<()> {
    let chain = "{ type nat hook postrouting priority 300 ; }";
    run("nft", &["add", "table", family, KEEP])?;
    run("nft", &["flush", "table", family, KEEP])?;
    run("nft", &["add", "chain", family, KEEP, "nat", chain])?;
    run("nft", &["add", "rule", family, KEEP, "nat", "ct", "state", "established", "return"])
}

/// The same by a rule of iptables.
pub(super) fn keep_by_iptables(tool: &str) -> Result<()> {
    let rule = "-w -t nat -A POSTROUTING -m conntrack --ctstate ESTABLISHED -m comment --comment kpx-keep -j RETURN";
    run(tool, &rule.split(' ').collect::<Vec<_>>())
}

/// Takes all of that away, which cuts what still goes by it.
pub(super) fn remove(removed: &mut Removed) -> Result<()> {
    for family in tables() {
        run("nft", &["delete", "table", family, KEEP])?;
        removed.add(format!("the nftables table {family} {KEEP}"));
    }
    for (tool, rule) in rules() {
        let rule = words(&rule);
        let rule = rule.iter().skip(1).map(String::as_str);
        run(tool, &["-w", "-t", "nat", "-D"].into_iter().chain(rule).collect::<Vec<_>>())?;
        removed.add(format!("{tool}'s rule {KEEP}"));
    }
    Ok(())
}

/// Once kube-proxy's own rules want NAT again, these keep nothing, and go. Else they stay, and that is said.
pub(super) fn remove_if_superfluous(removed: &mut Removed) -> Result<()> {
    let found = KubeProxyRules::find()?;
    if found.chains.iter().any(|chains| chains.table == "nat")
        || found.tables.iter().any(|family| translates(family, "kube-proxy"))
    {
        return remove(removed);
    }
    let tables = tables().map(|family| format!("the nftables table {family} {KEEP}"));
    for what in tables.chain(rules().map(|(tool, _)| format!("{tool}'s rule {KEEP}"))) {
        removed.note(format!("{what} stays, as connections of kube-proxy may go on by it: kpx cleanup removes it"));
    }
    Ok(())
}

/// The families whose table is there.
fn tables() -> impl Iterator<Item = &'static str> {
    ["ip", "ip6"].into_iter().filter(|family| output("nft", &["list", "table", family, KEEP]).is_some())
}

/// Those that are there, each with the tool that removes it.
fn rules() -> impl Iterator<Item = (&'static str, String)> {
    TOOLS.into_iter().flat_map(|(save, tool)| {
        let saved = output(save, &["-t", "nat"]).unwrap_or_default();
        let rules = saved.lines().filter(|line| line.starts_with("-A ") && line.contains(KEEP));
        rules.map(|rule| (tool, rule.to_owned())).collect::<Vec<_>>()
    })
}

/// None if the tool is not installed, or finds nothing.
fn output(tool: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(tool).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether one of kube-proxy's tables translates anything.
pub(super) fn translates(family: &str, table: &str) -> bool {
    output("nft", &["list", "table", family, table]).is_some_and(|text| text.contains("type nat"))
}
