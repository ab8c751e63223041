//! Judges the facts: what each of them means for kpx, and what to do about it.

use super::facts::{
    BRIDGE_IPTABLES, CONNTRACK_COUNT, CONNTRACK_MAX, Facts, IP_FORWARD, IP6_FORWARD, PORTS, ROUTE_LOCALNET, RP_FILTER,
};
use super::{Finding, Level};
use crate::agent::past_ipsec;
use proxy_net::kernel::{MEND_PREEMPTION, version};
use proxy_net::role::TELL_PODS;
use proxy_view::output::list;

/// The first kernel that does not charge BPF memory to `RLIMIT_MEMLOCK` (commit d5299b67dd59 and those before it).
const MEMLOCK_FREE: (u32, u32) = (5, 11);

/// The dataplanes that translate Services themselves: the prefix of their programs' names, the name, and the advice.
const TRANSLATORS: [(&str, &str, &str); 2] = [
    ("cil_sock", "Cilium", "set kubeProxyReplacement: \"false\" in its configuration"),
    ("cali_", "Calico's eBPF dataplane", "set linuxDataplane: Iptables in its Installation"),
];

/// Returns the findings in the order in which they are shown.
pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings =
        vec![kernel(facts), preemption(facts), capabilities(facts), programs(facts), attach(facts), btf(facts)];
    findings.push(unprivileged_bpf(facts));
    findings.extend([cgroup2(facts), sockets(facts), bpf_fs(facts), restarts(facts)]);
    findings.extend([memlock(facts), ip_forward(facts), ip6_forward(facts), rp_filter(facts), route_localnet(facts)]);
    findings.extend([conntrack(facts), br_netfilter(facts), cni(facts), translators(facts), others(facts)]);
    findings.extend([kube_proxy(facts), kube_proxy_rules(facts), kube_ipvs0(facts), ports(facts), mtu(facts)]);
    findings.extend([pods(facts), ipsec(facts), routing_rules(facts)]);
    findings.extend(kubeconfig(facts));
    findings
}

/// Returns the findings that matter on a machine outside of the cluster, which has neither pods nor node ports, and forwards nothing.
pub(super) fn of_host(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![kernel(facts), preemption(facts), capabilities(facts), programs(facts), attach(facts)];
    findings.extend([unprivileged_bpf(facts), bpf_fs(facts), memlock(facts), translators(facts), others(facts)]);
    findings.extend([kube_proxy(facts), ipsec(facts), routing_rules(facts)]);
    findings.extend(kubeconfig(facts));
    findings
}

pub(super) fn ok(what: &'static str, found: impl Into<String>) -> Finding {
    Finding { level: Level::Ok, what, found: found.into(), fix: None }
}

pub(super) fn warn(what: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Finding {
    Finding { level: Level::Warn, what, found: found.into(), fix: Some(fix.into()) }
}

pub(super) fn fail(what: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Finding {
    Finding { level: Level::Fail, what, found: found.into(), fix: Some(fix.into()) }
}

/// Reports the kernel's release. The features are probed, because a version says nothing of a distribution's backports.
fn kernel(facts: &Facts) -> Finding {
    ok("kernel", &facts.kernel)
}

/// Judges whether the programs of one CPU keep each other out of their memory. The agent does not start where they do not.
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
            fail("capabilities", format!("missing: {}", missing.join("; ")), "run as root, or grant them")
        }
    }
}

fn programs(facts: &Facts) -> Finding {
    match &facts.probed.programs {
        Ok(()) => ok("programs", "the kernel takes them"),
        Err(why) if !facts.missing_capabilities.is_empty() => fail("programs", why, "mend the capabilities first"),
        Err(why) => fail("programs", why, "use a newer kernel: kpx is for Linux 5.10 and later"),
    }
}

fn attach(facts: &Facts) -> Finding {
    if facts.probed.may_not_attach {
        let found = "not tried: without CAP_SYS_ADMIN this process cannot make a network namespace";
        return warn("attach", found, "run kpx check on the host itself, as root");
    }
    match (&facts.probed.tcx, &facts.probed.clsact) {
        (Ok(()), _) => ok("attach", "by TCX"),
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
            fail("attach", format!("neither by TCX ({tcx}) nor by clsact ({clsact})"), fix)
        }
    }
}

/// Judges unprivileged bpf(2). kpx works with any setting, because it has the capabilities that bpf(2) asks for.
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
    ok("BTF", if facts.btf { "the kernel describes its types" } else { "none, and kpx needs none" })
}

/// Reports cgroup2. Only --socket-lb uses cgroup hooks.
fn cgroup2(facts: &Facts) -> Finding {
    const NOT: &str = "not mounted: --socket-lb host and all mount their own";
    ok("cgroup2", if facts.mounted.contains("cgroup2") { "mounted" } else { NOT })
}

/// Reports the socket programs. They are optional, so their absence is no problem.
fn sockets(facts: &Facts) -> Finding {
    if !facts.missing_capabilities.is_empty() {
        return warn(
            "sockets",
            "not tried: without its capabilities kpx loads no programs",
            "mend the capabilities first",
        );
    }
    match &facts.probed.sockets {
        Ok(()) => ok("sockets", "--socket-lb auto serves this host's own, and pods' by their cgroups"),
        Err(why) => ok("sockets", format!("--socket-lb auto leaves them to packets: {why}")),
    }
}

