//! The settings of kube-proxy's mode ipvs, and their replacements in kpx.

use ipnet::IpNet;
use proxy_common::frontend::Algorithm;
use proxy_core::model::algorithm_name;
use serde_json::{Value, json};

use super::kube_proxy::{Ipvs, KubeProxyConfiguration};
use crate::config::duration::GoDuration;
use crate::config::tree;

/// An IPVS scheduler, and the algorithm that spreads clients most similarly.
struct Scheduler {
    name: &'static str,
    nearest: Algorithm,
    /// The difference for a client or a backend; empty if there is none.
    differs: &'static str,
}

const TWO: &str = "kpx selects the backend with fewer open flows of this node from two random backends, IPVS from all";
const BY_ADDRESS: &str = "IPVS selects by the client's address, kpx by address and port: use sessionAffinity: ClientIP for clients that must stay";
const ONE: &str = "IPVS sends all clients of a frontend to one backend, kpx to all backends";

/// Linux' schedulers. kube-proxy accepts the first ten, and its default is `rr`.
///
/// kube-proxy gives each server the weight 1, so weighted schedulers act like unweighted
/// schedulers.
#[rustfmt::skip]
const SCHEDULERS: [Scheduler; 13] = [
    Scheduler { name: "rr", nearest: Algorithm::ROUND_ROBIN, differs: "" },
    Scheduler { name: "wrr", nearest: Algorithm::ROUND_ROBIN, differs: "" },
    Scheduler { name: "lc", nearest: Algorithm::LEAST_CONNECTIONS, differs: TWO },
    Scheduler { name: "wlc", nearest: Algorithm::LEAST_CONNECTIONS, differs: TWO },
    Scheduler { name: "lblc", nearest: Algorithm::LEAST_CONNECTIONS, differs: ONE },
    Scheduler { name: "lblcr", nearest: Algorithm::LEAST_CONNECTIONS, differs: ONE },
    Scheduler { name: "sh", nearest: Algorithm::MAGLEV, differs: BY_ADDRESS },
    Scheduler { name: "dh", nearest: Algorithm::MAGLEV, differs: ONE },
    Scheduler { name: "sed", nearest: Algorithm::LEAST_CONNECTIONS, differs: TWO },
    Scheduler { name: "nq", nearest: Algorithm::LEAST_CONNECTIONS, differs: TWO },
    Scheduler { name: "mh", nearest: Algorithm::MAGLEV, differs: BY_ADDRESS },
    Scheduler { name: "ovf", nearest: Algorithm::LEAST_CONNECTIONS, differs: "IPVS fills one backend after the other, kpx all evenly" },
    Scheduler { name: "fo", nearest: Algorithm::RANDOM, differs: ONE },
];

fn scheduler(name: &str) -> Option<&'static Scheduler> {
    let name = if name.is_empty() { "rr" } else { name };
    SCHEDULERS.iter().find(|scheduler| scheduler.name == name)
}

pub(super) fn is_scheduler(name: &str) -> bool {
    scheduler(name).is_some()
}

/// Returns the names of all schedulers, for an error text.
pub(super) fn schedulers() -> String {
    SCHEDULERS
        .each_ref()
        .map(|scheduler| scheduler.name)
        .join(", ")
}

/// Returns the fields of a KpxConfiguration derived from kube-proxy's document in mode ipvs. The
/// operator's own fields take precedence.
pub(super) fn defaults(kube_proxy: &Value) -> Value {
    let given = tree::get(kube_proxy, "ipvs.scheduler")
        .and_then(Value::as_str)
        .unwrap_or_default();
    match scheduler(given).filter(|_| kube_proxy["mode"] == "ipvs") {
        Some(scheduler) => json!({ "lbAlgorithm": algorithm_name(scheduler.nearest) }),
        None => json!({}),
    }
}

/// Returns the scheduler's replacement and the difference; `None` if there is no difference.
pub(super) fn notice(ipvs: &Ipvs) -> Option<String> {
    let Scheduler {
        name,
        nearest,
        differs,
    } = scheduler(&ipvs.scheduler).filter(|one| !one.differs.is_empty())?;
    Some(format!(
        "ipvs.scheduler {name}: served by the algorithm {}: {differs}",
        algorithm_name(*nearest)
    ))
}

/// Returns the networks whose virtual servers are not kube-proxy's. The list is already checked.
pub(super) fn excluded(kube_proxy: &KubeProxyConfiguration) -> Vec<IpNet> {
    let excluded = kube_proxy
        .ipvs
        .exclude_cidrs
        .iter()
        .filter(|_| kube_proxy.mode == "ipvs");
    excluded.filter_map(|net| net.parse().ok()).collect()
}

/// Returns the configured fields without effect, with the reasons.
pub(super) fn without_effect(ipvs: &Ipvs) -> impl Iterator<Item = (&'static str, &'static str)> {
    let timeouts = [
        ("ipvs.tcpTimeout", ipvs.tcp_timeout),
        ("ipvs.tcpFinTimeout", ipvs.tcp_fin_timeout),
        ("ipvs.udpTimeout", ipvs.udp_timeout),
    ];
    let timeouts = timeouts
        .into_iter()
        .filter(|(_, timeout)| *timeout != GoDuration::ZERO)
        .map(|(field, _)| (field, TIMEOUTS));
    timeouts.chain(ipvs.strict_arp.then_some(("ipvs.strictARP", STRICT_ARP)))
}

pub(super) const TIMEOUTS: &str = "kpx's own table goes by conntrack.tcpEstablishedTimeout, tcpCloseWaitTimeout, udpTimeout and udpStreamTimeout";
pub(super) const STRICT_ARP: &str =
    "kpx puts no Service's address on a device, so the node answers no ARP for it";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedulers_lead_to_the_nearest_algorithm() {
        let document =
            |mode: &str, scheduler: &str| json!({"mode": mode, "ipvs": {"scheduler": scheduler}});
        let algorithm = |document: &Value| {
            defaults(document)["lbAlgorithm"]
                .as_str()
                .unwrap_or_default()
                .to_owned()
        };
        for (scheduler, expected) in [
            ("", "round-robin"),
            ("rr", "round-robin"),
            ("wrr", "round-robin"),
            ("lc", "least-connections"),
            ("wlc", "least-connections"),
            ("sed", "least-connections"),
            ("nq", "least-connections"),
            ("lblc", "least-connections"),
            ("lblcr", "least-connections"),
            ("ovf", "least-connections"),
            ("sh", "maglev"),
            ("mh", "maglev"),
            ("dh", "maglev"),
            ("fo", "random"),
            ("best", ""),
        ] {
            assert_eq!(
                algorithm(&document("ipvs", scheduler)),
                expected,
                "{scheduler}"
            );
            assert_eq!(
                algorithm(&document("iptables", scheduler)),
                "",
                "{scheduler} in another mode"
            );
        }
        assert_eq!(algorithm(&json!({"mode": "ipvs"})), "round-robin");
    }
}
