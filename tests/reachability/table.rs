//! The matrix.

use super::case::Expect::{Other, Refused, Silence};
use super::case::Seen::{Client, Dialled, Egress, Node};
use super::case::To::{
    ClusterIp, ClusterIpOtherPort, ExternalIp, LoadBalancer, LoadBalancerOtherPort, NodePort,
    NodePortElsewhere, NodePortLoopback, NodePortSecond,
};
use super::case::{Case, Expect, modes, same};

const CLIENT: Expect = Expect::Seen(Client);
const N1: Expect = Expect::Seen(Node("n1"));
const N2: Expect = Expect::Seen(Node("n2"));
const EGRESS: Expect = Expect::Seen(Egress("n1"));

pub(crate) const CASES: &[Case] = &[
    same("C01", "p1a", ClusterIp, "p1b", CLIENT),
    modes("C02", "p1a", ClusterIp, "p1a", Egress("n1"), Egress("n1")),
    same("C03", "p1a", ClusterIp, "p2a", CLIENT),
    same("C03", "p2b", ClusterIp, "p1b", CLIENT),
    same("C04", "p1a", ClusterIp, "n1", CLIENT),
    same("C05", "p1a", ClusterIp, "n2", N1), // The CNI's masquerade, after kpx.
    same("C06", "p1a", ClusterIp, "ext", N1), // As well.
    modes("C07", "n1", ClusterIp, "p1b", Node("n1"), Egress("n1")),
    same("C08", "n1", ClusterIp, "p2a", EGRESS),
    same("C09", "n1", ClusterIp, "n1", N1),
    same("C10", "n1", ClusterIp, "n2", N1),
    same("C10", "n2", ClusterIp, "n1", N2),
    modes("C12", "x", ClusterIp, "p1b", Client, Egress("n1")),
    same("C12", "x", ClusterIp, "p2a", EGRESS),
    same("C13", "p1a", ClusterIp, "nowhere", Refused),
    same("C13", "n1", ClusterIp, "nowhere", Refused),
    same("C14", "p1a", ClusterIp, "elsewhere", Silence),
    same("C14", "n1", ClusterIp, "elsewhere", Silence),
    same("C16", "p1a", ClusterIpOtherPort, "p1b", Refused),
    same("C16", "n1", ClusterIpOtherPort, "p1b", Refused),
    modes("N01", "x", NodePort("n1"), "p1b", Client, Egress("n1")),
    modes("N01", "xl", NodePort("n1"), "p1b", Client, Egress("n1")),
    same("N02", "x", NodePort("n1"), "p2a", EGRESS),
    same("N03", "x", NodePort("n1"), "n1", CLIENT),
    same("N04", "x", NodePort("n1"), "n2", N1),
    same("N05", "x", NodePort("n1"), "p1b-local", CLIENT),
    same("N06", "x", NodePort("n1"), "p2a-local", Silence),
    same("N06", "x", NodePort("n1"), "nowhere", Refused),
    same("N06", "x", NodePort("n1"), "nowhere-local", Refused),
    modes("N07", "p1a", NodePort("n1"), "p1b", Client, Egress("n1")),
    same("N07", "p1a", NodePort("n1"), "p1a", EGRESS),
    modes("N08", "p1a", NodePort("n1"), "p2a", Client, Egress("n1")),
    // n1's CNI masquerades the pod, so n2 sees an outside client.
    modes(
        "N09",
        "p1a",
        NodePort("n2"),
        "p2a",
        Node("n1"),
        Egress("n2"),
    ),
    same(
        "N09",
        "p1a",
        NodePort("n2"),
        "p1b",
        Expect::Seen(Egress("n2")),
    ),
    same("N10", "p1a", NodePort("n1"), "p2a-local", CLIENT),
    modes("N11", "n1", NodePort("n1"), "p1b", Node("n1"), Egress("n1")),
    same("N12", "n1", NodePort("n1"), "p2a", EGRESS),
    modes(
        "N13",
        "n1",
        NodePortLoopback,
        "p1b",
        Node("n1"),
        Egress("n1"),
    ),
    same("N13", "n1", NodePortLoopback, "p2a", EGRESS),
    same("N13", "n1", NodePortLoopback, "n1", N1),
    same("N13", "n1", NodePortLoopback, "n2", N1),
    same("N13", "n1", NodePortLoopback, "p2a-local", EGRESS),
    same("N13", "n1", NodePortLoopback, "nowhere", Refused),
    modes("N14", "n1", NodePort("n2"), "p2a", Client, Egress("n2")),
    same(
        "N14",
        "n1",
        NodePort("n2"),
        "p1b",
        Expect::Seen(Egress("n2")),
    ),
    modes("N17", "xl", NodePortSecond, "p1b", Client, Egress("n1")),
    modes("N19", "x", NodePort("n1"), "listened", Client, Egress("n1")),
    modes("L01", "x", LoadBalancer, "p1b", Client, Egress("n1")),
    same("L02", "x", LoadBalancer, "p2a", EGRESS),
    same("L03", "x", LoadBalancer, "p1b-local", CLIENT),
    same("L04", "x", LoadBalancer, "p2a-local", Silence),
    same("L04", "x", LoadBalancer, "nowhere", Refused),
    modes("L05", "p1a", LoadBalancer, "p1b", Client, Egress("n1")),
    modes("L05", "p1a", LoadBalancer, "p2a", Client, Egress("n1")),
    same("L05", "p1a", LoadBalancer, "p1b-local", CLIENT),
    same("L05", "p1a", LoadBalancer, "p2a-local", CLIENT),
    same("L05", "p1a", LoadBalancer, "nowhere", Refused),
    modes("L06", "n1", LoadBalancer, "p1b", Node("n1"), Egress("n1")),
    same("L06", "n1", LoadBalancer, "p2a", EGRESS),
    modes(
        "L06",
        "n1",
        LoadBalancer,
        "p1b-local",
        Node("n1"),
        Egress("n1"),
    ),
    same("L06", "n1", LoadBalancer, "p2a-local", EGRESS),
    same("L06", "n1", LoadBalancer, "nowhere", Refused),
    modes("L07", "n1", LoadBalancer, "here", Node("n1"), Egress("n1")),
    modes(
        "L07",
        "n1",
        LoadBalancer,
        "here-local",
        Node("n1"),
        Egress("n1"),
    ),
    same("L07", "n1", LoadBalancer, "away-local", EGRESS),
    modes("L07", "x", LoadBalancer, "here", Client, Egress("n1")),
    modes("L07", "p1a", LoadBalancer, "here", Client, Egress("n1")),
    modes("L08", "x", LoadBalancer, "for-x", Client, Egress("n1")),
    same("L08", "x", LoadBalancer, "not-for-x", Silence),
    same("L08", "x", LoadBalancer, "not-for-x-nowhere", Silence),
    modes("L08", "x", LoadBalancer, "for-all", Client, Egress("n1")),
    modes(
        "L08",
        "x",
        NodePort("n1"),
        "not-for-x",
        Client,
        Egress("n1"),
    ),
    modes("L08", "x", ExternalIp, "not-for-x", Client, Egress("n1")),
    same("L08", "p1a", ClusterIp, "not-for-x", CLIENT),
    modes(
        "L08",
        "n1",
        LoadBalancer,
        "for-n1",
        Node("n1"),
        Egress("n1"),
    ),
    same("L09", "p1a", LoadBalancer, "for-x", Silence),
    same("L09", "n1", LoadBalancer, "for-x", Silence),
    modes("L09", "p1a", LoadBalancer, "for-all", Client, Egress("n1")),
    same(
        "L10",
        "p1a",
        LoadBalancer,
        "proxied",
        Other("proxy", Node("n1")),
    ),
    same(
        "L10",
        "n1",
        LoadBalancer,
        "proxied",
        Other("proxy", Node("n1")),
    ),
    same("L10", "x", LoadBalancer, "proxied", Other("proxy", Client)),
    modes("L11", "x", ExternalIp, "p1b", Client, Egress("n1")),
    same("L11", "x", ExternalIp, "p2a", EGRESS),
    same("L11", "x", ExternalIp, "p1b-local", CLIENT),
    same("L11", "x", ExternalIp, "p2a-local", Silence),
    same("L11", "x", ExternalIp, "nowhere", Refused),
    modes("L11", "p1a", ExternalIp, "p2a", Client, Egress("n1")),
    modes("L11", "n1", ExternalIp, "p1b", Node("n1"), Egress("n1")),
    modes("L11", "x", ExternalIp, "here", Client, Egress("n1")),
    same("L11", "x", ExternalIp, "here-local", CLIENT),
    same("L11", "x", ExternalIp, "away-local", Silence),
    modes("L11", "n1", ExternalIp, "here", Node("n1"), Egress("n1")),
    same(
        "L12",
        "x",
        LoadBalancerOtherPort,
        "here",
        Other("host", Client),
    ),
    same(
        "L12",
        "p1a",
        LoadBalancerOtherPort,
        "here",
        Other("host", Client),
    ),
    same(
        "L12",
        "n1",
        LoadBalancerOtherPort,
        "here",
        Other("host", Dialled),
    ),
    modes(
        "L14",
        "x",
        LoadBalancer,
        "no-node-ports",
        Client,
        Egress("n1"),
    ),
];

