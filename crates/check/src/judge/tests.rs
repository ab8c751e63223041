use super::*;
use crate::facts::{
    BRIDGE_IPTABLES, CONNTRACK_COUNT, CONNTRACK_MAX, IP_FORWARD, IP6_FORWARD, ROUTE_LOCALNET,
    RP_FILTER,
};
use crate::finding::Level;
use crate::needs::NEEDED;
use crate::rules::{Chains, KubeProxyRules};
use proxy_net::kernel::Preemption;
use proxy_net::netfilter::Refusal;
use proxy_net::nft::Family;

fn node() -> Facts {
    Facts {
        kernel: "6.18.0-generic".to_owned(),
        btf: true,
        mounted: ["cgroup2", "bpf"].map(str::to_owned).into(),
        memlock: Some(8 << 20),
        sysctls: [
            (IP_FORWARD, "1"),
            (IP6_FORWARD, "1"),
            (RP_FILTER, "2"),
            (ROUTE_LOCALNET, "0"),
        ]
        .map(|(key, value)| (key, value.to_owned()))
        .into(),
        cni: ["flannel".to_owned()].into(),
        mtu: 1500,
        pod_mtu: Some(1450),
        ..Facts::default()
    }
}

fn set(facts: &mut Facts, key: &'static str, value: &str) {
    facts.sysctls.insert(key, value.to_owned());
}

#[test]
fn right_node_has_no_problem() {
    let findings = judge(&node());
    assert!(
        findings
            .iter()
            .all(|finding| finding.level == Level::Ok && finding.fix.is_none()),
        "{findings:?}"
    );
    let mut names: Vec<_> = findings.iter().map(|finding| finding.what).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), findings.len(), "each is named once");
}

type Change = fn(&mut Facts);

fn refusal() -> Refusal {
    Refusal {
        why: "chain FORWARD drops".to_owned(),
        remedy: "iptables -I FORWARD".to_owned(),
        is_doubtful: false,
    }
}

