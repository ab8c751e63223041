//! Evaluates what remains of kube-proxy, and lists the steps from kube-proxy to kpx.

use proxy_view::output::list;

use crate::facts::{Facts, PORTS};
use crate::finding::{Finding, fail, ok, warn};

pub(super) fn kube_proxy(facts: &Facts) -> Finding {
    const WHAT: &str = "kube-proxy";
    if !facts.kube_proxies.is_empty() {
        let found = format!("runs, process {}", list(&facts.kube_proxies));
        return fail(
            WHAT,
            found,
            format!("it serves until kpx does: {}", steps(facts)),
        );
    }
    ok(
        WHAT,
        if facts.kpx_runs {
            "does not run; kpx does"
        } else {
            "does not run"
        },
    )
}

pub(super) fn kube_proxy_rules(facts: &Facts) -> Finding {
    const WHAT: &str = "kube-proxy's rules";
    let rules = &facts.kube_proxy_rules;
    if let Some(why) = facts
        .kube_proxy_rules_unknown
        .as_ref()
        .filter(|_| rules.is_empty())
    {
        return warn(WHAT, format!("unknown: {why}"), "run kpx check as root");
    }
    if rules.unknown && rules.is_empty() {
        let fix = "if kube-proxy ever ran here, run kpx check where iptables is installed";
        let found =
            "unknown: iptables-legacy has a nat table, and iptables is not installed to list it";
        return warn(WHAT, found, fix);
    }
    if rules.is_empty() {
        return ok(WHAT, "none");
    }
    let tables = rules
        .tables
        .iter()
        .map(|family| format!("nftables table {} kube-proxy", family.name()));
    let chains = rules.chains.iter();
    let chains = chains.map(|chains| {
        format!(
            "{} chains in {}'s {}",
            chains.names.len(),
            chains.tool,
            chains.table
        )
    });
    let found = list(tables.chain(chains));
    // The chain cluster-ips-check drops the node's packets to ClusterIPs that are missing in the
    // stale table.
    let refuses = facts.kpx_runs && facts.kube_proxies.is_empty() && !rules.tables.is_empty();
    let refuses = if refuses {
        "; it drops packets of the node to Services that are newer than these rules"
    } else {
        ""
    };
    fail(WHAT, format!("{found}{refuses}"), steps(facts))
}

pub(super) fn kube_ipvs0(facts: &Facts) -> Finding {
    const WHAT: &str = "kube-ipvs0";
    if facts.kube_ipvs0 {
        let found = "there, of kube-proxy's mode ipvs: it makes every ClusterIP the host's own";
        return fail(WHAT, found, steps(facts));
    }
    ok(WHAT, "not there")
}

pub(super) fn ports(facts: &Facts) -> Finding {
    const WHAT: &str = "ports";
    if facts.taken_ports.is_empty() {
        return ok(WHAT, format!("{} are free", list(PORTS)));
    }
    let found = format!("{} taken", list(&facts.taken_ports));
    if facts.kpx_runs {
        return ok(WHAT, format!("{found}; kpx runs"));
    }
    if !facts.kube_proxies.is_empty() {
        return warn(
            WHAT,
            found,
            "if kube-proxy holds them, kpx serves without them and takes them once kube-proxy has ended",
        );
    }
    let fix = "stop the program that listens there (ss -ltnp), or change --metrics-bind-address or --healthz-bind-address";
    fail(WHAT, found, fix)
}

/// Returns the steps from kube-proxy to kpx, in an order that keeps Services working on the node.
fn steps(facts: &Facts) -> String {
    let start = (!facts.kpx_runs).then_some("start kpx beside kube-proxy (docs/migration.md)");
    let stop = (!facts.kube_proxies.is_empty())
        .then_some("kubectl -n kube-system delete daemonset kube-proxy");
    let clean = match facts.kube_proxy_rules.tables.is_empty() {
        true => "kpx cleanup --kube-proxy",
        false => {
            "kpx cleanup --kube-proxy, soon: until then the node and pods on its network reach no Service that is new"
        }
    };
    // kube-proxy holds the ports of kpx's health check and metrics, so kpx is not healthy before.
    let wait = match stop {
        Some(_) => "wait for the line `synced` in kpx's log",
        None => "wait until kpx status says healthy",
    };
    let steps = [start, Some(wait), stop, Some(clean)];
    let numbered = steps
        .into_iter()
        .flatten()
        .enumerate()
        .map(|(at, step)| format!("{}. {step}", at + 1));
    numbered.collect::<Vec<_>>().join(", ")
}
