//! Prints the packet counts and the verdicts on the packets.

use std::collections::BTreeMap;

use comfy_table::Cell;
use proxy_common::counter::{Event, Reason, Verdict};

use crate::output::{Form, cell, yellow};

/// Lists the counts since the agent started; `explain` returns a reason's text. Only wide output
/// has passed packets, which are mostly not for Services.
pub fn packets(
    events: &BTreeMap<String, u64>,
    reasons: &BTreeMap<String, u64>,
    explain: fn(Reason) -> &'static str,
    form: Form,
) -> String {
    let of = |name| reasons.get(name).copied().unwrap_or_default();
    let events = Event::ALL.into_iter().filter_map(|event| {
        let (fate, meaning) = fate_of_event(event);
        Some((
            event.name(),
            fate,
            events.get(event.name()).copied()?,
            meaning,
        ))
    });
    let reasons = Reason::ALL.into_iter();
    let reasons = reasons.map(|one| {
        (
            one.name(),
            fate(one.verdict()),
            of(one.name()),
            explain(one),
        )
    });
    let reasons = reasons.filter(|(_, fate, ..)| form.wide || *fate != fate_of_passed());
    let rows: Vec<_> = events
        .chain(reasons)
        .filter(|(_, _, count, _)| *count > 0)
        .collect();
    let has_meaning = rows.iter().any(|(.., meaning)| !meaning.is_empty());
    let row = |(name, fate, count, meaning): (&str, &str, u64, &str)| {
        let fate = if fate == "dropped" {
            yellow(fate)
        } else {
            cell(fate)
        };
        let mut row = vec![cell(name), fate, cell(count)];
        row.extend(has_meaning.then(|| Cell::new(meaning)));
        row
    };
    let header = ["PACKETS", "FATE", "COUNT", "BECAUSE"];
    form.sentences(
        &header[..if has_meaning { 4 } else { 3 }],
        rows.into_iter().map(row),
    )
}

/// Returns the verdict on the packet or flow of an event, and the cause if the event's name has
/// none.
const fn fate_of_event(event: Event) -> (&'static str, &'static str) {
    match event {
        Event::FlowOpened
        | Event::Forwarded
        | Event::Returned
        | Event::SocketLed
        | Event::FastLocal
        | Event::FastRemote => ("translated", ""),
        Event::PortMoved => (
            "translated",
            "another program's connection had the tuple of a flow, and got another source port",
        ),
        Event::HandedOver => (
            "handed over",
            "an external client's packet was sent to the node of its backend",
        ),
        Event::EndIgnored => (
            "translated",
            "a FIN or RST with an unexpected number ended no flow",
        ),
        Event::FlowMoved => (
            "flow closed",
            "its backend was removed or is silent, and the client gets another backend",
        ),
        Event::FlowForgotten => (
            "flow closed",
            "it was half-open and was evicted for a new flow",
        ),
        Event::Rejected => (
            fate(Verdict::Reject),
            "the answer was sent; the packet is counted under its reason as well",
        ),
        Event::Unanswered => (
            fate(Verdict::Drop),
            "a reject got no answer: its frame was not for this host, or too many came in a second",
        ),
        Event::PodOutside => (
            "misjudged",
            "a client in this node's podCIDRs was treated as external",
        ),
        Event::BackendFailed => (
            "unanswered",
            "a backend refused a connection, did not answer its SYN, or was unreachable",
        ),
    }
}

const fn fate(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "passed",
        Verdict::Drop => "dropped",
        Verdict::Reject => "rejected",
    }
}

const fn fate_of_passed() -> &'static str {
    fate(Verdict::Pass)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_shows_what_happened_to_its_packet() {
        let events = [
            Event::Forwarded,
            Event::Rejected,
            Event::Unanswered,
            Event::FlowForgotten,
        ];
        let events = events.map(|event| (event.name().to_owned(), 1)).into();
        let reasons = [(Reason::NoEndpoints.name().to_owned(), 2)].into();
        let text = packets(
            &events,
            &reasons,
            Reason::name,
            Form {
                headers: true,
                ..Form::default()
            },
        );
        let fates: Vec<_> = text
            .lines()
            .map(|line| line.split("   ").filter(|cell| !cell.is_empty()))
            .collect();
        let fates: Vec<_> = fates
            .into_iter()
            .map(|cells| cells.take(2).map(str::trim).collect::<Vec<_>>())
            .collect();
        let expected = [
            ["PACKETS", "FATE"],
            ["flow_forgotten", "flow closed"],
            ["forwarded", "translated"],
            ["rejected", "rejected"],
            ["unanswered", "dropped"],
            ["no_endpoints", "rejected"],
        ];
        assert_eq!(fates, expected, "{text}");
    }
}
