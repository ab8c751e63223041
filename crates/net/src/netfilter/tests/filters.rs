//! Rule sets of well-known programs for forwarded packets, and their possible effects on bypass
//! connections between pods.

use std::collections::BTreeSet;

use super::super::packet::{ESTABLISHED, INVALID, NEW};
use super::super::{Judgement, Legacy, Netfilter, ruleset};
use super::fixtures::{PODS, judged, leaves_alone};
use super::{Condition, Field, OTHERS, Part, chain, found, from, nets, record, to};

/// Evaluates a file's rules for bypass connections of pods. `others` are devices of the host.
fn judgement(file: &str, others: &[&str]) -> Judgement {
    let others = others.iter().map(|name| (*name).to_owned()).collect();
    netfilter(file, true).judge_bypass(&nets(PODS), &others, false)
}

/// Parses a file's rules. `takes_up`: conntrack picks up connections midstream.
fn netfilter(file: &str, takes_up: bool) -> Netfilter {
    let rules = ruleset(&record::messages(file)).unwrap();
    Netfilter {
        rules,
        legacy: Legacy::default(),
        follows: true,
        takes_up,
    }
}

/// Evaluates a file's rules for open connections between pods, only on the devices `ports`.
fn opened(file: &str, ports: &[&str], heeds_marks: bool) -> Vec<String> {
    let ports = ports.iter().map(|name| (*name).to_owned()).collect();
    netfilter(file, true)
        .judge_opened(&nets(PODS), &ports, heeds_marks)
        .against
}

// Each rule set accepts packets of open connections between the devices in its rules.
#[test]
fn policies_of_cnis_let_open_connections_pass() {
    let pod = "cali0a1b2c3d4e5";
    for file in [
        "calico-filter.iptables",
        "calico-raw.iptables",
        "kube-router.iptables",
        "kindnet-filter.iptables",
        "cilium.iptables",
        "kube-proxy-filter.iptables",
        "docker-flannel.iptables",
        "ufw.iptables",
    ] {
        assert_eq!(opened(file, &[pod], false), [""; 0], "{file}");
    }
    let drops = "rule 2 of chain cali-from-wl-dispatch of table ip filter may drop the packet";
    assert_eq!(
        opened("calico-filter.iptables", &[pod, "cali1"], false),
        [drops],
        "a pod that Calico does not know"
    );
    let refused = "chain FORWARD of table ip filter drops packets that its rules do not accept";
    assert_eq!(opened("docker-filter.iptables", &[pod], false), [refused]);
    // firewalld matches states by a set, which kpx does not read.
    let first = "rule 5 of chain filter_FORWARD of table inet firewalld may reject the packet";
    assert_eq!(opened("firewalld.nft", &[pod], false)[0], first);
    // Calico's chain in `raw` sets a mark and does not clear it, so a routing rule may match it.
    let marks = "rule 2 of chain cali-PREROUTING of table ip raw may set the mark";
    assert_eq!(opened("calico-raw.iptables", &[pod], true), [marks]);
    assert_eq!(
        opened("calico-filter.iptables", &[pod], true),
        [""; 0],
        "it clears bits that are not set"
    );
}

// Each rule set accepts packets of open connections from outside to its pod, and the replies.
#[test]
fn policies_of_cnis_let_open_connections_from_outside_pass() {
    let outside = |file, pod: &str, heeds_marks| {
        let [ports, ways] = [pod, "eth0"].map(|name| BTreeSet::from([name.to_owned()]));
        netfilter(file, true)
            .judge_opened_outside(&nets(PODS), &ports, &ways, heeds_marks)
            .against
    };
    let pod = "cali0a1b2c3d4e5";
    for file in [
        "calico-filter.iptables",
        "calico-raw.iptables",
        "flannel-filter.iptables",
        "kube-router.iptables",
        "kindnet-filter.iptables",
        "kube-proxy-filter.iptables",
        "ufw.iptables",
    ] {
        assert_eq!(outside(file, pod, false), [""; 0], "{file}");
    }
}

