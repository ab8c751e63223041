//! kube-proxy's IPVS mode: virtual servers, ipsets of the served addresses, and a few rules with
//! these sets.

use std::fmt::{Display, Write};
use std::net::Ipv4Addr;

use super::{MASQUERADE, Proto, Rules, ServicePort};

/// The sysctls that kube-proxy sets, below `/proc/sys/net`.
pub const SETTINGS: [(&str, &str); 3] = [
    ("ipv4/vs/conntrack", "1"),
    ("ipv4/vs/expire_nodest_conn", "1"),
    ("ipv4/vs/expire_quiescent_template", "1"),
];

/// In loading order: rules refer to sets.
#[derive(Clone, Debug)]
pub struct Ipvs {
    /// Lines of `ip` commands: ClusterIPs are addresses of the node, on a dummy device.
    pub device: String,
    /// The input of `ipset restore`.
    pub sets: String,
    /// The input of `ipvsadm --restore`.
    pub servers: String,
    /// The input of `iptables-restore --noflush`.
    pub iptables: String,
}

const HASH: &str = "family inet hashsize 1024 maxelem 65536";
/// Name and type; empty sets exist too.
const SETS: [(&str, &str); 17] = [
    ("KUBE-LOOP-BACK", "hash:ip,port,ip"),
    ("KUBE-CLUSTER-IP", "hash:ip,port"),
    ("KUBE-EXTERNAL-IP", "hash:ip,port"),
    ("KUBE-EXTERNAL-IP-LOCAL", "hash:ip,port"),
    ("KUBE-LOAD-BALANCER", "hash:ip,port"),
    ("KUBE-LOAD-BALANCER-FW", "hash:ip,port"),
    ("KUBE-LOAD-BALANCER-LOCAL", "hash:ip,port"),
    ("KUBE-LOAD-BALANCER-SOURCE-IP", "hash:ip,port,ip"),
    ("KUBE-LOAD-BALANCER-SOURCE-CIDR", "hash:ip,port,net"),
    ("KUBE-NODE-PORT-TCP", "bitmap:port"),
    ("KUBE-NODE-PORT-LOCAL-TCP", "bitmap:port"),
    ("KUBE-NODE-PORT-UDP", "bitmap:port"),
    ("KUBE-NODE-PORT-LOCAL-UDP", "bitmap:port"),
    ("KUBE-NODE-PORT-SCTP-HASH", "hash:ip,port"),
    ("KUBE-NODE-PORT-LOCAL-SCTP-HASH", "hash:ip,port"),
    ("KUBE-HEALTH-CHECK-NODE-PORT", "bitmap:port"),
    ("KUBE-IPVS-IPS", "hash:ip"),
];

pub(super) fn all(rules: &Rules) -> Ipvs {
    let mut addresses: Vec<_> = rules.ports.iter().map(|port| port.cluster_ip).collect();
    addresses.dedup(); // A Service's ports are adjacent.
    Ipvs {
        device: device(&addresses),
        sets: sets(rules, &addresses),
        servers: servers(rules),
        iptables: tables(rules),
    }
}

fn device(addresses: &[Ipv4Addr]) -> String {
    let mut text = String::from("link add kube-ipvs0 type dummy\n");
    addresses.iter().for_each(|address| {
        line(
            &mut text,
            format_args!("addr add {address}/32 dev kube-ipvs0"),
        )
    });
    text
}

