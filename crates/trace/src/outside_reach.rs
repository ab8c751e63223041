//! Explains results to a machine outside the cluster: the ports that it does not reach, the causes,
//! and the remedies.

use std::collections::BTreeSet;
use std::net::IpAddr;

use proxy_common::addr::Proto;
use proxy_common::counter::Reason;
use proxy_view::Mode;
use proxy_view::status::{CutOffPortStatus, Status, UnreachableStatus};

use crate::explain::ANY_SERVICE;

/// The backends that a machine outside the cluster does not reach, and its paths to pods.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outside {
    unreachable: Vec<UnreachableStatus>,
    /// The Services whose backends are all unreachable.
    cut_off: BTreeSet<String>,
    /// True if the tunnel through the API server is on.
    has_tunnel: bool,
    pod_routes: String,
}

pub(crate) struct DialledPort<'a> {
    /// The Service as `namespace/name`; `None` if unknown.
    pub(crate) service: Option<&'a str>,
    pub(crate) port: (u16, Proto),
    pub(crate) family: &'static str,
}

impl Outside {
    /// Returns the state of a machine outside the cluster; `None` on a node.
    pub(crate) fn of(status: &Status) -> Option<Self> {
        (status.mode == Mode::Host.to_string()).then(|| Self {
            unreachable: status.unreachable.clone(),
            cut_off: status
                .cut_off
                .iter()
                .map(|one| one.service.clone())
                .collect(),
            has_tunnel: status.tunnel.is_some(),
            pod_routes: status.options.pod_routes.clone().unwrap_or_default(),
        })
    }

    /// Returns the explanation and the remedies for the machine's owner, who may not know pods and
    /// probes. `None` if the explanation for a node applies.
    pub(crate) fn seen(
        &self,
        reason: Reason,
        dialled: &DialledPort<'_>,
    ) -> Option<(String, Vec<String>)> {
        let name = dialled.service.unwrap_or(ANY_SERVICE);
        let backends = format!("kpx backends {name} shows the endpoints.");
        match reason {
            Reason::NoEndpoints => {
                let left_out = self.left_out(dialled);
                Some(match left_out.first() {
                    Some(first) => (self.out_of_reach(dialled, &left_out, first), self.ways(backends, dialled, first)),
                    None => (none_serves(dialled), vec![backends, is_down(dialled), NONE_IS_LOCAL.to_owned()]),
                })
            }
            Reason::NoLocalEndpoints => Some((
                "traffic policy Local serves clients on nodes with an endpoint only, and this machine is not a node".to_owned(),
                vec![backends],
            )),
            _ => None,
        }
    }

    /// Returns the unreachable backends of the port and family.
    fn left_out(&self, dialled: &DialledPort<'_>) -> Vec<&UnreachableStatus> {
        let port = dialled.port();
        let is_v6 = dialled.family == "IPv6";
        let is_one = |one: &&UnreachableStatus| {
            Some(one.service.as_str()) == dialled.service
                && one.port == port
                && one.backend.is_ipv6() == is_v6
        };
        self.unreachable.iter().filter(is_one).collect()
    }

    fn out_of_reach(
        &self,
        dialled: &DialledPort<'_>,
        all: &[&UnreachableStatus],
        first: &UnreachableStatus,
    ) -> String {
        let backends: BTreeSet<IpAddr> = all.iter().map(|one| one.backend.ip()).collect();
        let rest = match dialled
            .service
            .is_some_and(|service| self.cut_off.contains(service))
        {
            true => "",
            false => "; another port or family of the Service is within reach",
        };
        format!(
            "port {} has endpoints over {}, but this machine reaches none of {}, first {}: {}{rest}",
            dialled.port(),
            dialled.family,
            backends.len(),
            first.backend,
            first.why
        )
    }

