//! Keeps the connections that kube-proxy opened when its rules are removed. The kernel goes on
//! translating them only while some rule of the same tool wants NAT and connection tracking. On a
//! node where kube-proxy had the only such rules, the kernel would cut all of them.

use std::process::Command;

use anyhow::Result;

use super::Removed;
use super::kube_proxy::{run, words};
use proxy_check::KubeProxyRules;
use proxy_net::netfilter::tables_with;

/// The name of our table, and the comment of our rule.
const KEEP: &str = "kpx-keep";

/// The tools that may show our rules, and those that change them.
const TOOLS: [(&str, &str); 4] = [
    ("iptables-legacy-save", "iptables-legacy"),
    ("ip6tables-legacy-save", "ip6tables-legacy"),
    ("iptables-nft-save", "iptables-nft"),
    ("ip6tables-nft-save", "ip6tables-nft"),
];

/// Makes an nftables table that changes nothing: new connections pass its chain, and open ones
/// never reach it.
pub(super) fn keep_by_nft(family: &str) -> Result<()> {
    let chain = "{ type nat hook postrouting priority 300 ; }";
    run("nft", &["add", "table", family, KEEP])?;
    run("nft", &["flush", "table", family, KEEP])?;
    run("nft", &["add", "chain", family, KEEP, "nat", chain])?;
    run(
        "nft",
        &[
            "add",
            "rule",
            family,
            KEEP,
            "nat",
            "ct",
            "state",
            "established",
            "return",
        ],
    )
}

/// Makes an iptables rule with the same effect.
pub(super) fn keep_by_iptables(tool: &str) -> Result<()> {
    let rule = "-w -t nat -A POSTROUTING -m conntrack --ctstate ESTABLISHED -m comment --comment kpx-keep -j RETURN";
    run(tool, &rule.split(' ').collect::<Vec<_>>())
}

/// Removes these tables and rules, which cuts the connections that still need them.
pub(super) fn remove(removed: &mut Removed) -> Result<()> {
    for family in tables() {
        run("nft", &["delete", "table", family, KEEP])?;
        removed.add(format!("the nftables table {family} {KEEP}"));
    }
    for (tool, rule) in rules() {
        let rule = words(&rule);
        let rule = rule.iter().skip(1).map(String::as_str);
        run(
            tool,
            &["-w", "-t", "nat", "-D"]
                .into_iter()
                .chain(rule)
                .collect::<Vec<_>>(),
        )?;
        removed.add(format!("{tool}'s rule {KEEP}"));
    }
    Ok(())
}

/// Removes these tables and rules once kube-proxy's own rules want NAT again. Until then the tables
/// and rules stay, and a note says so.
pub(super) fn remove_if_superfluous(removed: &mut Removed) -> Result<()> {
    let found = KubeProxyRules::find()?;
    if found.chains.iter().any(|chains| chains.table == "nat")
        || found
            .tables
            .iter()
            .any(|family| translates(family, "kube-proxy"))
    {
        return remove(removed);
    }
    let tables = tables().map(|family| format!("the nftables table {family} {KEEP}"));
    for what in tables.chain(rules().map(|(tool, _)| format!("{tool}'s rule {KEEP}"))) {
        removed.note(format!(
            "kept {what}, because kube-proxy's connections may need it: kpx cleanup removes it"
        ));
    }
    Ok(())
}

/// Names the tables and rules that are left because the tool that removes them is not installed
/// here, as in kpx's image.
pub(super) async fn name_left(removed: &mut Removed) -> Result<()> {
    if removed.notes(KEEP) {
        return Ok(());
    }
    for table in tables_with(KEEP).await? {
        let how = match table.ends_with(KEEP) {
            true => format!("nft delete table {table}"),
            false => "kpx cleanup, where iptables is installed".to_owned(),
        };
        removed.note(format!(
            "{KEEP} stays in the nftables table {table}: no tool to remove it is installed here. On the node: {how}"
        ));
    }
    Ok(())
}

/// Returns the families that have our table.
fn tables() -> impl Iterator<Item = &'static str> {
    ["ip", "ip6"]
        .into_iter()
        .filter(|family| output("nft", &["list", "table", family, KEEP]).is_some())
}

/// Returns our rules that exist, each with the tool that removes it. A tool that is asked for all
/// tables makes none.
fn rules() -> impl Iterator<Item = (&'static str, String)> {
    TOOLS.into_iter().flat_map(|(save, tool)| {
        let saved = output(save, &[]).unwrap_or_default();
        let rules = saved
            .lines()
            .filter(|line| line.starts_with("-A ") && line.contains(KEEP));
        rules
            .map(|rule| (tool, rule.to_owned()))
            .collect::<Vec<_>>()
    })
}

/// Returns the output of a tool; None if the tool is not installed, or fails.
fn output(tool: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(tool).args(arguments).output().ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns true if one of kube-proxy's tables translates anything.
pub(super) fn translates(family: &str, table: &str) -> bool {
    output("nft", &["list", "table", family, table]).is_some_and(|text| text.contains("type nat"))
}