fn sets(rules: &Rules, addresses: &[Ipv4Addr]) -> String {
    let mut text = String::new();
    for (name, kind) in SETS {
        let size = if kind == "bitmap:port" {
            "range 0-65535"
        } else {
            HASH
        };
        line(&mut text, format_args!("create {name} {kind} {size}"));
    }
    for ServicePort {
        proto,
        cluster_ip,
        port,
        node_port,
        endpoints,
        ..
    } in &rules.ports
    {
        line(
            &mut text,
            format_args!("add KUBE-CLUSTER-IP {cluster_ip},{proto}:{port}"),
        );
        if let Some(number) = node_port {
            line(
                &mut text,
                format_args!(
                    "add KUBE-NODE-PORT-{} {number}",
                    proto.to_string().to_uppercase()
                ),
            );
        }
        for at in endpoints.iter().filter(|at| rules.local.contains(at.ip())) {
            line(
                &mut text,
                format_args!("add KUBE-LOOP-BACK {0},{proto}:{1},{0}", at.ip(), at.port()),
            );
        }
    }
    addresses
        .iter()
        .for_each(|address| line(&mut text, format_args!("add KUBE-IPVS-IPS {address}")));
    text
}

/// Returns a virtual server per frontend, each with all endpoints.
fn servers(rules: &Rules) -> String {
    let mut text = String::new();
    for ServicePort {
        proto,
        cluster_ip,
        port,
        node_port,
        endpoints,
        ..
    } in &rules.ports
    {
        let proto = match proto {
            Proto::Tcp => "-t",
            Proto::Udp => "-u",
        };
        let node_port = node_port.map(|number| (rules.node, number));
        for (ip, port) in [(*cluster_ip, *port)].into_iter().chain(node_port) {
            line(&mut text, format_args!("-A {proto} {ip}:{port} -s rr"));
            endpoints.iter().for_each(|at| {
                line(
                    &mut text,
                    format_args!("-a {proto} {ip}:{port} -r {at} -m -w 1"),
                )
            });
        }
    }
    text
}

fn tables(rules: &Rules) -> String {
    let mut numbers = String::new();
    for (proto, name) in [(Proto::Tcp, "TCP"), (Proto::Udp, "UDP")] {
        // kube-proxy adds no rule for an empty set.
        if rules
            .ports
            .iter()
            .any(|port| port.proto == proto && port.node_port.is_some())
        {
            let what = format!(
                r#"-m comment --comment "Kubernetes nodeport {name} port for masquerade purpose""#
            );
            let set = format!("-m set --match-set KUBE-NODE-PORT-{name} dst");
            line(
                &mut numbers,
                format_args!("-A KUBE-NODE-PORT -p {proto} {what} {set} -j KUBE-MARK-MASQ"),
            );
        }
    }
    format!(
        r#"*nat
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-MASQ - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-SERVICES -s 127.0.0.0/8 -j RETURN
-A KUBE-SERVICES -m comment --comment "Kubernetes service cluster ip + port for masquerade purpose" -m set --match-set KUBE-CLUSTER-IP dst,dst ! -s {pods} -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
-A KUBE-POSTROUTING -m comment --comment "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose" -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE
-A KUBE-POSTROUTING -m mark ! --mark {MASQUERADE}/{MASQUERADE} -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark {MASQUERADE}
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
{numbers}-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --or-mark {MASQUERADE}
COMMIT
{filter}"#,
        pods = rules.pods,
        filter = filter()
    )
}

fn filter() -> String {
    format!(
        r#"*filter
:KUBE-FORWARD - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SOURCE-RANGES-FIREWALL - [0:0]
:KUBE-IPVS-FILTER - [0:0]
:KUBE-IPVS-OUT-FILTER - [0:0]
-A INPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-FILTER
-A INPUT -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-A INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT
-A FORWARD -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A OUTPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-OUT-FILTER
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark {MASQUERADE}/{MASQUERADE} -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-NODE-PORT -m comment --comment "Kubernetes health check node port" -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j ACCEPT
-A KUBE-SOURCE-RANGES-FIREWALL -j DROP
-A KUBE-IPVS-FILTER -m set --match-set KUBE-LOAD-BALANCER dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-EXTERNAL-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-EXTERNAL-IP-LOCAL dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j RETURN
-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT
COMMIT
"#
    )
}

fn line(text: &mut String, what: impl Display) {
    writeln!(text, "{what}").expect("a string takes all");
}