/// Judges the BPF file system, where maps and links outlive the agent. Root mounts a BPF file system by itself; the pod
/// and the systemd unit may not.
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

/// Judges whether Services go on while the running kpx is away.
fn restarts(facts: &Facts) -> Finding {
    const WHAT: &str = "restarts";
    match facts.kept_by.as_deref() {
        None if facts.kpx_runs => ok(WHAT, "the kpx that runs does not say"),
        None => ok(WHAT, "no kpx runs"),
        Some("pins") => ok(WHAT, "no gap: the node's BPF file system keeps programs and maps"),
        Some("filters") => ok(WHAT, "no gap: filters keep programs and maps"),
        Some(_) => warn(
            WHAT,
            "a gap: programs and maps end with kpx's container",
            "give it the node's /sys/fs/bpf: the patch is in docs/migration.md",
        ),
    }
}

/// Judges the kubeconfig, if one was named.
fn kubeconfig(facts: &Facts) -> Option<Finding> {
    const WHAT: &str = "kubeconfig";
    Some(match facts.kubeconfig.as_ref()? {
        Ok(()) => ok(WHAT, "kpx can use it"),
        Err(why) => fail(WHAT, why, "name another file, or mend this one"),
    })
}

fn memlock(facts: &Facts) -> Finding {
    const WHAT: &str = "memlock";
    match facts.memlock {
        None => ok(WHAT, "no limit"),
        Some(limit) if version(&facts.kernel).is_some_and(|version| version >= MEMLOCK_FREE) => {
            ok(WHAT, format!("{} KiB, which this kernel does not ask of maps", limit / 1024))
        }
        Some(limit) => fail(WHAT, format!("{} KiB, too little for the maps", limit / 1024), "ulimit -l unlimited"),
    }
}

fn ip_forward(facts: &Facts) -> Finding {
    match value(facts, IP_FORWARD) {
        Some(1..) => ok("ip_forward", "on"),
        _ => fail("ip_forward", "off: no packet reaches a pod", "sysctl -w net.ipv4.ip_forward=1"),
    }
}

fn ip6_forward(facts: &Facts) -> Finding {
    const WHAT: &str = "ipv6 forwarding";
    match value(facts, IP6_FORWARD) {
        None => ok(WHAT, "this kernel has no IPv6"),
        Some(0) => warn(WHAT, "off", "if pods have IPv6 addresses: sysctl -w net.ipv6.conf.all.forwarding=1"),
        Some(_) => ok(WHAT, "on"),
    }
}

/// Reports rp_filter. Translated packets pass with any setting.
fn rp_filter(facts: &Facts) -> Finding {
    let how = ["off", "strict", "loose"];
    let found = value(facts, RP_FILTER).and_then(|value| how.get(usize::try_from(value).ok()?));
    ok("rp_filter", format!("{}; kpx works with any", found.unwrap_or(&"unknown")))
}

fn route_localnet(facts: &Facts) -> Finding {
    const WHAT: &str = "route_localnet";
    match value(facts, ROUTE_LOCALNET) {
        Some(1..) => {
            let found = "on, as kube-proxy leaves it: neighbours can reach servers on 127.0.0.1";
            warn(WHAT, found, "sysctl -w net.ipv4.conf.all.route_localnet=0")
        }
        _ => ok(WHAT, "off"),
    }
}

fn conntrack(facts: &Facts) -> Finding {
    const WHAT: &str = "conntrack";
    let (Some(max), Some(count)) = (value(facts, CONNTRACK_MAX), value(facts, CONNTRACK_COUNT)) else {
        return ok(WHAT, "not loaded");
    };
    let found = format!("{count} of {max} connections");
    if max > 0 && count * 10 > max * 9 {
        return warn(WHAT, found, format!("sysctl -w net.netfilter.nf_conntrack_max={}", max * 2));
    }
    ok(WHAT, found)
}

fn br_netfilter(facts: &Facts) -> Finding {
    ok(
        "br_netfilter",
        match value(facts, BRIDGE_IPTABLES) {
            None => "not loaded, and kpx needs none",
            Some(0) => "loaded, off; kpx works with either",
            Some(_) => "on; kpx works with either",
        },
    )
}

fn value(facts: &Facts, key: &str) -> Option<u64> {
    facts.sysctls.get(key)?.parse().ok()
}

fn cni(facts: &Facts) -> Finding {
    if facts.cni.is_empty() {
        return warn("CNI", "no plugin is configured", "on a node, install one; a host that is no node needs none");
    }
    ok("CNI", list(&facts.cni))
}

/// Judges whether another dataplane translates Services by programs of its own.
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
    let others = facts.others.iter().map(|(device, hook, name)| format!("{name} at {device} {hook}"));
    warn(WHAT, list(others), "kpx does not see packets that they drop or redirect first: look at bpftool net")
}

