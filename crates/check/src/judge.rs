//! Evaluates the facts: their meaning for kpx, and the remedies.

mod kube_proxy;
mod network;

use proxy_net::kernel::{MEND_PREEMPTION, version};
use proxy_view::output::list;

use crate::facts::Facts;
use crate::finding::{Finding, fail, ok, warn};
use crate::orphan::ORPHANED;
use crate::outside_needs;

use kube_proxy::{kube_ipvs0, kube_proxy, kube_proxy_rules, ports};
use network::{
    br_netfilter, cni, conntrack, forwarding, ip_forward, ip6_forward, ipsec, mtu, pods, probes,
    route_localnet, routing_rules, rp_filter, service_ranges,
};

pub use network::{past_ipsec, unheard_probes};

/// The first kernel that does not charge BPF memory to `RLIMIT_MEMLOCK` (commit d5299b67dd59 and
/// its series).
const MEMLOCK_FREE: (u32, u32) = (5, 11);

/// Dataplanes that translate Services themselves: the prefix of their programs' names, the name,
/// and the remedy.
const TRANSLATORS: [(&str, &str, &str); 2] = [
    (
        "cil_sock",
        "Cilium",
        "set kubeProxyReplacement: \"false\" in its configuration",
    ),
    (
        "cali_",
        "Calico's eBPF dataplane",
        "set linuxDataplane: Iptables in its Installation",
    ),
];

/// Returns the findings in the order of the report.
pub(crate) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![
        kernel(facts),
        preemption(facts),
        capabilities(facts),
        programs(facts),
        attach(facts),
        btf(facts),
    ];
    findings.push(unprivileged_bpf(facts));
    findings.extend([
        cgroup2(facts),
        sockets(facts),
        bpf_fs(facts),
        restarts(facts),
    ]);
    findings.extend([
        memlock(facts),
        ip_forward(facts),
        ip6_forward(facts),
        rp_filter(facts),
        route_localnet(facts),
    ]);
    findings.extend([
        conntrack(facts),
        br_netfilter(facts),
        cni(facts),
        translators(facts),
        others(facts),
    ]);
    findings.extend([
        kube_proxy(facts),
        kube_proxy_rules(facts),
        kube_ipvs0(facts),
        ports(facts),
        mtu(facts),
    ]);
    findings.extend([
        pods(facts),
        ipsec(facts),
        routing_rules(facts),
        forwarding(facts),
        probes(facts),
    ]);
    findings.extend(service_ranges(facts));
    findings.extend(agent(facts));
    findings.extend(kubeconfig(facts));
    findings
}

/// Returns the findings for a machine outside the cluster, which has neither pods nor node ports
/// and does not forward packets.
pub(crate) fn of_host(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![
        kernel(facts),
        preemption(facts),
        capabilities(facts),
        programs(facts),
        attach(facts),
    ];
    findings.extend([
        unprivileged_bpf(facts),
        bpf_fs(facts),
        memlock(facts),
        translators(facts),
        others(facts),
    ]);
    findings.extend([kube_proxy(facts), ipsec(facts), routing_rules(facts)]);
    findings.extend(agent(facts));
    findings.extend(kubeconfig(facts));
    findings
}

/// Reports the kernel's release without evaluating it: features are probed, because distributions
/// backport them.
fn kernel(facts: &Facts) -> Finding {
    ok("kernel", &facts.kernel)
}

/// Checks whether preemption can corrupt the programs' per-CPU memory. The agent refuses to start
/// in that case.
fn preemption(facts: &Facts) -> Finding {
    const WHAT: &str = "preemption";
    match facts.preemption.verdict() {
        Ok(why) => ok(WHAT, why),
        Err(why) => fail(WHAT, why, MEND_PREEMPTION),
    }
}

fn capabilities(facts: &Facts) -> Finding {
    match facts.missing_capabilities.as_slice() {
        [] => ok("capabilities", "all that kpx needs"),
        missing => {
            let missing: Vec<_> = missing.iter().map(ToString::to_string).collect();
            fail(
                "capabilities",
                format!("missing: {}", missing.join("; ")),
                "run as root, or grant them",
            )
        }
    }
}

fn programs(facts: &Facts) -> Finding {
    match &facts.probed.programs {
        Ok(()) => ok("programs", "the kernel takes them"),
        Err(why) if !facts.missing_capabilities.is_empty() => {
            fail("programs", why, "fix the capabilities first")
        }
        Err(why) => fail(
            "programs",
            why,
            "use a newer kernel: kpx is for Linux 5.10 and later",
        ),
    }
}

fn attach(facts: &Facts) -> Finding {
    if facts.probed.may_not_attach {
        let found = "not tried: without CAP_SYS_ADMIN this process cannot make a network namespace";
        return warn("attach", found, "run kpx check on the host itself, as root");
    }
    match (&facts.probed.tcx, &facts.probed.clsact) {
        (Ok(()), _) => ok("attach", "by TCX"),
        (Err(_), Ok(())) if !facts.without_egress.is_empty() => {
            let devices = list(&facts.without_egress);
            let found = format!(
                "by clsact, and not at {devices}: the qdisc `ingress` of another program is in its place"
            );
            let fix = "have that program use clsact: tc qdisc del dev DEVICE ingress; tc qdisc add dev DEVICE clsact";
            fail("attach", found, fix)
        }
        (Err(_), Ok(())) => {
            let found = "by clsact: this kernel has no TCX";
            warn(
                "attach",
                found,
                "from Linux 6.6 on the kernel detaches programs when their process ends; until then see kpx cleanup",
            )
        }
        (Err(tcx), Err(clsact)) => {
            let fix = "a kernel with CONFIG_NET_CLS_ACT and CONFIG_NET_SCH_INGRESS";
            fail(
                "attach",
                format!("neither by TCX ({tcx}) nor by clsact ({clsact})"),
                fix,
            )
        }
    }
}

