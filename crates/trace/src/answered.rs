//! Checks the recent connections of the backends to which kpx forwards a packet. If they fail, the
//! cause is outside kpx.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::{Context, Result};
use ipnet::IpNet;
use proxy_common::addr::Proto;
use proxy_common::connect::Connects;
use proxy_common::counter::Reason;
use proxy_net::netfilter::Netfilter;
use proxy_view::client::Client;
use proxy_view::status::{TunnelStatus, UnheardStatus};
use proxy_view::{FlowView, Mode, age};

use crate::input::{Family, Notes};
use crate::live::Live;
use crate::report::{Outcome, Trace, Verdict};

/// The maximum number of flows read from a large table.
const MOST: usize = 100_000;
/// The maximum number of backends in the notes.
const SHOWN: usize = 3;
/// Words in a rule's description that mark it as a possible drop.
const DROPS: [&str; 3] = ["drop", "reject", "hand the packet"];
/// The end of the description of a table whose rules are not read.
const UNREAD: &str = "-legacy";
/// The seconds after which a client retransmits its first packet.
const PATIENCE: u32 = 1;

/// The maximum age in seconds of a counted failure that still matters.
const RECENT_SECS: u32 = 600;
/// The maximum age of a UDP failure in seconds. Answered flows stay in the table for longer, and
/// contradict old failures.
const UDP_RECENT_SECS: u32 = 120;
/// The maximum difference in seconds between the clocks of a flow and of a count.
const SLACK_SECS: u32 = 2;

/// The outcomes of the flows to a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ends {
    answered: usize,
    reset: usize,
    silent: usize,
    /// The seconds since the last packet of an answered client; `silent_secs` is for unanswered
    /// clients.
    answered_secs: Option<u32>,
    silent_secs: Option<u32>,
}

/// The failures of a backend in the programs' counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counted {
    refused: u64,
    /// The TCP failures since the backend's last answer.
    failures: u32,
    /// True if all failures were refusals.
    is_refusal: bool,
    age_secs: u32,
}

impl Ends {
    fn count(&mut self, state: &str, idle_secs: u32) {
        let youngest = |last: Option<u32>| Some(last.map_or(idle_secs, |last| last.min(idle_secs)));
        match state {
            "reset" => self.reset += 1,
            "new" if idle_secs >= PATIENCE => {
                self.silent += 1;
                self.silent_secs = youngest(self.silent_secs);
            }
            "new" => {}
            _ => {
                self.answered += 1;
                self.answered_secs = youngest(self.answered_secs);
            }
        }
    }

    /// Returns true if a flow was answered in the last `secs` seconds.
    fn is_answered_since(&self, secs: u32) -> bool {
        self.answered_secs.is_some_and(|answered| answered <= secs)
    }
}

impl Counted {
    fn of((connects, age_secs): &(Connects, u32)) -> Self {
        Self {
            refused: connects.refused,
            failures: connects.votes.failures(),
            is_refusal: connects.refused > 0
                && connects.unanswered == 0
                && connects.retransmitted == 0,
            age_secs: *age_secs,
        }
    }
}

/// The failure of a backend's flows, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Failure {
    Refused(String),
    Silent(String),
}

/// Returns the failure of TCP connections, from the flow table or else from the programs' counts.
fn of_connections(backend: SocketAddr, ends: &Ends, counted: Option<Counted>) -> Option<Failure> {
    if ends.answered > 0 {
        return None;
    }
    if ends.reset > 0 {
        return Some(Failure::Refused(format!(
            "of the connections to {backend}, {} were reset and none was answered",
            ends.reset
        )));
    }
    if ends.silent > 0 {
        return Some(Failure::Silent(format!(
            "of the connections to {backend}, {} have no answer yet and none was answered",
            ends.silent
        )));
    }
    let counted =
        counted.filter(|counted| counted.failures > 0 && counted.age_secs <= RECENT_SECS)?;
    let number = counted.failures;
    let latest = format!("the latest {} ago", age::span(counted.age_secs.into()));
    Some(match counted.is_refusal {
        true => Failure::Refused(format!(
            "{number} connection{} to {backend} {} reset since its last answer, {latest}",
            if number == 1 { "" } else { "s" },
            if number == 1 { "was" } else { "were" },
        )),
        false => Failure::Silent(format!(
            "connections to {backend} have failed since its last answer, {latest}"
        )),
    })
}