fn kube_proxy(facts: &Facts) -> Finding {
    const WHAT: &str = "kube-proxy";
    if !facts.kube_proxies.is_empty() {
        let found = format!("runs, process {}", list(&facts.kube_proxies));
        return fail(WHAT, found, format!("it serves until kpx does: {}", steps(facts)));
    }
    ok(WHAT, if facts.kpx_runs { "does not run; kpx does" } else { "does not run" })
}

fn kube_proxy_rules(facts: &Facts) -> Finding {
    const WHAT: &str = "kube-proxy's rules";
    let rules = &facts.kube_proxy_rules;
    if let Some(why) = facts.kube_proxy_rules_unknown.as_ref().filter(|_| rules.is_empty()) {
        return warn(WHAT, format!("not known: {why}"), "run kpx check as root");
    }
    if rules.unknown {
        let fix = "install nft or iptables if kube-proxy ever ran here";
        return warn(WHAT, "neither nft nor iptables is installed, so kpx cannot tell", fix);
    }
    if rules.is_empty() {
        return ok(WHAT, "none");
    }
    let tables = rules.tables.iter().map(|family| format!("nftables table {family} kube-proxy"));
    let chains = rules.chains.iter();
    let chains = chains.map(|chains| format!("{} chains in {}'s {}", chains.names.len(), chains.tool, chains.table));
    fail(WHAT, list(tables.chain(chains)), steps(facts))
}

/// Returns the steps from kube-proxy to kpx, in an order in which the node always has Services.
fn steps(facts: &Facts) -> String {
    let start = (!facts.kpx_runs).then_some("start kpx beside kube-proxy (docs/migration.md)");
    let stop = (!facts.kube_proxies.is_empty()).then_some("kubectl -n kube-system delete daemonset kube-proxy");
    let steps = [start, Some("wait until kpx status says healthy"), stop, Some("kpx cleanup --kube-proxy")];
    let numbered = steps.into_iter().flatten().enumerate().map(|(at, step)| format!("{}. {step}", at + 1));
    numbered.collect::<Vec<_>>().join(", ")
}

fn kube_ipvs0(facts: &Facts) -> Finding {
    const WHAT: &str = "kube-ipvs0";
    if facts.kube_ipvs0 {
        let found = "there, of kube-proxy's mode ipvs: it makes every ClusterIP the host's own";
        return fail(WHAT, found, steps(facts));
    }
    ok(WHAT, "not there")
}

fn ports(facts: &Facts) -> Finding {
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
    let fix = "stop the program that listens there (ss -ltnp), or give kpx others: --metrics-bind-address, --healthz-bind-address";
    fail(WHAT, found, fix)
}

fn mtu(facts: &Facts) -> Finding {
    const WHAT: &str = "MTU";
    match facts.pod_mtu {
        Some(pods) if pods > facts.mtu => {
            let found = format!("pods have up to {pods}, the narrowest way out has {}", facts.mtu);
            warn(
                WHAT,
                found,
                format!("set the CNI's MTU to {} or less: larger packets are fragmented or lost", facts.mtu),
            )
        }
        Some(pods) => ok(WHAT, format!("{} on the narrowest way out, pods up to {pods}", facts.mtu)),
        None => ok(WHAT, format!("{} on the narrowest way out", facts.mtu)),
    }
}

/// Judges the devices that may be taken for a router's by mistake.
fn pods(facts: &Facts) -> Finding {
    const WHAT: &str = "pods";
    match facts.no_pods.as_slice() {
        [] => ok(WHAT, "every veth into another namespace is recognised as a pod's or a router's"),
        [why] => warn(WHAT, why, format!("if it leads to a pod, set {TELL_PODS}")),
        [why, rest @ ..] => {
            warn(WHAT, format!("{why}; and {} more", rest.len()), format!("if they lead to pods, set {TELL_PODS}"))
        }
    }
}

/// Judges the IPsec policies, which no packet asks that the programs redirect to a device.
fn ipsec(facts: &Facts) -> Finding {
    const WHAT: &str = "IPsec";
    if let Some(why) = &facts.ipsec_unknown {
        return warn(WHAT, format!("not known: {why}"), "run kpx check as root, or see ip xfrm policy");
    }
    match past_ipsec(&facts.ipsec) {
        None => ok(WHAT, "no policy for packets that leave the host"),
        Some(found) => warn(WHAT, found, "let WireGuard encrypt what nodes exchange: docs/limits.md"),
    }
}

/// Judges the routing rules of others, which the programs' look-ups ask only in part.
fn routing_rules(facts: &Facts) -> Finding {
    const WHAT: &str = "routing rules";
    if facts.unasked_rules.is_empty() {
        return ok(WHAT, "none by mark, type of service, protocol, port, user, outgoing device or VRF");
    }
    let rules: Vec<_> = facts.unasked_rules.iter().map(ToString::to_string).collect();
    let found =
        format!("not asked for the host's packets to Services and for masqueraded clients: {}", rules.join("; "));
    warn(WHAT, found, "if such packets must take those routes, add rules by address or incoming device: docs/limits.md")
}

#[cfg(test)]
mod tests;