/// The finding and its level for each fact: a fit node with one change.
const CASES: [(&str, Level, &str, Change); 58] = [
    (
        "ranges of ClusterIPs",
        Level::Ok,
        "this node has no route into 10.96.0.0/12",
        |f| {
            f.service_ranges = vec!["10.96.0.0/12".parse().unwrap()];
        },
    ),
    (
        "routing rules",
        Level::Warn,
        "may divert this host's packets to ClusterIPs: ip -4 rule 20 to 10.96.0.0/24",
        |f| {
            f.early_rules = vec!["ip -4 rule 20 to 10.96.0.0/24".to_owned()];
        },
    ),
    (
        "ranges of ClusterIPs",
        Level::Warn,
        "10.96.0.0/12 have in them routes of this node's to 10.99.0.0/24",
        |f| {
            f.service_ranges = vec!["10.96.0.0/12".parse().unwrap()];
            f.routes_in_ranges = vec!["10.99.0.0/24".parse().unwrap()];
        },
    ),
    ("forwarding", Level::Warn, "unknown: EPERM", |f| {
        f.netfilter_unknown = Some("EPERM".to_owned())
    }),
    (
        "forwarding",
        Level::Warn,
        "may be refused, by node ports and load balancers: chain FORWARD drops",
        |f| {
            f.refusals = vec![refusal()];
        },
    ),
    (
        "forwarding",
        Level::Warn,
        "are refused, by node ports and load balancers: chain FORWARD drops",
        |f| {
            f.refusals = vec![refusal()];
            f.pod_networks = vec!["10.244.0.0/16".parse().unwrap()];
        },
    ),
    (
        "health check ports",
        Level::Warn,
        "chain INPUT drops",
        |f| f.closed_inputs = vec!["chain INPUT drops".to_owned()],
    ),
    ("attach", Level::Fail, "not at eth0", |f| {
        f.probed.tcx = Err("EINVAL".to_owned());
        f.without_egress = vec!["eth0".to_owned()];
    }),
    (
        "capabilities",
        Level::Fail,
        "missing: CAP_BPF, to create maps and load programs",
        |f| {
            f.missing_capabilities = vec![NEEDED[0]];
        },
    ),
    (
        "preemption",
        Level::Fail,
        "PREEMPT_RT, perhaps built without PREEMPT_RT_NEEDS_BH_LOCK",
        |f| {
            f.preemption = Preemption {
                release: "6.18.1".to_owned(),
                is_realtime: true,
                config: None,
            };
        },
    ),
    ("preemption", Level::Ok, "no PREEMPT_RT", |f| {
        f.preemption.release = "6.18.1".to_owned()
    }),
    ("unprivileged bpf", Level::Warn, "any process", |f| {
        f.unprivileged_bpf_disabled = Some(0)
    }),
    ("unprivileged bpf", Level::Ok, "off", |f| {
        f.unprivileged_bpf_disabled = Some(2)
    }),
    ("programs", Level::Fail, "load kpx_ingress", |f| {
        f.probed.programs = Err("load kpx_ingress".to_owned())
    }),
    ("attach", Level::Warn, "by clsact", |f| {
        f.probed.tcx = Err("EINVAL".to_owned())
    }),
    ("attach", Level::Warn, "not tried", |f| {
        f.probed.may_not_attach = true
    }),
    ("attach", Level::Ok, "by TCX", |f| {
        f.probed.clsact = Err("no clsact".to_owned())
    }),
    (
        "attach",
        Level::Fail,
        "neither by TCX (EINVAL) nor by clsact (ENOENT)",
        |f| {
            f.probed.tcx = Err("EINVAL".to_owned());
            f.probed.clsact = Err("ENOENT".to_owned());
        },
    ),
    ("BTF", Level::Ok, "none, and kpx needs none", |f| {
        f.btf = false
    }),
    ("cgroup2", Level::Ok, "not mounted", |f| f.mounted.clear()),
    (
        "sockets",
        Level::Ok,
        "leaves them to packets: too old",
        |f| f.probed.sockets = Err("too old".to_owned()),
    ),
    ("bpf file system", Level::Warn, "not mounted", |f| {
        f.mounted.clear()
    }),
    ("memlock", Level::Ok, "no limit", |f| f.memlock = None),
    ("memlock", Level::Fail, "8192 KiB, too little", |f| {
        f.kernel = "5.10.0-30-amd64".to_owned()
    }),
    ("memlock", Level::Ok, "does not ask", |f| {
        f.kernel = "5.15.0".to_owned()
    }),
    ("ip_forward", Level::Fail, "off", |f| {
        set(f, IP_FORWARD, "0")
    }),
    ("ipv6 forwarding", Level::Warn, "off", |f| {
        set(f, IP6_FORWARD, "0")
    }),
    ("ipv6 forwarding", Level::Ok, "no IPv6", |f| {
        drop(f.sysctls.remove(IP6_FORWARD))
    }),
    ("rp_filter", Level::Ok, "strict", |f| set(f, RP_FILTER, "1")),
    ("route_localnet", Level::Warn, "on", |f| {
        set(f, ROUTE_LOCALNET, "1")
    }),
    ("conntrack", Level::Ok, "90 of 100", |f| {
        set(f, CONNTRACK_MAX, "100");
        set(f, CONNTRACK_COUNT, "90");
    }),
    ("conntrack", Level::Warn, "91 of 100", |f| {
        set(f, CONNTRACK_MAX, "100");
        set(f, CONNTRACK_COUNT, "91");
    }),
    ("br_netfilter", Level::Ok, "on", |f| {
        set(f, BRIDGE_IPTABLES, "1")
    }),
    ("CNI", Level::Warn, "no plugin", |f| f.cni.clear()),
    ("CNI", Level::Ok, "cilium-cni", |f| {
        f.cni = ["cilium-cni".to_owned()].into()
    }),
    ("other service proxies", Level::Fail, "Cilium", |f| {
        f.programs = ["cil_sock4_connect".to_owned()].into()
    }),
    ("other service proxies", Level::Ok, "no eBPF", |f| {
        f.programs = ["cil_from_netdev".to_owned()].into()
    }),
    ("other service proxies", Level::Fail, "Calico", |f| {
        f.programs = ["cali_ctlb_v4".to_owned()].into()
    }),
    (
        "other programs",
        Level::Warn,
        "theirs at eth0 ingress",
        |f| {
            f.others = vec![("eth0".to_owned(), "ingress", "theirs".to_owned())];
        },
    ),
    ("kube-proxy", Level::Fail, "process 7,9", |f| {
        f.kube_proxies = vec![7, 9]
    }),
    (
        "kube-proxy's rules",
        Level::Fail,
        "nftables table ip kube-proxy,2 chains in iptables's nat",
        |f| {
            f.kube_proxy_rules = KubeProxyRules {
                tables: vec![Family::Ip],
                chains: vec![Chains {
                    tool: "iptables",
                    family: None,
                    table: "nat".to_owned(),
                    names: ["KUBE-SERVICES", "KUBE-SVC-A"].map(str::to_owned).into(),
                    jumps: Vec::new(),
                }],
                unknown: false,
            };
        },
    ),
    (
        "kube-proxy's rules",
        Level::Fail,
        "drops packets of the node to Services that are newer than these rules",
        |f| {
            f.kpx_runs = true;
            f.kube_proxy_rules.tables = vec![Family::Ip];
        },
    ),
    (
        "kube-proxy's rules",
        Level::Warn,
        "iptables is not installed to list it",
        |f| f.kube_proxy_rules.unknown = true,
    ),
    ("kube-ipvs0", Level::Fail, "there", |f| f.kube_ipvs0 = true),
    ("ports", Level::Fail, "10256 taken", |f| {
        f.taken_ports = vec![10_256]
    }),
    ("ports", Level::Ok, "kpx runs", |f| {
        f.taken_ports = vec![10_256];
        f.kpx_runs = true;
    }),
    ("ports", Level::Warn, "10256 taken", |f| {
        f.taken_ports = vec![10_256];
        f.kube_proxies = vec![7];
    }),
    ("restarts", Level::Ok, "no gap: filters", |f| {
        f.kept_by = Some("filters".to_owned())
    }),
    (
        "restarts",
        Level::Warn,
        "unknown: the BPF file system",
        |f| f.kept_by = Some("unknown".to_owned()),
    ),
    ("restarts", Level::Warn, "a gap", |f| {
        f.kept_by = Some("nothing".to_owned())
    }),
    ("agent", Level::Warn, "serve here without an agent", |f| {
        f.is_orphaned = true;
    }),
    ("kubeconfig", Level::Ok, "kpx can use it", |f| {
        f.kubeconfig = Some(Ok(()))
    }),
    ("kubeconfig", Level::Fail, "read /nofile", |f| {
        f.kubeconfig = Some(Err(anyhow::anyhow!("read /nofile").into()))
    }),
    (
        "MTU",
        Level::Warn,
        "pods have up to 1500, the narrowest way out has 1450",
        |f| {
            f.mtu = 1450;
            f.pod_mtu = Some(1500);
        },
    ),
    ("IPsec", Level::Warn, "unknown: no CAP_NET_ADMIN", |f| {
        f.ipsec_unknown = Some("no CAP_NET_ADMIN".to_owned())
    }),
    ("IPsec", Level::Ok, "no policy", |f| f.ipsec.clear()),
    ("pods", Level::Warn, "v0 has an address", |f| {
        f.no_pods = vec!["v0 has an address".to_owned()]
    }),
    ("pods", Level::Warn, "v0 has an address; and 1 more", |f| {
        f.no_pods = ["v0", "v1"]
            .map(|name| format!("{name} has an address"))
            .into();
    }),
];

