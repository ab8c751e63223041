//! kube-proxy's nftables mode.

use std::fmt::{self, Write};
use std::net::SocketAddrV4;

use super::{MASQUERADE, Rules, ServicePort, hash};

const HASH: usize = 8;

pub(super) fn text(rules: &Rules) -> String {
    let mut text = String::from("table ip kube-proxy {\n\tcomment \"rules for kube-proxy\"\n\n");
    maps(rules, &mut text).expect("a string takes all");
    text.push_str(BASE_CHAINS);
    helpers(rules, &mut text).expect("a string takes all");
    rules
        .owners()
        .try_for_each(|port| service(rules, port, &mut text))
        .expect("a string takes all");
    text.push_str("}\n");
    text
}

/// Returns the rules from a service port to its current endpoints, and the deletions of the chains
/// of removed endpoints.
pub(super) fn change(rules: &Rules, port: &ServicePort, gone: &[SocketAddrV4]) -> String {
    let external = port.node_port.map(|_| "external");
    let mut text = String::new();
    for what in ["service"].into_iter().chain(external) {
        text += &format!("flush chain ip kube-proxy {}\n", chain(what, port, None));
    }
    text.push_str("table ip kube-proxy {\n");
    service(rules, port, &mut text).expect("a string takes all");
    text.push_str("}\n");
    for at in gone {
        text += &format!(
            "delete chain ip kube-proxy {}\n",
            chain("endpoint", port, Some(at))
        );
    }
    text
}

fn maps(rules: &Rules, text: &mut String) -> fmt::Result {
    let of_services = "ipv4_addr . inet_proto . inet_service : verdict";
    let of_numbers = "inet_proto . inet_service : verdict";
    let mut addresses: Vec<_> = rules
        .ports
        .iter()
        .map(|port| port.cluster_ip.to_string())
        .collect();
    addresses.dedup(); // A Service's ports are adjacent.
    let services = rules.ports.iter().map(|port| {
        format!(
            "{} . {} . {} : goto {}",
            port.cluster_ip,
            port.proto,
            port.port,
            chain("service", rules.owner(port), None)
        )
    });
    let numbers = rules.ports.iter().filter_map(|port| {
        Some(format!(
            "{} . {} : goto {}",
            port.proto,
            port.node_port?,
            chain("external", port, None)
        ))
    });
    set(
        text,
        "set cluster-ips",
        "ipv4_addr",
        "Active ClusterIPs",
        addresses,
    )?;
    set(
        text,
        "set nodeport-ips",
        "ipv4_addr",
        "IPs that accept NodePort traffic",
        vec![rules.node.to_string()],
    )?;
    let none = "vmap to drop or reject packets to service";
    set(
        text,
        "map no-endpoint-services",
        of_services,
        &format!("{none}s with no endpoints"),
        vec![],
    )?;
    set(
        text,
        "map no-endpoint-nodeports",
        of_numbers,
        &format!("{none} nodeports with no endpoints"),
        vec![],
    )?;
    let firewall = "destinations that are subject to LoadBalancerSourceRanges";
    set(text, "map firewall-ips", of_services, firewall, vec![])?;
    let frontends = "ClusterIP, ExternalIP and LoadBalancer IP traffic";
    set(
        text,
        "map service-ips",
        of_services,
        frontends,
        services.collect(),
    )?;
    set(
        text,
        "map service-nodeports",
        of_numbers,
        "NodePort traffic",
        numbers.collect(),
    )
}

fn set(
    text: &mut String,
    what: &str,
    kind: &str,
    comment: &str,
    elements: Vec<String>,
) -> fmt::Result {
    write!(
        text,
        "\t{what} {{\n\t\ttype {kind}\n\t\tcomment \"{comment}\"\n"
    )?;
    if !elements.is_empty() {
        writeln!(text, "\t\telements = {{ {} }}", elements.join(", "))?;
    }
    text.write_str("\t}\n")
}

