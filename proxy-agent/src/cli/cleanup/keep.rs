//! Keeps kube-proxy's open connections when its rules are removed. The kernel translates these
//! connections only while some rule of the same tool registers NAT and connection tracking. If only
//! kube-proxy had such rules, their removal would break all its connections.

use std::process::Command;

use anyhow::Result;

use super::Removed;
use super::kube_proxy::{run, words};
use proxy_check::KubeProxyRules;
use proxy_net::netfilter::tables_with;
use proxy_net::nft::{self, Family};

/// The name of kpx's table, and the comment of its rule.
const KEEP: &str = "kpx-keep";

/// The tools that list rules, each with the tool that changes these rules.
const TOOLS: [(&str, &str); 4] = [
    ("iptables-legacy-save", "iptables-legacy"),
    ("ip6tables-legacy-save", "ip6tables-legacy"),
    ("iptables-nft-save", "iptables-nft"),
    ("ip6tables-nft-save", "ip6tables-nft"),
];

/// Creates an nftables table that changes no packet: new connections pass its chain, open
/// connections never reach it.
pub(super) fn keep_by_nft(family: Family, removed: &mut Removed) -> Result<()> {
    nft::make_keeper(family, KEEP)?;
    removed.keep(&table(family));
    Ok(())
}

/// Creates a rule of legacy iptables that changes no packet.
pub(super) fn keep_by_iptables(tool: &str, removed: &mut Removed) -> Result<()> {
    let rule = "-w -t nat -A POSTROUTING -m conntrack --ctstate ESTABLISHED -m comment --comment kpx-keep -j RETURN";
    run(tool, &rule.split(' ').collect::<Vec<_>>())?;
    removed.keep(&format!("{tool}'s rule {KEEP}"));
    Ok(())
}

/// Removes the tables and rules of this module. Breaks connections that depend on them.
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

/// Removes these tables and rules if kube-proxy's rules use NAT again. Otherwise adds a note.
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

/// Notes the iptables rules that stay because no iptables is installed, as in kpx's image. Earlier
/// versions of kpx created such rules in nftables' tables too.
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

/// Returns the existing rules, each with the tool that removes it. To list tables creates none.
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

/// Returns the output of a tool; `None` if the tool is missing or fails.
fn output(tool: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(tool).args(arguments).output().ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns true if kube-proxy's table of a family translates packets.
pub(super) fn translates(family: Family) -> Result<bool> {
    let mut chains = nft::chains()?.into_iter();
    Ok(chains.any(|chain| chain.is_nat && chain.family == family && chain.table == "kube-proxy"))
}