    /// Returns remedies for an unreachable port, after a line that shows its endpoints.
    fn ways(
        &self,
        backends: String,
        dialled: &DialledPort<'_>,
        first: &UnreachableStatus,
    ) -> Vec<String> {
        let mut ways = vec![backends];
        ways.extend(self.steps(&dialled.protocol(), &first.why));
        ways
    }

    /// Returns the remedies that this machine does not use yet for a port of this protocol.
    fn steps(&self, protocol: &str, why: &str) -> Vec<String> {
        let mut ways = Vec::new();
        match (self.has_tunnel, protocol == "TCP") {
            (false, true) => ways
                .push("kpx run --tunnel tcp forwards TCP to endpoints that are pods, through the API server.".to_owned()),
            (true, true) => {
                ways.push("--tunnel tcp reaches pods only: these endpoints are not pods.".to_owned())
            }
            (true, false) => ways.push(format!("--tunnel tcp does not forward {protocol}.")),
            (false, false) => {}
        }
        if why.contains("only the default route") {
            ways.push(
                "If the default gateway routes to pods, use --pod-routes default.".to_owned(),
            );
        }
        ways.push(match self.pod_routes.as_str() {
            "nodes" => "--pod-routes nodes is on, and makes routes to nodes with podCIDRs on this machine's own segment alone.",
            _ => "If nodes on this machine's segment route their podCIDRs, --pod-routes nodes adds routes to pods.",
        }.to_owned());
        ways.push(
            match why.contains("no node port") {
                true => "Or give the machine a route to the pods, or the Service a node port (docs/host-mode.md).",
                false => {
                    "Or give the machine a route to the pods, or to a ready node for the node port (docs/host-mode.md)."
                }
            }
            .to_owned(),
        );
        ways
    }
}

/// Returns the remedies for all unreachable Services and ports, without duplicates, TCP's remedies
/// first; empty on a node.
pub fn steps_to_reach(status: &Status) -> Vec<String> {
    let Some(outside) = Outside::of(status) else {
        return Vec::new();
    };
    let is_cut_off = |one: &&UnreachableStatus| {
        let family = if one.backend.is_ipv6() {
            "IPv6"
        } else {
            "IPv4"
        };
        let is_port = |port: &CutOffPortStatus| {
            (&port.service, &port.port, port.family.as_str()) == (&one.service, &one.port, family)
        };
        outside.cut_off.contains(&one.service) || status.cut_off_ports.iter().any(is_port)
    };
    let mut protocols: Vec<_> = status
        .unreachable
        .iter()
        .filter(is_cut_off)
        .filter_map(|one| Some((one.port.split_once('/')?.1.to_uppercase(), &one.why)))
        .collect();
    protocols.sort_by_key(|(protocol, _)| protocol != "TCP");
    let mut steps = Vec::new();
    for (protocol, why) in protocols {
        for step in outside.steps(&protocol, why) {
            if !steps.contains(&step) {
                steps.push(step);
            }
        }
    }
    steps
}

impl DialledPort<'_> {
    /// Returns number and protocol in the status's notation: `80/tcp`.
    fn port(&self) -> String {
        format!("{}/{}", self.port.0, self.port.1)
    }

    fn protocol(&self) -> String {
        self.port.1.to_string().to_uppercase()
    }
}

const NONE_IS_LOCAL: &str = "If an endpoint is ready, the internalTrafficPolicy is Local, which excludes machines outside the cluster.";

fn none_serves(dialled: &DialledPort<'_>) -> String {
    format!(
        "port {} has no endpoint that serves over {}",
        dialled.port(),
        dialled.family
    )
}