/// Returns the failure of UDP flows. Unanswered flows count unless a later flow was answered.
fn of_datagrams(backend: SocketAddr, ends: &Ends, counted: Option<Counted>) -> Option<Failure> {
    let silent = ends
        .silent_secs
        .filter(|secs| !ends.is_answered_since(*secs));
    let is_now = |counted: &Counted| {
        counted.refused > 0
            && counted.age_secs <= UDP_RECENT_SECS
            && !ends.is_answered_since(counted.age_secs)
            && silent.is_none_or(|secs| counted.age_secs <= secs + SLACK_SECS)
    };
    let unanswered = format!(
        "{} of {} UDP flows to {backend} are unanswered",
        ends.silent,
        ends.silent + ends.answered
    );
    match (counted.filter(is_now), silent) {
        (Some(counted), silent) => {
            let refused = format!(
                "{} datagrams were refused (ICMP port unreachable), the latest {} ago",
                counted.refused,
                age::span(counted.age_secs.into())
            );
            Some(Failure::Refused(match silent {
                Some(_) => format!("{unanswered}, and {refused}"),
                None => format!("{backend}: {refused}"),
            }))
        }
        (None, Some(_)) => Some(Failure::Silent(unanswered)),
        (None, None) => None,
    }
}

/// Returns notes about backends whose flows fail.
pub(crate) async fn notes<A: Family>(live: &Live, trace: &Trace) -> Notes {
    let (proto, of_backend): (_, fn(_, &_, _) -> _) = match trace.packet.protocol.as_str() {
        "tcp" => (Proto::TCP, of_connections),
        "udp" => (Proto::UDP, of_datagrams),
        _ => return Notes::default(),
    };
    if trace.outcome.verdict != Verdict::Forward {
        return Notes::default();
    }
    // The tunnel's notes do not need the flow table.
    let mut ends = ends(&live.client, &trace.outcome, proto)
        .await
        .unwrap_or_default();
    let mut notes = Notes::default();
    if let Some(tunnel) = &live.status.tunnel {
        // The tunnel's socket on this host answers for all pods, so notes about backends do not
        // apply.
        let is_start = |backend: &SocketAddr, _: &mut Ends| tunnel.addresses.contains(backend);
        let through = trace
            .outcome
            .backend
            .as_ref()
            .and_then(|backend| backend.at.parse().ok());
        let of_tunnel: Vec<_> = ends.extract_if(.., is_start).collect();
        if let Some(start) = through.filter(|start| tunnel.addresses.contains(start)) {
            let ends = of_tunnel
                .iter()
                .find(|(backend, _)| *backend == start)
                .map(|(_, ends)| *ends)
                .unwrap_or_default();
            let service = full_name(&trace.outcome);
            let way = through_tunnel(start, live.status.unheard.as_ref());
            match tunnel_failure(service.as_deref(), ends, tunnel) {
                Some(failure) => notes.warn([format!("{way}; {failure}")]),
                None => notes.all.push(way),
            }
        }
    }
    let counted = |backend| {
        let service = trace.outcome.service.as_ref()?;
        let connects = live.connects::<A>(&service.key, backend)?;
        Some(Counted::of(&connects))
    };
    let failures = ends.into_iter().filter_map(|(backend, ends)| {
        Some((backend, of_backend(backend, &ends, counted(backend))?))
    });
    for (backend, failure) in failures.take(SHOWN) {
        notes.warn([match failure {
            Failure::Refused(what) if is_node_port(live, trace, backend).await => {
                format!("{what}: the node's service proxy refuses its node port")
            }
            Failure::Refused(what) => format!(
                "{what}: no process listens there (compare the Service's targetPort), or a filter refuses"
            ),
            Failure::Silent(what) => {
                let why = silence(trace, backend, proto).await;
                let own = own_drops(&live.status.reasons);
                format!("{what}: {why}{own}")
            }
        }]);
    }
    notes
}