/// With `--nodeport-addresses`, `--cluster-ip-external=false` and without the gate
/// `AllowServiceExternalIPs`, in the default mode.
pub(crate) const CASES_OF_FLAGS: &[Case] = &[
    same("C12", "x", ClusterIp, "p1b", Silence),
    same("C12", "x", ClusterIp, "p2a", Silence),
    same("N16", "x", NodePortElsewhere, "p1b", Other("host", Client)),
    same("N16", "x", NodePort("n1"), "p1b", CLIENT),
    same("L16", "x", ExternalIp, "here", Other("host", Client)),
    same("L16", "p1a", ExternalIp, "here", Other("host", Client)),
    same("L16", "n1", ExternalIp, "here", Other("host", Dialled)),
    same("L16", "x", LoadBalancer, "p2a", EGRESS),
];

/// The cases of a node with a different set-up: each kind of client, and each place of a backend.
pub(crate) const SHAPED: &[&str] = &[
    "C01", "C02", "C03", "C04", "C05", "C06", "C07", "C08", "C12", "N01", "N02", "N05", "N07",
    "L01",
];
/// The cases that pods on ipvlan devices run: the above without those of a pod that dials itself or
/// a neighbour, whose replies the kernel passes directly between the two, past every hook.
pub(crate) const ON_IPVLAN: &[&str] = &[
    "C03", "C04", "C05", "C06", "C07", "C08", "C12", "N01", "N02", "N05", "L01",
];
/// The cases of an outside client that n1 answers by another link. The client dials n1, which has
/// the backend or forwards to it.
pub(crate) const ASYMMETRIC: &[&str] = &[
    "N01", "N02", "N03", "N04", "N05", "N06", "L01", "L02", "L03", "L11",
];

