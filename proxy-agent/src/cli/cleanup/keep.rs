//! Keeps the connections that kube-proxy opened when its rules are removed. The kernel goes on
//! translating them only while some rule of the same tool wants NAT and connection tracking. On a
//! node where kube-proxy had the only such rules, the kernel would cut all of them.

use std::process::Command;

use anyhow::Result;

use super::Removed;
use super::kube_proxy::{run, words};
use proxy_check::KubeProxyRules;
use proxy_net::netfilter::tables_with;
use proxy_net::nft::{self, Family};

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
pub(super) fn keep_by_nft(family: Family, removed: &mut Removed) -> Result<()> {
    nft::make_keeper(family, KEEP)?;
    removed.keep(&table(family));
    Ok(())
}

/// Makes a rule of legacy iptables with the same effect.
pub(super) fn keep_by_iptables(tool: &str, removed: &mut Removed) -> Result<()> {
    let rule = "-w -t nat -A POSTROUTING -m conntrack --ctstate ESTABLISHED -m comment --comment kpx-keep -j RETURN";
    run(tool, &rule.split(' ').collect::<Vec<_>>())?;
    removed.keep(&format!("{tool}'s rule {KEEP}"));
    Ok(())
}

/// Removes these tables and rules, which cuts the connections that still need them.
pub(super) fn remove(removed: &mut Removed) -> Result<()> {
    for family in nft::families_of(KEEP)? {
        nft::remove_table(family, KEEP)?;
        removed.add(table(family));
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
    let mut translates_again = found.chains.iter().any(|chains| chains.table == "nat");
    for family in found.tables {
        translates_again |= translates(family)?;
    }
    if translates_again {
        return remove(removed);
    }
    let tables = nft::families_of(KEEP)?.into_iter().map(table);
    for what in tables.chain(rules().map(|(tool, _)| format!("{tool}'s rule {KEEP}"))) {
        removed.note(format!(
            "kept {what}, because kube-proxy's connections may need it: kpx cleanup removes it"
        ));
    }
    Ok(())
}

/// Names the rules of iptables that are left because no iptables is installed here, as in kpx's
/// image. Earlier versions of kpx made them in tables of nftables as well.
pub(super) async fn name_left(removed: &mut Removed) -> Result<()> {
    if removed.notes(KEEP) {
        return Ok(());
    }
    for table in tables_with(KEEP).await? {
        removed.note(format!(
            "{KEEP} stays in the nftables table {table}: no tool to remove it is installed here. On the node: kpx cleanup, where iptables is installed"
        ));
    }
    Ok(())
}

fn table(family: Family) -> String {
    format!("the nftables table {} {KEEP}", family.name())
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

/// Returns true if kube-proxy's table of a family translates anything.
pub(super) fn translates(family: Family) -> Result<bool> {
    let mut chains = nft::chains()?.into_iter();
    Ok(chains.any(|chain| chain.is_nat && chain.family == family && chain.table == "kube-proxy"))
}
