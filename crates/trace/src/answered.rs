//! Looks at the connections that backends have had, where kpx forwards a packet: the cause of a
//! failure is then behind kpx.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use anyhow::{Context, Result};
use ipnet::IpNet;
use proxy_common::counter::Reason;
use proxy_net::netfilter::Netfilter;
use proxy_view::client::Client;
use proxy_view::status::{TunnelStatus, UnheardStatus};
use proxy_view::{FlowView, age};

use crate::live::Live;
use crate::report::{Outcome, Trace, Verdict};

/// The flows that are read at most: a large table is looked at in part.
const MOST: usize = 100_000;
/// The backends that a trace speaks of.
const SHOWN: usize = 3;
/// The words by which a line about a rule shows that the rule may keep a packet from its backend.
const DROPS: [&str; 3] = ["drop", "reject", "hand the packet"];
/// The end of a line about a table whose rules are not read.
const UNREAD: &str = "-legacy";
/// The seconds after which a client that has no answer sends its first packet again.
const PATIENCE: u32 = 1;

/// The ends of the connections to one backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ends {
    answered: usize,
    reset: usize,
    silent: usize,
}

impl Ends {
    fn count(&mut self, state: &str, idle_secs: u32) {
        match state {
            "reset" => self.reset += 1,
            "new" if idle_secs >= PATIENCE => self.silent += 1,
            "new" => {}
            _ => self.answered += 1,
        }
    }
}

/// Returns notes about backends to which no connection succeeds. Only TCP says of each connection
/// whether it was answered.
pub(crate) async fn notes(live: &Live, trace: &Trace) -> Vec<String> {
    if trace.outcome.verdict != Verdict::Forward || trace.packet.protocol != "tcp" {
        return Vec::new();
    }
    // Without the flows there is still the tunnel to tell of.
    let mut ends = ends(&live.client, &trace.outcome).await.unwrap_or_default();
    let mut notes = Vec::new();
    if let Some(tunnel) = &live.status.tunnel {
        // A socket of this host answers there for all pods, so the words for backends do not hold.
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
            notes.push(through_tunnel(
                start,
                service.as_deref(),
                ends,
                tunnel,
                live.status.unheard.as_ref(),
            ));
        }
    }
    for (backend, ends) in ends
        .into_iter()
        .filter(|(_, ends)| ends.answered == 0)
        .take(SHOWN)
    {
        if ends.reset > 0 {
            notes.push(format!(
                "of the connections to {backend}, {} were reset and none was answered: no process listens there (compare the Service's \
                 targetPort), or a filter refuses",
                ends.reset
            ));
        } else if ends.silent > 0 {
            let why = silence(trace, backend).await;
            let own = own_drops(&live.status.reasons);
            notes.push(format!(
                "of the connections to {backend}, {} have no answer yet and none was answered: {why}{own}",
                ends.silent
            ));
        }
    }
    notes
}

/// Counts the connections to each backend of the set, by the flow table.
async fn ends(client: &Client, outcome: &Outcome) -> Result<BTreeMap<SocketAddr, Ends>> {
    let set = outcome
        .set
        .iter()
        .flat_map(|set| &set.backends)
        .chain(&outcome.backend);
    let backends: BTreeSet<SocketAddr> =
        set.filter_map(|backend| backend.at.parse().ok()).collect();
    let path = match &backends.iter().collect::<Vec<_>>()[..] {
        [only] => format!("/flows?backend={}", only.ip()),
        _ => "/flows".to_owned(),
    };
    let mut ends: BTreeMap<SocketAddr, Ends> = BTreeMap::new();
    let mut lines = client.lines(&path).await?;
    let mut read = 0;
    while let Some(line) = lines.next().await? {
        let flow: FlowView =
            serde_json::from_slice(&line).context("the running kpx is of another version")?;
        if flow.protocol == "TCP" && backends.contains(&flow.backend) {
            ends.entry(flow.backend)
                .or_default()
                .count(&flow.state, flow.idle_secs);
        }
        read += 1;
        if read == MOST {
            break;
        }
    }
    Ok(ends)
}

/// Says why a backend may be silent: the first rules of this node that may drop such packets, or
/// else that there are none.
async fn silence(trace: &Trace, backend: SocketAddr) -> String {
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
        Ok(rules) => rules.judge_whole(&ends, &BTreeSet::new(), false).against,
        Err(error) => {
            return format!(
                "netfilter's rules cannot be read ({error:#}); look for a rule that drops, and check the backend"
            );
        }
    };
    suspects(&drops)
}

