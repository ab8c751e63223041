//! Removes kube-proxy's leftovers as `kube-proxy --cleanup` does: nftables rules by netlink, legacy
//! iptables rules with iptables' tools.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use ipnet::IpNet;

use super::{Removed, ipvs, keep};
use proxy_check::{Chains, KubeProxyRules};
use proxy_net::{Handle, nft};

pub(super) async fn remove(
    handle: &Handle,
    excluded: &[IpNet],
    removed: &mut Removed,
) -> Result<()> {
    let rules = KubeProxyRules::find()?;
    // The virtual servers go first: without masquerading rules they would send the host's packets
    // to backends that cannot reply.
    ipvs::remove_servers(handle, excluded, removed).await?;
    for &family in &rules.tables {
        if keep::translates(family)? {
            keep::keep_by_nft(family, removed)?;
        }
        nft::remove_table(family, "kube-proxy")?;
        removed.add(format!("the nftables table {} kube-proxy", family.name()));
    }
    for chains in &rules.chains {
        match chains.family {
            Some(family) if chains.table == "nat" => keep::keep_by_nft(family, removed)?,
            None if chains.table == "nat" => keep::keep_by_iptables(chains.tool, removed)?,
            _ => {}
        }
        match chains.family {
            Some(family) => nft::remove_chains(family, &chains.table, &chains.names)?,
            None => remove_chains(chains)?,
        }
        removed.add(format!(
            "{} chains of {}'s table {}",
            chains.names.len(),
            chains.tool,
            chains.table
        ));
    }
    // The kernel destroys an ipset only after the rules that refer to it.
    ipvs::remove_sets(removed).await?;
    ensure!(
        !rules.unknown,
        "the nat table of iptables-legacy may hold kube-proxy's rules, and iptables is not installed here: run `kpx cleanup --kube-proxy` on the node itself, or restart the node"
    );
    Ok(())
}

/// Removes chains: first the jumps to them, then their rules, which may jump between them, then the
/// chains.
fn remove_chains(chains: &Chains) -> Result<()> {
    let Chains {
        tool,
        table,
        names,
        jumps,
        ..
    } = chains;
    for jump in jumps {
        let words = words(jump);
        let rule = words.iter().skip(1).map(String::as_str);
        run(
            tool,
            &["-w", "-t", table, "-D"]
                .into_iter()
                .chain(rule)
                .collect::<Vec<_>>(),
        )?;
    }
    for verb in ["-F", "-X"] {
        for name in names {
            run(tool, &["-w", "-t", table, verb, name])?;
        }
    }
    Ok(())
}

pub(super) fn run(tool: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(tool)
        .args(arguments)
        .output()
        .with_context(|| format!("run {tool}"))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{tool} {}: {}",
        arguments.join(" "),
        error.trim()
    );
    Ok(())
}

/// Splits a rule of `iptables-save`; words with spaces are quoted.
pub(super) fn words(rule: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    let mut escaped = false;
    for letter in rule.chars() {
        let last = words.last_mut().expect("there is always a word");
        match letter {
            _ if escaped => {
                last.push(letter);
                escaped = false;
            }
            '\\' => escaped = true,
            '"' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            _ => last.push(letter),
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_words_stay_together() {
        let rule = r#"-A PREROUTING -m comment --comment "service \"portals\"" -j KUBE-SERVICES"#;
        let expected = [
            "-A",
            "PREROUTING",
            "-m",
            "comment",
            "--comment",
            "service \"portals\"",
            "-j",
            "KUBE-SERVICES",
        ];
        assert_eq!(words(rule), expected);
    }
}
