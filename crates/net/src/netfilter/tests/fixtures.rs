//! Rule sets of well-known programs, and their possible effects on packets between pods.

use super::super::ruleset;
use super::{found, record, short};

/// The pods of the recorded nodes.
pub(super) const PODS: &str = "10.244.1.0/24 fd00:10:244:1::/64";

/// Returns the possible effects of a file's rules on packets between the addresses `pods`:
/// `POSTROUTING 1 masquerade`.
pub(super) fn judged(file: &str, pods: &str) -> Vec<String> {
    let rules = ruleset(&record::messages(file)).unwrap();
    found(&rules, pods).obstacles.iter().map(short).collect()
}

/// Checks that the rules leave packets of the node's pods unchanged, and would change packets of
/// pods with the addresses `others`.
#[track_caller]
pub(super) fn leaves_alone(file: &str, others: &str, want: &[&str]) {
    assert_eq!(judged(file, PODS), [""; 0], "{file}");
    assert_eq!(judged(file, others), want, "{file}: {others}");
}

// flannel returns packets within its network before it masquerades the rest.
#[test]
fn flannels_rules_leave_pods_alone() {
    let want = [
        "FLANNEL-POSTRTG 5 masquerade",
        "FLANNEL-POSTRTG 6 masquerade",
    ];
    leaves_alone("flannel.iptables", "10.244.1.0/24 10.99.0.0/24", &want);
    let want = [
        "FLANNEL-POSTRTG 2 masquerade",
        "FLANNEL-POSTRTG 4 masquerade",
    ];
    leaves_alone(
        "flannel.ip6tables",
        "fd00:10:244:1::/64 fd00:99::/64",
        &want,
    );
}

// The plugins accept packets within the pod's network. portmap's chain matches only the host's
// addresses, and its masquerade matches only marked packets.
#[test]
fn cni_plugins_leave_pods_of_one_network_alone() {
    let want = [
        "CNI-0a1b2c3d4e5f60718293a4b5 2 masquerade",
        "CNI-f0e1d2c3b4a5968778695a4b 2 masquerade",
    ];
    leaves_alone("cni-ipmasq.iptables", "10.244.1.0/24 10.99.0.0/24", &want);
    let want = ["masq_checks 1 masquerade", "masq_checks 3 masquerade"];
    leaves_alone("cni-ipmasq.nft", "10.244.1.0/24 10.99.0.0/24", &want);
    let want = ["masq_checks 2 masquerade", "masq_checks 4 masquerade"];
    leaves_alone("cni-ipmasq.nft", "fd00:10:244:1::/64 fd00:99::/64", &want);
}

// The network has a single pod, which is masqueraded towards every other pod.
#[test]
fn cni_plugins_may_masquerade_pods_of_single_addresses() {
    assert_eq!(
        judged("cni-single.iptables", PODS),
        ["CNI-0a1b2c3d4e5f60718293a4b5 2 masquerade"]
    );
    assert_eq!(
        judged("cni-single.iptables", "10.244.1.8/32 10.244.1.9/32"),
        [""; 0],
        "it concerns one pod"
    );
}

// kindnet returns packets to pods. Docker's resolver has another address.
#[test]
fn kindnets_rules_leave_pods_alone() {
    leaves_alone(
        "kindnet.iptables",
        "10.99.0.0/24",
        &["KIND-MASQ-AGENT 2 masquerade"],
    );
    let resolver = judged("kindnet.iptables", "172.18.0.0/16");
    assert!(
        resolver.contains(&"DOCKER_OUTPUT 1 translate the destination".to_owned()),
        "{resolver:?}"
    );
}

// ip-masq-agent returns packets to private networks.
#[test]
fn ip_masq_agents_rules_leave_pods_alone() {
    leaves_alone(
        "ip-masq-agent.iptables",
        "100.64.0.0/10",
        &["IP-MASQ-AGENT 5 masquerade"],
    );
}

// Docker masquerades its own network, and translates packets to the host's addresses.
#[test]
fn dockers_rules_leave_pods_alone() {
    leaves_alone(
        "docker.iptables",
        "172.17.0.0/16",
        &["POSTROUTING 1 masquerade", "POSTROUTING 2 masquerade"],
    );
}

// kube-proxy's rules match ClusterIPs, the host's addresses, and its own mark.
#[test]
fn kube_proxys_rules_leave_pods_alone() {
    let want = [
        "KUBE-MARK-MASQ 1 set the mark",
        "KUBE-POSTROUTING 2 set the mark",
        "KUBE-POSTROUTING 3 masquerade",
        "KUBE-SEP-ONE 2 translate the destination",
        "KUBE-SEP-TWO 2 translate the destination",
    ];
    leaves_alone("kube-proxy.iptables", "10.244.1.0/24 10.96.0.0/16", &want);
}

// Calico's rule depends on sets, which kpx does not read, and on source address types.
#[test]
fn calicos_rules_may_masquerade_pods() {
    let want = [
        "cali-POSTROUTING 3 masquerade",
        "cali-nat-outgoing 1 masquerade",
    ];
    assert_eq!(judged("calico.iptables", PODS), want);
}

// A masquerade of all pods ignores the destination.
#[test]
fn plain_masquerade_may_change_packets_of_pods() {
    assert_eq!(judged("all-pods.nft", PODS), ["postrouting 1 masquerade"]);
    assert_eq!(judged("all-pods.nft", "10.99.0.0/24 fd00::/64"), [""; 0]);
}

// A pod may send to itself, and this masquerade serves that case.
#[test]
fn hairpin_masquerade_may_change_packets_of_a_pod() {
    assert_eq!(
        judged("hairpin.iptables", PODS),
        ["POSTROUTING 1 masquerade"]
    );
    assert_eq!(judged("hairpin.iptables", "10.244.1.8/32"), [""; 0]);
}

#[test]
fn conditions_of_every_known_form_exclude_pods() {
    leaves_alone(
        "harmless.nft",
        "10.244.1.0/24 203.0.113.0/24",
        &[
            "postrouting 1 translate the source",
            "postrouting 4 masquerade",
            "postrouting 2 masquerade",
            "prerouting 6 log the packet",
            "prerouting 6 translate the destination",
            "chain postrouting of table inet harmless drops packets that its rules do not accept",
        ],
    );
    let ipv6 = judged("harmless.nft", "fd00:10:244:1::/64 fd00:99::/64");
    assert!(
        ipv6.contains(&"postrouting 2 translate the source".to_owned()),
        "{ipv6:?}"
    );
}

#[test]
fn unknown_conditions_and_statements_may_change_packets() {
    let want = [
        "__chain2 1 translate the source",
        "postrouting 1 masquerade",
        "postrouting 3 drop the packet",
        "postrouting 4 rewrite the packet",
        "prerouting 1 redirect",
        "prerouting 2 redirect",
        "prerouting 3 translate the destination",
        "prerouting 4 translate the destination",
        "prerouting 5 set the mark",
        "prerouting 6 look up a verdict map",
        "chain postrouting of table ip unsure drops packets that its rules do not accept",
    ];
    assert_eq!(judged("unsure.nft", PODS), want);
}