/// Returns true if a machine outside the cluster reaches this backend by a node port.
async fn is_node_port(live: &Live, trace: &Trace, backend: SocketAddr) -> bool {
    if live.status.mode != Mode::Host.to_string() {
        return false;
    }
    let services = live.client.services().await.unwrap_or_default();
    let name = full_name(&trace.outcome);
    services
        .iter()
        .filter(|service| Some(format!("{}/{}", service.namespace, service.name)) == name)
        .flat_map(|service| &service.ports)
        .any(|port| port.node_port == Some(backend.port()))
}

/// Counts the outcomes in the flow table for each backend of the set.
async fn ends(
    client: &Client,
    outcome: &Outcome,
    proto: Proto,
) -> Result<BTreeMap<SocketAddr, Ends>> {
    let set = outcome
        .set
        .iter()
        .flat_map(|set| &set.backends)
        .chain(&outcome.backend);
    let mut ends: BTreeMap<SocketAddr, Ends> = set
        .filter_map(|backend| Some((backend.at.parse().ok()?, Ends::default())))
        .collect();
    let path = match &ends.keys().collect::<Vec<_>>()[..] {
        [only] => format!("/flows?backend={}", only.ip()),
        _ => "/flows".to_owned(),
    };
    let protocol = proto.to_string().to_uppercase();
    let mut lines = client.lines(&path).await?;
    let mut read = 0;
    while let Some(line) = lines.next().await? {
        let flow: FlowView =
            serde_json::from_slice(&line).context("the running kpx has another version")?;
        if let Some(ends) = ends
            .get_mut(&flow.backend)
            .filter(|_| flow.protocol == protocol)
        {
            ends.count(&flow.state, flow.idle_secs);
        }
        read += 1;
        if read == MOST {
            break;
        }
    }
    Ok(ends)
}

/// Returns possible causes of an unresponsive backend: the first rules of this node that may drop
/// such packets, or a text that there are none.
async fn silence(trace: &Trace, backend: SocketAddr, proto: Proto) -> String {
    let source = trace
        .outcome
        .source
        .as_ref()
        .and_then(|source| source.at.parse::<SocketAddr>().ok());
    let ends: Vec<IpNet> = source
        .iter()
        .map(SocketAddr::ip)
        .chain([backend.ip()])
        .map(IpNet::from)
        .collect();
    let drops = match Netfilter::read().await {
        Ok(rules) => rules.judge_flows(&ends, proto.0).against,
        Err(error) => {
            return format!(
                "netfilter's rules cannot be read ({error:#}); look for a rule that drops, and check the backend"
            );
        }
    };
    let why = suspects(&drops);
    match proto {
        Proto::UDP if drops.is_empty() => {
            format!("{why}; a protocol without replies looks the same")
        }
        _ => why,
    }
}

/// Returns a text about the rules that may explain an unresponsive backend.
fn suspects(lines: &[String]) -> String {
    let hits = suspicious(lines);
    match hits.is_empty() {
        true => {
            "the backend or its node is down, or something behind this node drops them; no rule of netfilter here does"
                .to_owned()
        }
        false => hits.join("; "),
    }
}

/// Returns the first rules of a judgement that may drop a packet.
pub(crate) fn suspicious(lines: &[String]) -> Vec<String> {
    let is_hit =
        |line: &&String| DROPS.iter().any(|word| line.contains(word)) || line.ends_with(UNREAD);
    let sentence = |line: &String| match line.ends_with(UNREAD) {
        true => format!("{line} may drop the packet, and kpx does not read its rules"),
        false => line.clone(),
    };
    let hits = lines.iter().filter(is_hit).take(SHOWN);
    hits.map(sentence).collect()
}

/// Returns a text about packets that kpx dropped as spoofed: answers may be among them, and a trace
/// covers only the client's packet.
fn own_drops(reasons: &BTreeMap<String, u64>) -> String {
    match reasons.get(Reason::Spoofed.name()) {
        None | Some(0) => String::new(),
        Some(count) => format!(
            "; kpx has dropped {count} packets on this node because they came in where their senders are not, or were resets that the backend ignores, and answers may be among them \
             (kpx monitor --reason {})",
            Reason::Spoofed.name()
        ),
    }
}