/// The subject of each case.
pub(crate) const ABOUT: &[(&str, &str)] = &[
    ("C01", "a pod, another pod of its node"),
    ("C02", "a pod, itself"),
    ("C03", "a pod, a pod of another node"),
    ("C04", "a pod, its node's own network"),
    ("C05", "a pod, another node's own network"),
    ("C06", "a pod, an address outside"),
    ("C07", "a process of the node, a pod of it"),
    ("C08", "a process of the node, a pod of another"),
    ("C09", "a process of the node, its own network"),
    ("C10", "a process of the node, another node's own network"),
    (
        "C11",
        "a process that must use the loopback's address, or another device",
    ),
    ("C12", "a client outside"),
    ("C13", "no endpoints"),
    ("C14", "internalTrafficPolicy Local, no local endpoint"),
    (
        "C15",
        "internalTrafficPolicy Local and Cluster, many connections",
    ),
    ("C16", "a port that the service does not offer"),
    ("C17", "sessionAffinity ClientIP"),
    ("C18", "endpoints that terminate and serve"),
    ("C19", "hints for zones and nodes"),
    ("C20", "a host that is not in the cluster"),
    ("C21", "one source port, one backend, two services"),
    ("C22", "one source port, a service and its backend itself"),
    ("N01", "a client outside, a pod of the node"),
    ("N02", "a client outside, a pod of another node"),
    ("N03", "a client outside, the node's own network"),
    ("N04", "a client outside, another node's own network"),
    ("N05", "externalTrafficPolicy Local, a local endpoint"),
    (
        "N06",
        "externalTrafficPolicy Local, no local endpoint; no endpoints at all",
    ),
    ("N07", "a pod, its node, a pod of it"),
    ("N08", "a pod, its node, a pod of another"),
    ("N09", "a pod, another node"),
    (
        "N10",
        "a pod, externalTrafficPolicy Local, no local endpoint",
    ),
    ("N11", "a process of the node, a pod of it"),
    ("N12", "a process of the node, a pod of another"),
    ("N13", "a process of the node, 127.0.0.1 or ::1"),
    ("N14", "a process of the node, another node"),
    ("N15", "an address that the node has only now"),
    ("N16", "an address that --nodeport-addresses leaves out"),
    ("N17", "the second device's address, from its segment"),
    (
        "N18",
        "one source port, two nodes; two frontends of a remote backend",
    ),
    ("N19", "a port where a process of the node listens too"),
    (
        "N20",
        "a pod's flow out of the cluster that the CNI masquerades to a node port",
    ),
    ("L01", "a client outside, a pod of the node"),
    ("L02", "a client outside, a pod of another node"),
    ("L03", "externalTrafficPolicy Local, a local endpoint"),
    (
        "L04",
        "externalTrafficPolicy Local, no local endpoint; no endpoints at all",
    ),
    ("L05", "a pod; the address does not leave the node"),
    ("L06", "a process of the node"),
    ("L07", "an address that the node has on an interface"),
    (
        "L08",
        "loadBalancerSourceRanges, and the frontends that they do not filter",
    ),
    (
        "L09",
        "loadBalancerSourceRanges without the pods and the node",
    ),
    ("L10", "ipMode Proxy"),
    ("L11", "ExternalIPs, on an interface of the node and not"),
    (
        "L12",
        "a port that the service does not offer, where a process of the node listens",
    ),
    ("L13", "healthCheckNodePort"),
    ("L14", "allocateLoadBalancerNodePorts false"),
    ("L15", "a hop of 1400 bytes in the middle, 1 MB to and fro"),
    (
        "L16",
        "ExternalIPs while the gate AllowServiceExternalIPs is off",
    ),
    ("D05", "UDP: the backend of an open socket goes"),
    (
        "D13",
        "flows outlive their backend's removal, the policy and the service; labels take a service down and up",
    ),
    (
        "D16",
        "kpx.dev/lb-algorithm, kpx.dev/weights, kpx.dev/weight",
    ),
];

const ON_LO: &str = "not run for long messages of the kernel's own SCTP from a process that dials an address of its node: each is one packet that must not be cut";

/// The cases that are not run, with the reason.
pub(crate) const NOT_RUN: &[(&str, &str)] = &[
    (
        "C20",
        "not run here but by `tests/lab/host`, with TCP, UDP and SCTP, IPv4 and IPv6: by routes, by the default route, by routes through nodes, by node ports",
    ),
    (
        "C09",
        "not run for fragments, and long messages of the kernel's own SCTP, before Linux 5.12: they come back over lo, and there a packet put into a device must fit its MTU",
    ),
    ("N11", ON_LO),
    ("N12", ON_LO),
    ("L07", ON_LO),
    ("L08", ON_LO),
    ("L11", ON_LO),
];