#[test]
fn each_fact_has_its_finding() {
    for (what, level, found, change) in CASES {
        let mut facts = node();
        change(&mut facts);
        let findings = judge(&facts);
        let finding = findings
            .iter()
            .find(|finding| finding.what == what)
            .expect("a finding of this name");
        assert_eq!(finding.level, level, "{finding:?}");
        assert!(finding.found.contains(found), "{finding:?} says {found}");
        assert_eq!(
            finding.fix.is_some(),
            level != Level::Ok,
            "{finding:?} says how to mend it"
        );
    }
}

#[test]
fn kube_proxy_stays_until_kpx_serves() {
    let fix = |change: fn(&mut Facts)| {
        let mut facts = node();
        change(&mut facts);
        let found = judge(&facts)
            .into_iter()
            .find(|finding| finding.what.starts_with("kube-proxy") && finding.fix.is_some());
        found.and_then(|finding| finding.fix).expect("steps")
    };
    let all = fix(|facts| facts.kube_proxies = vec![7]);
    let order = [
        "start kpx",
        "line `synced`",
        "delete daemonset",
        "kpx cleanup --kube-proxy",
    ]
    .map(|step| all.find(step));
    assert!(
        order.is_sorted() && order.iter().all(Option::is_some),
        "{all}"
    );
    let beside = fix(|facts| {
        facts.kube_proxies = vec![7];
        facts.kpx_runs = true;
    });
    assert!(
        beside.contains("1. wait for the line `synced`") && beside.contains("2. kubectl"),
        "{beside}"
    );
    let rules = fix(|facts| facts.kube_proxy_rules.tables = vec![Family::Ip]);
    assert!(
        rules.contains("1. start kpx") && !rules.contains("kubectl"),
        "{rules}"
    );
}