fn full_name(outcome: &Outcome) -> Option<String> {
    let service = outcome.service.as_ref()?;
    Some(format!(
        "{}/{}",
        service.namespace.as_ref()?,
        service.name.as_ref()?
    ))
}

/// Returns a note that the connection uses the tunnel at `start`.
fn through_tunnel(start: SocketAddr, unheard: Option<&UnheardStatus>) -> String {
    let away = unheard
        .map(|unheard| format!(", which has been silent for {}", age::since(unheard.since)))
        .unwrap_or_default();
    format!(
        "{start} is kpx's tunnel, which forwards the connection to a pod through the API server{away}"
    )
}

/// Returns the failure of the tunnel's connections to a Service, with the likely causes.
fn tunnel_failure(service: Option<&str>, ends: Ends, tunnel: &TunnelStatus) -> Option<String> {
    let failure = tunnel
        .failure
        .as_ref()
        .filter(|failure| failure.service.is_none() || failure.service.as_deref() == service);
    let failed = match failure {
        Some(failure) => format!(
            "the last failure was {} ago: {}",
            age::since(failure.at),
            failure.why
        ),
        None if ends.reset > 0 && ends.answered == 0 => format!(
            "{} connections were reset there and none was answered",
            ends.reset
        ),
        None => return None,
    };
    Some(format!("{failed}. {TUNNEL_CAUSES}"))
}

const TUNNEL_CAUSES: &str = "Likely causes: no right to get and create pods/portforward, no process that listens on localhost in the pod, or an \
                             API server or kubelet that is away (kpx status, line Tunnel)";

#[cfg(test)]
mod tests {
    use proxy_view::status::TunnelFailure;
    use serde_json::json;

    use super::*;

    #[test]
    fn connection_counts_as_silent_when_its_client_has_waited() {
        let mut ends = Ends::default();
        for (state, idle) in [
            ("new", 0),
            ("new", 2),
            ("reset", 0),
            ("established", 5),
            ("answered", 0),
            ("closed", 9),
        ] {
            ends.count(state, idle);
        }
        assert_eq!(
            ends,
            Ends {
                answered: 3,
                reset: 1,
                silent: 1,
                answered_secs: Some(0),
                silent_secs: Some(2),
            }
        );
    }

    fn counted(refused: u64, failures: u32, age_secs: u32) -> Option<Counted> {
        Some(Counted {
            refused,
            failures,
            is_refusal: refused > 0,
            age_secs,
        })
    }

    fn text(failure: Option<Failure>) -> String {
        match failure {
            None => "none".to_owned(),
            Some(Failure::Refused(what)) => format!("refused: {what}"),
            Some(Failure::Silent(what)) => format!("silent: {what}"),
        }
    }

    #[test]
    fn connections_that_left_the_table_count_by_the_programs() {
        let at: SocketAddr = "10.244.1.3:8080".parse().unwrap();
        let of = |ends: Ends, counted| text(of_connections(at, &ends, counted));
        let none = Ends::default();
        assert_eq!(
            of(none, counted(2, 2, 45)),
            "refused: 2 connections to 10.244.1.3:8080 were reset since its last answer, the latest 45s ago"
        );
        assert_eq!(
            of(none, counted(0, 3, 45)),
            "silent: connections to 10.244.1.3:8080 have failed since its last answer, the latest 45s ago"
        );
        assert_eq!(of(none, counted(2, 0, 45)), "none", "answered since");
        assert_eq!(of(none, counted(2, 2, RECENT_SECS + 1)), "none");
        let mut answered = none;
        answered.count("established", 9);
        assert_eq!(of(answered, counted(2, 2, 45)), "none");
    }