/// Checks unprivileged bpf(2). kpx works with any setting, because it has the required
/// capabilities.
fn unprivileged_bpf(facts: &Facts) -> Finding {
    const WHAT: &str = "unprivileged bpf";
    match facts.unprivileged_bpf_disabled {
        None => ok(WHAT, "the kernel does not say"),
        Some(0) => warn(
            WHAT,
            "on: any process may load BPF programs",
            "kpx needs none: sysctl -w kernel.unprivileged_bpf_disabled=2",
        ),
        Some(_) => ok(WHAT, "off; kpx has its capabilities"),
    }
}

fn btf(facts: &Facts) -> Finding {
    ok(
        "BTF",
        if facts.btf {
            "the kernel describes its types"
        } else {
            "none, and kpx needs none"
        },
    )
}

/// Reports cgroup2. Only --socket-lb uses cgroup hooks.
fn cgroup2(facts: &Facts) -> Finding {
    const NOT: &str = "not mounted: --socket-lb host and all mount their own";
    ok(
        "cgroup2",
        if facts.mounted.contains("cgroup2") {
            "mounted"
        } else {
            NOT
        },
    )
}

/// Reports the socket programs. They are optional, so their absence is not a problem.
fn sockets(facts: &Facts) -> Finding {
    if !facts.missing_capabilities.is_empty() {
        return warn(
            "sockets",
            "not tried: without its capabilities kpx loads no programs",
            "fix the capabilities first",
        );
    }
    match &facts.probed.sockets {
        Ok(()) => ok(
            "sockets",
            "--socket-lb auto serves this host's own, and pods' by their cgroups",
        ),
        Err(why) => ok(
            "sockets",
            format!("--socket-lb auto leaves them to packets: {why}"),
        ),
    }
}

/// Checks the BPF file system, which keeps maps and links across restarts of the agent. Root mounts
/// a missing file system; the pod and the systemd unit may not.
fn bpf_fs(facts: &Facts) -> Finding {
    const WHAT: &str = "bpf file system";
    match facts.mounted.contains("bpf") {
        true => ok(WHAT, "mounted"),
        false => warn(
            WHAT,
            "not mounted: kpx of systemd or in its own DaemonSet ends at once; a privileged container keeps its own state by \
             filters of clsact",
            "mount -t bpf -o mode=0700 bpf /sys/fs/bpf",
        ),
    }
}

/// Checks whether Services keep working while the running kpx restarts.
fn restarts(facts: &Facts) -> Finding {
    const WHAT: &str = "restarts";
    match facts.kept_by.as_deref() {
        None if facts.kpx_runs => ok(WHAT, "the running kpx does not report it"),
        None => ok(WHAT, "no kpx runs"),
        Some("pins") => ok(
            WHAT,
            "no gap: the node's BPF file system keeps programs and maps",
        ),
        Some("unknown") => warn(
            WHAT,
            "unknown: the BPF file system of kpx's container may be the node's, or go with the container",
            "mount it with mountPropagation: HostToContainer: the patch is in docs/migration.md",
        ),
        Some("filters") => ok(WHAT, "no gap: filters keep programs and maps"),
        Some(_) => warn(
            WHAT,
            "a gap: programs and maps end with kpx's container",
            "give it the node's /sys/fs/bpf: the patch is in docs/migration.md",
        ),
    }
}

fn agent(facts: &Facts) -> Option<Finding> {
    let fix = "start kpx, or wait if it restarts; kpx cleanup removes it for good";
    facts.is_orphaned.then(|| warn("agent", ORPHANED, fix))
}

fn kubeconfig(facts: &Facts) -> Option<Finding> {
    const WHAT: &str = "kubeconfig";
    Some(match facts.kubeconfig.as_ref()? {
        Ok(()) => ok(WHAT, "kpx can use it"),
        Err(why) => fail(WHAT, why.to_string(), outside_needs::mend(why.fault)),
    })
}

fn memlock(facts: &Facts) -> Finding {
    const WHAT: &str = "memlock";
    match facts.memlock {
        None => ok(WHAT, "no limit"),
        Some(limit) if version(&facts.kernel).is_some_and(|version| version >= MEMLOCK_FREE) => ok(
            WHAT,
            format!(
                "{} KiB, which this kernel does not ask of maps",
                limit / 1024
            ),
        ),
        Some(limit) => fail(
            WHAT,
            format!("{} KiB, too little for the maps", limit / 1024),
            "ulimit -l unlimited",
        ),
    }
}

/// Checks whether another BPF dataplane translates Services.
fn translators(facts: &Facts) -> Finding {
    const WHAT: &str = "other service proxies";
    let runs = |prefix: &str| facts.programs.iter().any(|name| name.starts_with(prefix));
    match TRANSLATORS.iter().find(|(prefix, ..)| runs(prefix)) {
        Some((_, who, fix)) => fail(WHAT, format!("{who} translates Services itself"), *fix),
        None => ok(WHAT, "no eBPF dataplane"),
    }
}

fn others(facts: &Facts) -> Finding {
    const WHAT: &str = "other programs";
    if facts.others.is_empty() {
        return ok(WHAT, "none on the devices");
    }
    let others = facts
        .others
        .iter()
        .map(|(device, hook, name)| format!("{name} at {device} {hook}"));
    warn(
        WHAT,
        list(others),
        "kpx does not see packets that they drop or redirect first: look at bpftool net",
    )
}

#[cfg(test)]
mod tests;
