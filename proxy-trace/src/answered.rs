//! Looks at the connections that backends have had, where kpx forwards a packet: the cause of a failure is then behind kpx.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use anyhow::{Context, Result};
use ipnet::IpNet;
use proxy_net::netfilter::Netfilter;
use proxy_view::FlowView;
use proxy_view::client::Client;

use crate::report::{Outcome, Trace, Verdict};

/// The flows that are read at most: a large table is looked at in part.
const MOST: usize = 100_000;
/// The backends that a trace speaks of.
const SHOWN: usize = 3;
/// The words for rules that may keep a packet.
const DROPS: [&str; 4] = ["drop", "reject", "hand the packet", "-legacy"];
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

/// Returns notes about backends to which no connection succeeds. Only TCP says of each connection whether it was answered.
pub(crate) async fn notes(client: &Client, trace: &Trace) -> Vec<String> {
    if trace.outcome.verdict != Verdict::Forward || trace.packet.protocol != "tcp" {
        return Vec::new();
    }
    let Ok(ends) = ends(client, &trace.outcome).await else { return Vec::new() };
    let mut notes = Vec::new();
    for (backend, ends) in ends.into_iter().filter(|(_, ends)| ends.answered == 0).take(SHOWN) {
        if ends.reset > 0 {
            notes.push(format!(
                "of the connections to {backend}, {} were reset and none was answered: no process listens there (compare the Service's \
                 targetPort), or a filter refuses",
                ends.reset
            ));
        } else if ends.silent > 0 {
            let why = silence(trace, backend).await;
            notes.push(format!(
                "of the connections to {backend}, {} have no answer yet and none was answered: {why}",
                ends.silent
            ));
        }
    }
    notes
}

/// Counts the connections to each backend of the set, by the flow table.
async fn ends(client: &Client, outcome: &Outcome) -> Result<BTreeMap<SocketAddr, Ends>> {
    let set = outcome.set.iter().flat_map(|set| &set.backends).chain(&outcome.backend);
    let backends: BTreeSet<SocketAddr> = set.filter_map(|backend| backend.at.parse().ok()).collect();
    let path = match &backends.iter().collect::<Vec<_>>()[..] {
        [only] => format!("/flows?backend={}", only.ip()),
        _ => "/flows".to_owned(),
    };
    let mut ends: BTreeMap<SocketAddr, Ends> = BTreeMap::new();
    let mut lines = client.lines(&path).await?;
    let mut read = 0;
    while let Some(line) = lines.next().await? {
        let flow: FlowView = serde_json::from_slice(&line).context("the running kpx is of another version")?;
        if flow.protocol == "TCP" && backends.contains(&flow.backend) {
            ends.entry(flow.backend).or_default().count(&flow.state, flow.idle_secs);
        }
        read += 1;
        if read == MOST {
            break;
        }
    }
    Ok(ends)
}

/// Says why a backend may be silent: the first rules of this node that may drop such packets, or else that there are none.
async fn silence(trace: &Trace, backend: SocketAddr) -> String {
    let source = trace.outcome.source.as_ref().and_then(|source| source.at.parse::<SocketAddr>().ok());
    let ends: Vec<IpNet> = source.iter().map(SocketAddr::ip).chain([backend.ip()]).map(IpNet::from).collect();
    let drops = match Netfilter::read().await {
        Ok(rules) => rules.judge_whole(&ends, &BTreeSet::new(), false).against,
        Err(error) => {
            return format!(
                "the rules of netfilter cannot be read ({error:#}); look for one that drops, and at the backend"
            );
        }
    };
    let is_hit = |line: &String| DROPS.iter().any(|word| line.contains(word));
    let drops: Vec<_> = drops.into_iter().filter(is_hit).take(SHOWN).collect();
    match drops.is_empty() {
        true => {
            "the backend or its node is down, or something behind this node drops them; no rule of netfilter here does"
                .to_owned()
        }
        false => drops.join("; "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_counts_as_silent_when_its_client_has_waited() {
        let mut ends = Ends::default();
        for (state, idle) in [("new", 0), ("new", 2), ("reset", 0), ("established", 5), ("answered", 0), ("closed", 9)]
        {
            ends.count(state, idle);
        }
        assert_eq!(ends, Ends { answered: 3, reset: 1, silent: 1 });
    }
}
