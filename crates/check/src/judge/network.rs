//! Evaluates the network of this host: forwarding, conntrack, the CNI, MTUs, and the policies that
//! packets bypass on the fast path.

use proxy_net::role::TELL_PODS;
use proxy_net::xfrm::Policy;
use proxy_view::output::list;

use crate::facts::{
    BRIDGE_IPTABLES, CONNTRACK_COUNT, CONNTRACK_MAX, Facts, IP_FORWARD, IP6_FORWARD,
    ROUTE_LOCALNET, RP_FILTER,
};
use crate::finding::{Finding, fail, ok, warn};

pub(super) fn ip_forward(facts: &Facts) -> Finding {
    match value(facts, IP_FORWARD) {
        Some(1..) => ok("ip_forward", "on"),
        _ => fail(
            "ip_forward",
            "off: no packet reaches a pod",
            "sysctl -w net.ipv4.ip_forward=1",
        ),
    }
}

pub(super) fn ip6_forward(facts: &Facts) -> Finding {
    const WHAT: &str = "ipv6 forwarding";
    match value(facts, IP6_FORWARD) {
        None => ok(WHAT, "this kernel has no IPv6"),
        Some(0) => warn(
            WHAT,
            "off",
            "if pods have IPv6 addresses: sysctl -w net.ipv6.conf.all.forwarding=1",
        ),
        Some(_) => ok(WHAT, "on"),
    }
}

/// Reports rp_filter. Translated packets pass with any value.
pub(super) fn rp_filter(facts: &Facts) -> Finding {
    let how = ["off", "strict", "loose"];
    let found = value(facts, RP_FILTER).and_then(|value| how.get(usize::try_from(value).ok()?));
    ok(
        "rp_filter",
        format!("{}; kpx works with any", found.unwrap_or(&"unknown")),
    )
}

pub(super) fn route_localnet(facts: &Facts) -> Finding {
    const WHAT: &str = "route_localnet";
    match value(facts, ROUTE_LOCALNET) {
        Some(1..) => {
            let found = "on, as kube-proxy leaves it: neighbours can reach servers on 127.0.0.1";
            warn(WHAT, found, "sysctl -w net.ipv4.conf.all.route_localnet=0")
        }
        _ => ok(WHAT, "off"),
    }
}

pub(super) fn conntrack(facts: &Facts) -> Finding {
    const WHAT: &str = "conntrack";
    let (Some(max), Some(count)) = (value(facts, CONNTRACK_MAX), value(facts, CONNTRACK_COUNT))
    else {
        return ok(WHAT, "not loaded");
    };
    let found = format!("{count} of {max} connections");
    if max > 0 && count * 10 > max * 9 {
        return warn(
            WHAT,
            found,
            format!("sysctl -w net.netfilter.nf_conntrack_max={}", max * 2),
        );
    }
    ok(WHAT, found)
}

pub(super) fn br_netfilter(facts: &Facts) -> Finding {
    ok(
        "br_netfilter",
        match value(facts, BRIDGE_IPTABLES) {
            None => "not loaded, and kpx needs none",
            Some(0) => "loaded, off; kpx works with either",
            Some(_) => "on; kpx works with either",
        },
    )
}

pub(super) fn cni(facts: &Facts) -> Finding {
    if facts.cni.is_empty() {
        return warn(
            "CNI",
            "no plugin is configured",
            "on a node, install one; a host outside the cluster needs none",
        );
    }
    ok("CNI", list(&facts.cni))
}

pub(super) fn mtu(facts: &Facts) -> Finding {
    const WHAT: &str = "MTU";
    match facts.pod_mtu {
        Some(pods) if pods > facts.mtu => {
            let found = format!(
                "pods have up to {pods}, the narrowest way out has {}",
                facts.mtu
            );
            warn(
                WHAT,
                found,
                format!(
                    "set the CNI's MTU to {} or less: larger packets are fragmented or lost",
                    facts.mtu
                ),
            )
        }
        Some(pods) => ok(
            WHAT,
            format!("{} on the narrowest way out, pods up to {pods}", facts.mtu),
        ),
        None => ok(WHAT, format!("{} on the narrowest way out", facts.mtu)),
    }
}

/// Checks for pods' devices that kpx may classify as a router's.
pub(super) fn pods(facts: &Facts) -> Finding {
    const WHAT: &str = "pods";
    match facts.no_pods.as_slice() {
        [] => ok(
            WHAT,
            "every veth into another namespace is recognised as a pod's or a router's",
        ),
        [why] => warn(
            WHAT,
            why,
            format!("if it is a pod's device, set {TELL_PODS}"),
        ),
        [why, rest @ ..] => warn(
            WHAT,
            format!("{why}; and {} more", rest.len()),
            format!("if they are pods' devices, set {TELL_PODS}"),
        ),
    }
}