#[test]
fn open_connections_from_outside_are_judged_in_each_direction() {
    let state = |state: u32| {
        let [mask, value] = [[0xff; 4].to_vec(), state.to_ne_bytes().to_vec()];
        Part::Condition(Condition {
            field: Field::State,
            mask,
            value,
            equal: true,
        })
    };
    let protocol = |number: u8| {
        Part::Condition(Condition {
            field: Field::L4Proto,
            mask: vec![0xff],
            value: vec![number],
            equal: true,
        })
    };
    let device = |field, name: &str| {
        let value = [name.as_bytes(), &[0]].concat();
        Part::Condition(Condition {
            field,
            mask: vec![0xff; value.len()],
            value,
            equal: true,
        })
    };
    let drops = |hook: &str, conditions: Vec<Part>| {
        let rule = conditions
            .into_iter()
            .chain([Part::Refuse("drop the packet".to_owned())])
            .collect();
        let rules = [chain(hook, vec![rule])].into();
        let legacy = Legacy::default();
        let netfilter = Netfilter {
            rules,
            legacy,
            follows: true,
            takes_up: true,
        };
        let [ports, ways] = ["pod", "eth0"].map(|name| BTreeSet::from([name.to_owned()]));
        !netfilter
            .judge_opened_outside(&nets("10.244.1.0/24"), &ports, &ways, false)
            .against
            .is_empty()
    };
    let client = "192.0.2.7/32";
    let pods = "10.244.1.0/24";
    let cases = [
        ("a request", vec![from(client), to(pods)], true),
        ("an answer", vec![from(pods), to(client)], true),
        ("two clients", vec![from(client), to("192.0.2.8/32")], false),
        ("a new connection", vec![from(client), state(NEW)], false),
        ("what conntrack does not know", vec![state(INVALID)], false),
        (
            "an open connection",
            vec![from(client), state(ESTABLISHED)],
            true,
        ),
        ("datagrams", vec![protocol(17), from(client)], true),
        ("TCP", vec![protocol(6), from(client)], false),
        (
            "a request by an uplink",
            vec![device(Field::InName, "eth0"), to(pods)],
            true,
        ),
        (
            "a request by a bridge",
            vec![device(Field::InName, "docker0"), to(pods)],
            false,
        ),
        (
            "an answer by an uplink",
            vec![device(Field::OutName, "eth0"), from(pods)],
            true,
        ),
        (
            "a request by an uplink to another",
            vec![device(Field::OutName, "eth0"), from(client)],
            false,
        ),
        (
            "a client that may be a stranger",
            vec![Part::Sender { spoofed: true }, to(pods)],
            true,
        ),
        (
            "a pod that is where it is",
            vec![Part::Sender { spoofed: true }, from(pods), to(client)],
            false,
        ),
    ];
    for (name, conditions, counts) in cases {
        assert_eq!(drops("FWD", conditions), counts, "{name}");
    }
    assert!(
        !drops("POST", vec![from(pods), to(client)]),
        "no NAT of open connections"
    );
}

// flannel accepts packets from and to its network.
#[test]
fn flannels_rules_let_pods_pass() {
    let refused = ["chain FORWARD of table ip filter drops packets that its rules do not accept"];
    leaves_alone("flannel-filter.iptables", "10.99.0.0/24", &refused);
    assert_eq!(
        judged("flannel-filter.iptables", "10.244.1.0/24 10.99.0.0/24"),
        refused,
        "one network of two"
    );
    let refused = ["chain FORWARD of table ip6 filter drops packets that its rules do not accept"];
    leaves_alone("flannel-filter.ip6tables", "fd00:99::/64", &refused);
    let Judgement { against, harmless } = judgement("flannel-filter.iptables", &[]);
    assert_eq!(
        (against, harmless),
        (vec![], vec!["chain FORWARD of table ip filter".to_owned()])
    );
}

// Docker's rules concern its bridge only, but its policy drops packets that no rule accepts.
#[test]
fn dockers_rules_leave_pods_to_the_policy() {
    let refused = "chain FORWARD of table ip filter drops packets that its rules do not accept";
    assert_eq!(judged("docker-filter.iptables", PODS), [refused]);
    assert_eq!(judged("docker-flannel.iptables", PODS), [""; 0]);
    let mut rules = ruleset(&record::messages("docker-filter.iptables")).unwrap();
    rules
        .values_mut()
        .for_each(|chain| chain.base.iter_mut().for_each(|base| base.drops = false));
    assert_eq!(
        found(&rules, PODS).obstacles,
        [].into(),
        "with the policy ACCEPT"
    );
    // A pod's device could have the name of a missing bridge.
    let Judgement { against, .. } = judgement("docker-flannel.iptables", &["eth0"]);
    let drops = [
        "rule 2 of chain DOCKER of table ip filter may drop the packet",
        "rule 1 of chain DOCKER-ISOLATION-STAGE-2 of table ip filter may drop the packet",
    ];
    assert_eq!(against, drops);
}

