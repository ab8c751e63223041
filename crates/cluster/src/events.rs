//! `kubectl kpx events`: the agents' recent Events. Equal Events of several nodes share a row.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use proxy_view::EventView;
use proxy_view::list::Listed;
use proxy_view::object_name::ServiceName;
use proxy_view::output::{Form, OutputArgs, cell, nothing};

use crate::answers::{Answers, ask};
use crate::connect::ConnectArgs;
use crate::pods::Cluster;
use crate::select;
use crate::watch::{WatchArgs, watch};

/// Show recent events and problems of the nodes, newest last.
///
/// Equal Events of several nodes share a row, with the first and the last time and the sum of the
/// counts.
#[derive(Args, Debug)]
pub(crate) struct EventsArgs {
    /// Show only Events of this Service, its EndpointSlices, redirects and health check.
    #[arg(value_name = "[svc/][NAMESPACE/]NAME")]
    service: Option<ServiceName>,
    /// Show only Events of this namespace.
    #[arg(long, value_name = "NAMESPACE")]
    service_namespace: Option<String>,
    #[command(flatten)]
    watch: WatchArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) async fn events(connect: &ConnectArgs, args: &EventsArgs) -> Result<ExitCode> {
    let mut arguments = vec!["events".to_owned()];
    arguments.extend(select::in_namespace(&args.service_namespace));
    let wants = |event: &EventView| {
        args.service
            .as_ref()
            .is_none_or(|service| event.concerns(service))
    };
    if args.watch.watch {
        let wanted = |events: Vec<EventView>| events.into_iter().filter(wants).collect();
        return watch(connect, args.output.kind(), &arguments, wanted).await;
    }
    let cluster = Cluster::find(connect).await?;
    let mut answers: Answers<Vec<EventView>> = ask(&cluster, connect, &arguments).await;
    answers.retain(wants);
    let nothing = nothing("Events", args.service_namespace.as_deref());
    answers.print(&args.output, &nothing, |form| text(&answers, form))
}

pub(crate) fn text(answers: &Answers<Vec<EventView>>, form: Form) -> String {
    let header = [vec!["NODE"], EventView::header(form.wide)].concat();
    let all = answers.answered().count();
    let rows = merged(
        answers
            .answered()
            .map(|(node, events)| (node, events.as_slice())),
    );
    form.narrowed(
        &header,
        EventView::NARROW,
        rows.into_iter().map(|row| row.cells(all, form.wide)),
    )
}

/// An Event, and the nodes that report it.
struct Row<'a> {
    event: EventView,
    nodes: Vec<&'a str>,
}

/// Merges Events that differ only in times and counts. The newest comes last.
fn merged<'a>(answers: impl Iterator<Item = (&'a str, &'a [EventView])>) -> Vec<Row<'a>> {
    let mut rows: BTreeMap<String, Row<'a>> = BTreeMap::new();
    for (node, events) in answers {
        for event in events {
            let row = rows.entry(event.key()).or_insert_with(|| Row {
                event: EventView {
                    count: 0,
                    ..event.clone()
                },
                nodes: Vec::new(),
            });
            let known = &mut row.event;
            known.first_seen = known.first_seen.min(event.first_seen);
            known.last_seen = known.last_seen.max(event.last_seen);
            known.count = known.count.saturating_add(event.count);
            row.nodes.push(node);
        }
    }
    let mut rows: Vec<_> = rows.into_values().collect();
    rows.sort_by_key(|row| row.event.last_seen);
    rows
}

impl Row<'_> {
    fn cells(&self, all: usize, wide: bool) -> Vec<Cell> {
        [cell(select::nodes(&self.nodes, all))]
            .into_iter()
            .chain(self.event.cells(wide))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(name: &str, note: &str, at: [u32; 2]) -> EventView {
        let time = |second: u32| format!("2026-01-02T03:04:{second:02}Z");
        let event = json!({
            "firstSeen": time(at[0]), "lastSeen": time(at[1]), "count": 2, "type": "Warning", "reason": "InvalidField",
            "kind": "Service", "namespace": "shop", "name": name, "note": note,
        });
        serde_json::from_value(event).unwrap()
    }

    #[test]
    fn event_of_several_nodes_is_one_row_and_the_newest_is_last() {
        let one = [
            event("web", "port 0", [1, 30]),
            event("web", "port 1", [2, 40]),
        ];
        let other = [
            event("web", "port 0", [0, 35]),
            event("cart", "port 0", [3, 33]),
        ];
        let rows = merged([("n1", &one[..]), ("n2", &other[..])].into_iter());
        let rows = rows.iter().map(|row| {
            let EventView {
                first_seen,
                last_seen,
                count,
                name,
                note,
                ..
            } = &row.event;
            let nodes = select::nodes(&row.nodes, 2);
            (
                nodes,
                name.as_str(),
                note.as_str(),
                *count,
                [first_seen, last_seen].map(|at| at.as_second() % 60),
            )
        });
        let expected = [
            ("n2".to_owned(), "cart", "port 0", 2, [3, 33]),
            ("all 2".to_owned(), "web", "port 0", 4, [0, 35]),
            ("n1".to_owned(), "web", "port 1", 2, [2, 40]),
        ];
        assert_eq!(rows.collect::<Vec<_>>(), expected);
    }
}