fn is_down(dialled: &DialledPort<'_>) -> String {
    let port = dialled.port();
    let family = dialled.family;
    format!("If none is ready over {family}, port {port} is down there for the whole cluster.")
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_NODE_PORT: &str = "only the default route, and the Service has no node port";

    fn outside(cut_off: &[&str], unreachable: &[(&str, &str)]) -> Outside {
        let unreachable = unreachable.iter().map(|(port, backend)| UnreachableStatus {
            service: "shop/web".to_owned(),
            port: (*port).to_owned(),
            backend: backend.parse().unwrap(),
            why: NO_NODE_PORT.to_owned(),
        });
        let cut_off = cut_off.iter().map(|name| (*name).to_owned()).collect();
        Outside {
            unreachable: unreachable.collect(),
            cut_off,
            has_tunnel: false,
            pod_routes: "off".to_owned(),
        }
    }

    fn seen(outside: &Outside, port: (u16, Proto), family: &'static str) -> (String, String) {
        let dialled = DialledPort {
            service: Some("shop/web"),
            port,
            family,
        };
        let (explanation, remedy) = outside.seen(Reason::NoEndpoints, &dialled).unwrap();
        assert!(
            remedy
                .iter()
                .all(|step| step.ends_with('.') && step.len() < 110),
            "{remedy:?}"
        );
        (explanation, remedy.join(" "))
    }

    #[test]
    fn port_out_of_reach_of_this_machine_is_not_called_down() {
        let part = outside(
            &[],
            &[
                ("53/udp", "10.244.1.3:53"),
                ("53/udp", "10.244.1.4:53"),
                ("80/tcp", "[fd00::3]:80"),
            ],
        );
        let (explanation, remedy) = seen(&part, (53, Proto::UDP), "IPv4");
        let expected = format!(
            "port 53/udp has endpoints over IPv4, but this machine reaches none of 2, first 10.244.1.3:53: {NO_NODE_PORT}; \
             another port or family of the Service is within reach"
        );
        assert_eq!(explanation, expected);
        assert!(
            !remedy.contains("whole cluster") && remedy.contains("docs/host-mode.md"),
            "{remedy}"
        );
        let (explanation, remedy) = seen(&part, (80, Proto::TCP), "IPv6");
        assert!(
            explanation.contains("none of 1, first [fd00::3]:80")
                && !remedy.contains("whole cluster"),
            "{explanation}"
        );
        let (explanation, remedy) = seen(&part, (80, Proto::TCP), "IPv4");
        assert_eq!(
            explanation,
            "port 80/tcp has no endpoint that serves over IPv4"
        );
        assert!(
            remedy.contains("port 80/tcp is down there for the whole cluster."),
            "{remedy}"
        );
        let (explanation, _) = seen(
            &outside(&["shop/web"], &[("80/tcp", "10.244.1.3:80")]),
            (80, Proto::TCP),
            "IPv4",
        );
        assert!(!explanation.contains("another port"), "{explanation}");
    }

    #[test]
    fn advice_names_the_ways_that_would_help() {
        let off = outside(
            &[],
            &[("80/tcp", "10.244.1.3:80"), ("53/udp", "10.244.1.3:53")],
        );
        let (_, tcp) = seen(&off, (80, Proto::TCP), "IPv4");
        for way in [
            "--tunnel tcp forwards TCP",
            "--pod-routes default",
            "--pod-routes nodes adds",
            "a node port",
        ] {
            assert!(tcp.contains(way), "{way}: {tcp}");
        }
        let (_, udp) = seen(&off, (53, Proto::UDP), "IPv4");
        assert!(
            !udp.contains("--tunnel") && udp.contains("--pod-routes nodes adds"),
            "{udp}"
        );
        let on = Outside {
            has_tunnel: true,
            pod_routes: "nodes".to_owned(),
            ..off
        };
        let (_, tcp) = seen(&on, (80, Proto::TCP), "IPv4");
        assert!(tcp.contains("--tunnel tcp reaches pods only"), "{tcp}");
        assert!(tcp.contains("--pod-routes nodes is on"), "{tcp}");
        let (_, udp) = seen(&on, (53, Proto::UDP), "IPv4");
        assert!(udp.contains("--tunnel tcp does not forward UDP."), "{udp}");
    }
}