// kube-proxy refuses packets to Service addresses, packets with its own mark, and packets without a
// connection.
#[test]
fn kube_proxys_filters_let_pods_pass() {
    let refused = [
        "KUBE-PROXY-FIREWALL 1 drop the packet",
        "KUBE-SERVICES 1 reject the packet",
    ];
    leaves_alone(
        "kube-proxy-filter.iptables",
        "10.96.0.0/16 192.0.2.0/24",
        &refused,
    );
    let judge = |takes_up, is_far| {
        netfilter("kube-proxy-filter.iptables", takes_up)
            .judge_bypass(&nets(PODS), &BTreeSet::new(), is_far)
            .against
    };
    assert_eq!(judge(true, false), [""; 0]);
    let invalid = "rule 1 of chain KUBE-FORWARD of table ip filter may drop the packet";
    assert_eq!(
        judge(true, true),
        [invalid],
        "an error of a router about a connection that conntrack has not seen"
    );
    assert_eq!(
        judge(false, false),
        [invalid],
        "a connection that conntrack does not take up"
    );
}

// ICMP errors of pods about bypass connections bypass the network stack too, so rules about ICMP
// count.
#[test]
fn rules_about_icmp_between_pods_count() {
    let icmp = Condition {
        field: Field::L4Proto,
        mask: vec![0xff],
        value: vec![1],
        equal: true,
    };
    let rule = vec![
        Part::Condition(icmp),
        Part::Refuse("drop the packet".to_owned()),
    ];
    let legacy = Legacy::default();
    let netfilter = Netfilter {
        rules: [chain("FWD", vec![rule])].into(),
        legacy,
        follows: true,
        takes_up: true,
    };
    let refused = "rule 1 of chain FWD of table ip nat may drop the packet";
    assert_eq!(
        netfilter
            .judge_bypass(&nets(PODS), &BTreeSet::new(), false)
            .against,
        [refused]
    );
}

// Cilium's chain accepts packets of its devices, and only packets of its proxy have its marks. The
// CNI accepts the pods.
#[test]
fn ciliums_rules_let_pods_pass_without_its_proxy() {
    leaves_alone(
        "cilium.iptables",
        "10.99.0.0/24",
        &["chain FORWARD of table ip filter drops packets that its rules do not accept"],
    );
    assert_eq!(
        judged("cilium-proxy.iptables", PODS),
        ["CILIUM_PRE_mangle 1 set the mark"]
    );
}

// kube-router filters packets to pods with NetworkPolicies, by sets and marks.
#[test]
fn kube_routers_rules_concern_pods_with_policies() {
    let want = [
        "KUBE-NWPLCY-ONE 1 set the mark",
        "KUBE-POD-FW-ONE 4 log the packet",
        "KUBE-POD-FW-ONE 5 reject the packet",
        "KUBE-POD-FW-ONE 6 set the mark",
        "KUBE-POD-FW-ONE 7 set the mark",
    ];
    assert_eq!(judged("kube-router.iptables", PODS), want);
    assert_eq!(judged("kube-router.iptables", "10.244.1.8/29"), [""; 0]);
}

// Calico filters and marks packets of every pod.
#[test]
fn calicos_rules_concern_every_pod() {
    let want = [
        "FORWARD 3 set the mark",
        "cali-FORWARD 1 set the mark",
        "cali-from-wl-dispatch 2 drop the packet",
        "cali-fw-cali0a1b2c3d4e5 3 set the mark",
        "cali-to-wl-dispatch 2 drop the packet",
    ];
    assert_eq!(judged("calico-filter.iptables", PODS), want);
}

// kindnet queues new connections of pods in its sets to a program; kpx does not read sets.
#[test]
fn kindnets_policies_concern_pods() {
    let want = [4, 5].map(|rule| format!("POSTROUTING {rule} hand the packet to a program"));
    assert_eq!(judged("kindnet-filter.iptables", PODS), want);
}