/// Says which of the lines about rules explain a silence.
fn suspects(lines: &[String]) -> String {
    let is_hit =
        |line: &&String| DROPS.iter().any(|word| line.contains(word)) || line.ends_with(UNREAD);
    let sentence = |line: &String| match line.ends_with(UNREAD) {
        true => format!("{line} may drop the packet, and kpx does not read its rules"),
        false => line.clone(),
    };
    let hits: Vec<_> = lines
        .iter()
        .filter(is_hit)
        .take(SHOWN)
        .map(sentence)
        .collect();
    match hits.is_empty() {
        true => {
            "the backend or its node is down, or something behind this node drops them; no rule of netfilter here does"
                .to_owned()
        }
        false => hits.join("; "),
    }
}

/// Says how many packets kpx itself has dropped on their way, answers perhaps. A trace follows the
/// client's packet alone.
fn own_drops(reasons: &BTreeMap<String, u64>) -> String {
    match reasons.get(Reason::Forged.name()) {
        None | Some(0) => String::new(),
        Some(count) => format!(
            "; kpx has dropped {count} packets on this node because they came in where their senders are not, or were resets that the backend ignores, and answers may be among them \
             (kpx monitor --reason {})",
            Reason::Forged.name()
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

/// Says that a connection goes through the API server, and what may be wrong there if it fails.
fn through_tunnel(
    start: SocketAddr,
    service: Option<&str>,
    ends: Ends,
    tunnel: &TunnelStatus,
    unheard: Option<&UnheardStatus>,
) -> String {
    let away =
        unheard.map(|unheard| format!(", which has been silent for {}", age::since(unheard.since)));
    let server = format!("the API server{}", away.unwrap_or_default());
    let way =
        format!("{start} is kpx's tunnel, which forwards the connection to a pod through {server}");
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
        None if ends.reset > 0 && ends.answered == 0 => {
            format!(
                "{} connections were reset there and none was answered",
                ends.reset
            )
        }
        None => return way,
    };
    format!("{way}; {failed}. {TUNNEL_CAUSES}")
}

/// The likely causes of failures of the tunnel.
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
                silent: 1
            }
        );
    }

    #[test]
    fn silence_is_explained_by_whole_sentences() {
        let lines = [
            "rule 1 of chain early of table inet pods may drop the packet",
            "rule 2 of chain early of table inet pods may change the packet",
            "table filter of iptables-legacy",
        ];
        let told = suspects(&lines.map(str::to_owned));
        let expected = "rule 1 of chain early of table inet pods may drop the packet; table filter of iptables-legacy may drop the packet, and \
                        kpx does not read its rules";
        assert_eq!(told, expected);
        assert!(suspects(&[]).starts_with("the backend or its node is down, or "));
    }

    #[test]
    fn silence_may_be_of_kpx_own_making() {
        let of = |count| {
            own_drops(&BTreeMap::from([
                ("forged".to_owned(), count),
                ("no_flow".to_owned(), 5),
            ]))
        };
        assert_eq!(of(0), "");
        assert!(
            of(9).starts_with("; kpx has dropped 9 packets")
                && of(9).ends_with("(kpx monitor --reason forged)")
        );
        assert_eq!(own_drops(&BTreeMap::new()), "");
    }

    #[test]
    fn failure_of_the_tunnel_names_the_tunnel_and_no_target_port() {
        let start: SocketAddr = "192.0.0.8:4000".parse().unwrap();
        let well = Ends {
            answered: 1,
            ..Ends::default()
        };
        let reset = Ends {
            reset: 3,
            ..Ends::default()
        };
        let told = |ends, failure: Option<&TunnelFailure>, unheard| {
            let tunnel = TunnelStatus {
                failure: failure.cloned(),
                ..TunnelStatus::default()
            };
            through_tunnel(start, Some("shop/web"), ends, &tunnel, unheard)
        };
        let way = "192.0.0.8:4000 is kpx's tunnel, which forwards the connection to a pod through the API server";
        assert_eq!(told(well, None, None), way);
        let text = told(reset, None, None);
        assert!(
            text.starts_with(way)
                && text.contains("; 3 connections were reset there and none was answered. "),
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
        let text = told(well, Some(&failure("shop/web")), None);
        assert!(
            text.contains("; the last failure was ")
                && text.contains(" ago: pod shop/web-0: 403. Likely causes: "),
            "{text}"
        );
        assert_eq!(told(well, Some(&failure("shop/other")), None), way);
        let unheard: UnheardStatus =
            serde_json::from_value(json!({"since": then, "kinds": ["Service"]})).unwrap();
        assert!(
            told(reset, None, Some(&unheard))
                .contains("the API server, which has been silent for ")
        );
    }
}