const BASE_CHAINS: &str = "
	chain filter-prerouting-pre-dnat {
		type filter hook prerouting priority -110; policy accept;
		ct state new jump firewall-check
	}
	chain filter-input {
		type filter hook input priority 0; policy accept;
		ct state new jump nodeport-endpoints-check
		ct state new jump service-endpoints-check
	}
	chain filter-forward {
		type filter hook forward priority 0; policy accept;
		ct state new jump service-endpoints-check
		ct state new jump cluster-ips-check
	}
	chain filter-output-pre-dnat {
		type filter hook output priority -110; policy accept;
		ct state new jump firewall-check
	}
	chain filter-output {
		type filter hook output priority 0; policy accept;
		ct state new jump service-endpoints-check
		ct state new jump cluster-ips-check
	}
	chain nat-prerouting {
		type nat hook prerouting priority -100; policy accept;
		jump services
	}
	chain nat-output {
		type nat hook output priority -100; policy accept;
		jump services
	}
	chain nat-postrouting {
		type nat hook postrouting priority 100; policy accept;
		jump masquerading
	}
	chain nodeport-endpoints-check {
		ip daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports
	}
	chain service-endpoints-check {
		ip daddr . meta l4proto . th dport vmap @no-endpoint-services
	}
	chain firewall-check {
		ip daddr . meta l4proto . th dport vmap @firewall-ips
	}
	chain services {
		ip daddr . meta l4proto . th dport vmap @service-ips
		ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
	}
";

fn helpers(rules: &Rules, text: &mut String) -> fmt::Result {
    writeln!(
        text,
        "\tchain cluster-ips-check {{
		ip daddr @cluster-ips reject comment \"Reject traffic to invalid ports of ClusterIPs\"
		ip daddr {{ {} }} drop comment \"Drop traffic to unallocated ClusterIPs\"
	}}
	chain masquerading {{
		meta mark & {MASQUERADE} == 0 return
		meta mark set meta mark ^ {MASQUERADE}
		masquerade fully-random
	}}
	chain mark-for-masquerade {{
		meta mark set meta mark | {MASQUERADE}
	}}
	chain reject-chain {{
		comment \"helper for @no-endpoint-services / @no-endpoint-nodeports\"
		reject
	}}",
        rules.services
    )
}

fn service(rules: &Rules, port: &ServicePort, text: &mut String) -> fmt::Result {
    let proto = port.proto;
    let name = chain("service", port, None);
    let goto = |(nth, at)| format!("{nth} : goto {}", chain("endpoint", port, Some(at)));
    let endpoints: Vec<_> = port.endpoints.iter().enumerate().map(goto).collect();
    writeln!(
        text,
        "\tchain {name} {{
		ip daddr {} {proto} dport {} ip saddr != {} jump mark-for-masquerade
		numgen random mod {} vmap {{ {} }}
	}}",
        port.cluster_ip,
        port.port,
        rules.pods,
        endpoints.len(),
        endpoints.join(", ")
    )?;
    if port.node_port.is_some() {
        let external = chain("external", port, None);
        writeln!(
            text,
            "\tchain {external} {{\n\t\tjump mark-for-masquerade\n\t\tgoto {name}\n\t}}"
        )?;
    }
    port.endpoints.iter().try_for_each(|at| {
        writeln!(
            text,
            "\tchain {} {{\n\t\tip saddr {} jump mark-for-masquerade\n\t\tmeta l4proto {proto} dnat to {at}\n\t}}",
            chain("endpoint", port, Some(at)),
            at.ip()
        )
    })
}

fn chain(what: &str, port: &ServicePort, endpoint: Option<&SocketAddrV4>) -> String {
    let endpoint = endpoint
        .map(|at| format!("__{}/{}", at.ip(), at.port()))
        .unwrap_or_default();
    let name = format!("{}/{}/{}{endpoint}", port.service, port.proto, port.name);
    format!("{what}-{}-{name}", hash(&name, HASH))
}
