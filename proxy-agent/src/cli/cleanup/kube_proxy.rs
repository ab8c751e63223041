//! Removes the leftovers of kube-proxy, as `kube-proxy --cleanup` does: with the tools that made them.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use nix::net::if_::if_nametoindex;

use super::{Removed, keep};
use proxy_check::{Chains, KubeProxyRules};
use proxy_net::Handle;
use proxy_net::link::KUBE_IPVS0;

/// The list of IPVS's virtual servers in this network namespace, below three lines of headings.
const IP_VS: &str = "/proc/net/ip_vs";

pub(super) async fn remove(handle: &Handle, removed: &mut Removed) -> Result<()> {
    let rules = KubeProxyRules::find()?;
    ensure!(!rules.unknown, "neither nft nor iptables is installed to look for kube-proxy's rules");
    for family in &rules.tables {
        if keep::translates(family, "kube-proxy") {
            keep::keep_by_nft(family)?;
            removed.keep(&format!("the nftables table {family} kpx-keep"));
        }
        run("nft", &["delete", "table", family, "kube-proxy"])?;
        removed.add(format!("the nftables table {family} kube-proxy"));
    }
    for chains in &rules.chains {
        if chains.table == "nat" {
            keep::keep_by_iptables(chains.tool)?;
            removed.keep(&format!("{}'s rule kpx-keep", chains.tool));
        }
        remove_chains(chains)?;
        removed.add(format!("{} chains of {}'s table {}", chains.names.len(), chains.tool, chains.table));
    }
    if let Ok(ifindex) = if_nametoindex(KUBE_IPVS0) {
        // The virtual servers would go on taking the host's own packets. The device goes last, because it is the proof
        // that the virtual servers are kube-proxy's.
        if fs::read_to_string(IP_VS).is_ok_and(|listed| listed.lines().count() > 3) {
            run("ipvsadm", &["--clear"])?;
            removed.add("the virtual servers of IPVS");
        }
        let deleted = handle.link().del(ifindex).execute().await;
        deleted.with_context(|| format!("delete {KUBE_IPVS0}"))?;
        removed.add(format!("the device {KUBE_IPVS0}"));
    }
    Ok(())
}

/// Removes chains: first the jumps to them, then their rules, which may jump to one another, then the chains.
fn remove_chains(chains: &Chains) -> Result<()> {
    let Chains { tool, table, names, jumps } = chains;
    for jump in jumps {
        let words = words(jump);
        let rule = words.iter().skip(1).map(String::as_str);
        run(tool, &["-w", "-t", table, "-D"].into_iter().chain(rule).collect::<Vec<_>>())?;
    }
    for verb in ["-F", "-X"] {
        for name in names {
            run(tool, &["-w", "-t", table, verb, name])?;
        }
    }
    Ok(())
}

pub(super) fn run(tool: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(tool).args(arguments).output().with_context(|| format!("run {tool}"))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{tool} {}: {}", arguments.join(" "), error.trim());
    Ok(())
}

/// Splits a rule as `iptables-save` prints it: words with blanks are in quotation marks.
pub(super) fn words(rule: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let (mut quoted, mut escaped) = (false, false);
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
        let expected = ["-A", "PREROUTING", "-m", "comment", "--comment", "service \"portals\"", "-j", "KUBE-SERVICES"];
        assert_eq!(words(rule), expected);
    }
}