    #[test]
    fn datagrams_fail_where_no_later_flow_is_answered() {
        let at: SocketAddr = "10.244.1.3:53".parse().unwrap();
        let of = |flows: &[(&str, u32)], counted| {
            let mut ends = Ends::default();
            flows
                .iter()
                .for_each(|(state, idle)| ends.count(state, *idle));
            text(of_datagrams(at, &ends, counted))
        };
        assert_eq!(
            of(&[("new", 5), ("established", 60)], None),
            "silent: 1 of 2 UDP flows to 10.244.1.3:53 are unanswered"
        );
        assert_eq!(of(&[("new", 5), ("established", 3)], None), "none");
        assert_eq!(
            of(&[("new", 5)], counted(3, 0, 5)),
            "refused: 1 of 1 UDP flows to 10.244.1.3:53 are unanswered, and 3 datagrams were refused (ICMP port unreachable), the latest 5s ago"
        );
        assert_eq!(
            of(&[], counted(3, 0, 50)),
            "refused: 10.244.1.3:53: 3 datagrams were refused (ICMP port unreachable), the latest 50s ago"
        );
        assert_eq!(
            of(&[("new", 5)], counted(3, 0, 90)),
            "silent: 1 of 1 UDP flows to 10.244.1.3:53 are unanswered",
            "refused before, and silent now"
        );
        assert_eq!(of(&[("answered", 9)], counted(3, 0, 50)), "none");
        assert_eq!(of(&[], counted(3, 0, UDP_RECENT_SECS + 1)), "none");
    }

    #[test]
    fn silence_is_explained_by_whole_sentences() {
        let lines = [
            "rule 1 of chain early of table inet pods may drop the packet",
            "rule 2 of chain early of table inet pods may change the packet",
            "table filter of iptables-legacy",
        ];
        let reported = suspects(&lines.map(str::to_owned));
        let expected = "rule 1 of chain early of table inet pods may drop the packet; table filter of iptables-legacy may drop the packet, and \
                        kpx does not read its rules";
        assert_eq!(reported, expected);
        assert!(suspects(&[]).starts_with("the backend or its node is down, or "));
    }

    #[test]
    fn silence_may_be_of_kpx_own_making() {
        let of = |count| {
            own_drops(&BTreeMap::from([
                ("spoofed".to_owned(), count),
                ("no_flow".to_owned(), 5),
            ]))
        };
        assert_eq!(of(0), "");
        assert!(
            of(9).starts_with("; kpx has dropped 9 packets")
                && of(9).ends_with("(kpx monitor --reason spoofed)")
        );
        assert_eq!(own_drops(&BTreeMap::new()), "");
    }

    #[test]
    fn failure_of_the_tunnel_names_the_tunnel_and_no_target_port() {
        let well = Ends {
            answered: 1,
            ..Ends::default()
        };
        let reset = Ends {
            reset: 3,
            ..Ends::default()
        };
        let failed = |ends, failure: Option<&TunnelFailure>| {
            let tunnel = TunnelStatus {
                failure: failure.cloned(),
                ..TunnelStatus::default()
            };
            tunnel_failure(Some("shop/web"), ends, &tunnel)
        };
        assert_eq!(failed(well, None), None);
        let text = failed(reset, None).unwrap();
        assert!(
            text.starts_with("3 connections were reset there and none was answered. "),
            "{text}"
        );
        for cause in [
            "pods/portforward",
            "listens on localhost in the pod",
            "API server or kubelet that is away",
        ] {
            assert!(
                text.contains(cause) && !text.contains("targetPort"),
                "{text}"
            );
        }
        let then = "2026-01-01T00:00:00Z";
        let failure = |service: &str| -> TunnelFailure {
            serde_json::from_value(
                json!({"service": service, "why": "pod shop/web-0: 403", "at": then}),
            )
            .unwrap()
        };
        let text = failed(well, Some(&failure("shop/web"))).unwrap();
        assert!(
            text.starts_with("the last failure was ")
                && text.contains(" ago: pod shop/web-0: 403. Likely causes: "),
            "{text}"
        );
        assert_eq!(failed(well, Some(&failure("shop/other"))), None);
        let unheard: UnheardStatus =
            serde_json::from_value(json!({"since": then, "kinds": ["Service"]})).unwrap();
        let start = "192.0.0.8:4000".parse().unwrap();
        let way = "192.0.0.8:4000 is kpx's tunnel, which forwards the connection to a pod through the API server";
        assert_eq!(through_tunnel(start, None), way);
        assert!(
            through_tunnel(start, Some(&unheard))
                .starts_with(&format!("{way}, which has been silent for "))
        );
    }
}