// ufw logs and drops new connections, unless its policy accepts them.
#[test]
fn ufws_rules_leave_pods_to_the_policy() {
    let refused = "chain FORWARD of table ip filter drops packets that its rules do not accept";
    assert_eq!(
        judged("ufw.iptables", PODS),
        ["ufw-after-logging-forward 1 log the packet", refused]
    );
    assert_eq!(judged("ufw-accept.iptables", PODS), [""; 0]);
}

// firewalld rejects packets that no zone accepts, and checks the reverse path for IPv6.
#[test]
fn firewallds_rules_reject_pods() {
    let rejects = "filter_FWD_public 3 reject the packet";
    assert_eq!(judged("firewalld.nft", "10.244.1.0/24"), [rejects]);
    let ipv6 = judged("firewalld.nft", "fd00:10:244:1::/64");
    assert!(
        ipv6.contains(&"filter_PREROUTING 2 drop the packet".to_owned()),
        "{ipv6:?}"
    );
}

#[test]
fn conditions_of_every_known_form_let_pods_pass() {
    let refused = ["early", "forward", "later"];
    let refused = refused.map(|chain| {
        format!("chain {chain} of table inet pods drops packets that its rules do not accept")
    });
    assert_eq!(judged("pods-filter.nft", PODS), [""; 0]);
    assert_eq!(judged("pods-filter.nft", "10.99.0.0/24"), refused[1..]);
    // If the node's uplink may be a pod's device, the uplink's rules may apply to pods.
    let Judgement { against, .. } = judgement("pods-filter.nft", &OTHERS[..1]);
    assert_eq!(
        against[0],
        "rule 1 of chain early of table inet pods may drop the packet"
    );
    let no_errors = "chain later of table inet pods drops packets that its rules do not accept";
    assert!(
        against.contains(&no_errors.to_owned()),
        "its rules accept TCP and UDP alone"
    );
    let far = netfilter("pods-filter.nft", true)
        .judge_bypass(&nets(PODS), &BTreeSet::new(), true)
        .against;
    assert!(far.contains(&no_errors.to_owned()), "{far:?}");
}

// Rules at a device hook are not evaluated, so they count if the device may be a pod's.
#[test]
fn chains_at_hooks_of_devices_are_found() {
    let of_devices = |table: &str, chain: &str| format!("chain {chain} of table {table} ports");
    let chains = [
        ("inet", "ingress"),
        ("netdev", "one"),
        ("netdev", "several"),
    ];
    let chains = chains.map(|(table, chain)| of_devices(table, chain));
    let Judgement { against, harmless } = judgement("devices.nft", &["lo"]);
    assert_eq!((against, harmless), (vec![], chains.to_vec()));
    let counts =
        chains.map(|chain| format!("{chain} may match packets at pods' devices, rules: 1"));
    let Judgement { against, harmless } = judgement("devices.nft", &["eth0"]);
    assert_eq!((against, harmless), (counts.to_vec(), vec![]));
}

#[test]
fn listing_shows_each_rule_as_far_as_it_is_read() {
    let listing = netfilter("kindnet-filter.iptables", true).listing();
    let head = "chain POSTROUTING of table ip mangle: hook postrouting, priority -150, 5 rules\n";
    assert!(
        listing.starts_with(&format!("{head}  1: l4proto == 0x11 (a condition")),
        "{listing}"
    );
    let legacy = Legacy::of(["filter\n", ""]);
    let rules = [
        (Field::InName, b"eth0\0".to_vec()),
        (Field::State, vec![8, 0, 0, 0]),
    ]
    .map(|(field, value)| {
        Part::Condition(Condition {
            field,
            mask: vec![0xff; value.len()],
            value,
            equal: true,
        })
    });
    let rule = [&rules[..], &[Part::Refuse("drop the packet".to_owned())]].concat();
    let rules = [chain("FWD", vec![rule])].into();
    let listing = Netfilter {
        rules,
        legacy,
        follows: true,
        takes_up: true,
    }
    .listing();
    assert!(
        listing.contains("  1: iifname == \"eth0\" ct state == 0x08000000 drop the packet\n"),
        "{listing}"
    );
    assert!(
        listing.ends_with("table filter of iptables-legacy\n"),
        "{listing}"
    );
}