/// Checks the IPsec policies: packets that the programs redirect to a device bypass the policies.
pub(super) fn ipsec(facts: &Facts) -> Finding {
    const WHAT: &str = "IPsec";
    if let Some(why) = &facts.ipsec_unknown {
        return warn(
            WHAT,
            format!("unknown: {why}"),
            "run kpx check as root, or see ip xfrm policy",
        );
    }
    match past_ipsec(&facts.ipsec) {
        None => ok(WHAT, "no policy for packets that leave the host"),
        Some(found) => warn(
            WHAT,
            found,
            "encrypt traffic between nodes with WireGuard instead: docs/limits.md",
        ),
    }
}

/// Checks foreign routing rules, which the programs' FIB look-ups obey only in part.
pub(super) fn routing_rules(facts: &Facts) -> Finding {
    const WHAT: &str = "routing rules";
    if !facts.early_rules.is_empty() {
        let found = format!(
            "precede kpx's rules and may divert this host's packets to ClusterIPs: {}",
            facts.early_rules.join("; ")
        );
        return warn(
            WHAT,
            found,
            "give these rules a preference above 75, or leave the ranges of ClusterIPs out of them",
        );
    }
    if facts.unasked_rules.is_empty() {
        return ok(
            WHAT,
            "none by mark, type of service, protocol, port, user, outgoing device or VRF",
        );
    }
    let rules: Vec<_> = facts
        .unasked_rules
        .iter()
        .map(ToString::to_string)
        .collect();
    let found = format!(
        "ignored for the host's packets to Services and for masqueraded clients: {}",
        rules.join("; ")
    );
    warn(
        WHAT,
        found,
        "if such packets must take those routes, add rules by address or incoming device: docs/limits.md",
    )
}

/// Checks for other uses of the operator's ClusterIP ranges. The cluster's own ranges are available
/// only from a running kpx.
pub(super) fn service_ranges(facts: &Facts) -> Option<Finding> {
    const WHAT: &str = "ranges of ClusterIPs";
    if facts.service_ranges.is_empty() {
        return None;
    }
    if facts.routes_in_ranges.is_empty() {
        return Some(ok(
            WHAT,
            format!(
                "this node has no route into {}",
                list(&facts.service_ranges)
            ),
        ));
    }
    let ranges = list(&facts.service_ranges);
    let routes = list(&facts.routes_in_ranges);
    let found = format!("{ranges} have in them routes of this node's to {routes}");
    let fix = "move these networks: packets there pass where no Service takes them";
    Some(warn(WHAT, found, fix))
}

/// Checks foreign chains that drop by default. kube-proxy's iptables mode accepts its masqueraded
/// packets there, and kpx adds no such rule.
pub(super) fn forwarding(facts: &Facts) -> Finding {
    const WHAT: &str = "forwarding";
    if let Some(why) = &facts.netfilter_unknown {
        return warn(
            WHAT,
            format!("unknown: {why}"),
            "run kpx check as root, or see nft list ruleset",
        );
    }
    let Some(first) = facts.refusals.first() else {
        return ok(
            WHAT,
            "no chain refuses packets from external clients to pods",
        );
    };
    let is_doubtful = first.is_doubtful || facts.pod_networks.is_empty();
    let may = if is_doubtful {
        "may be refused"
    } else {
        "are refused"
    };
    let more = facts.refusals.len() - 1;
    let more = if more > 0 {
        format!("; and {more} more")
    } else {
        String::new()
    };
    let found = format!(
        "clients outside {may}, by node ports and load balancers: {}{more}",
        first.why
    );
    let hint = match facts.pod_networks.is_empty() {
        true => {
            "; PODS is the pods' network, and kpx check --cluster-cidr looks whether a rule accepts it"
        }
        false => "",
    };
    warn(
        WHAT,
        found,
        format!("accept packets from and to pods: {}{hint}", first.remedy),
    )
}

/// Checks the chains that drop packets to the host, such as a load balancer's probes of a
/// `healthCheckNodePort`.
pub(super) fn probes(facts: &Facts) -> Finding {
    const WHAT: &str = "health check ports";
    match facts.closed_inputs.first() {
        None => ok(WHAT, "no chain drops packets to this host"),
        Some(first) => warn(
            WHAT,
            unheard_probes(first),
            "accept each such PORT: iptables -I INPUT -p tcp --dport PORT -j ACCEPT, or ufw allow PORT/tcp",
        ),
    }
}

fn value(facts: &Facts, key: &str) -> Option<u64> {
    facts.sysctls.get(key)?.parse().ok()
}

/// Describes the effect of a dropping chain on load balancers. A rule of the chain may accept their
/// probes.
pub fn unheard_probes(chain: &str) -> String {
    format!("load balancers may not reach healthCheckNodePorts: {chain}")
}

/// Describes the IPsec policies that the host's packets to Services bypass; `None` if there are no
/// policies.
pub fn past_ipsec(policies: &[Policy]) -> Option<String> {
    let first = policies.first()?;
    let number = policies.len();
    Some(format!(
        "IPsec policies do not hold for the host's packets to Services; this host has {number}, first {first}"
    ))
}
