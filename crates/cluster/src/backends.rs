//! `kubectl kpx backends`: the backends of Services as the nodes see them. Nodes with the same
//! state share a row.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use proxy_view::list::{BackendOrder, BackendRow, Listed};
use proxy_view::output::{Form, Narrow, OutputArgs, cell};
use proxy_view::{ConnectView, ServiceView, latency};
use serde::Serialize;

use crate::answers::{Answers, ask};
use crate::connect::ConnectArgs;
use crate::pods::Cluster;
use crate::select::{self, SelectArgs};
use crate::sum::add_backend;
use crate::watch::{WatchArgs, watch};

/// List the endpoints of Services and which of them take traffic on which nodes. Nodes with the
/// same state share a row.
///
/// NODE is the node that reports, ON the backend's node. FLOWS, FAILED and UDP-ANSWERED are the sums
/// of the nodes, CONNECT-P50 and CONNECT-P99 the times of the connections of all. STATE is `silent` if the
/// backend does not answer that node.
#[derive(Args, Debug)]
pub(crate) struct BackendsArgs {
    #[command(flatten)]
    select: SelectArgs,
    /// The column to sort by.
    #[arg(long, value_enum, default_value_t, value_name = "COLUMN")]
    sort_by: BackendOrder,
    #[command(flatten)]
    watch: WatchArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) async fn backends(connect: &ConnectArgs, args: &BackendsArgs) -> Result<ExitCode> {
    let arguments = args.select.arguments("backends");
    let wants = |row: &BackendRow| args.select.names(&row.namespace, &row.service);
    if args.watch.watch {
        let wanted = |rows: Vec<BackendRow>| {
            let mut rows: Vec<_> = rows
                .into_iter()
                .filter(wants)
                .map(|backend| Watched { backend })
                .collect();
            args.sort_by.sort(&mut rows, |row| &row.backend);
            rows
        };
        return watch(connect, args.output.kind(), &arguments, wanted).await;
    }
    let cluster = Cluster::find(connect).await?;
    let mut answers: Answers<Vec<BackendRow>> = ask(&cluster, connect, &arguments).await;
    answers.retain(wants);
    // If no node has a backend, the named Service has none or does not exist.
    if answers.answered().all(|(_, rows)| rows.is_empty()) && args.select.service.is_some() {
        let services: Answers<Vec<ServiceView>> =
            ask(&cluster, connect, &args.select.arguments("services")).await;
        args.select
            .check(services.answered().flat_map(|(_, services)| services))?;
    }
    let nothing = args.select.nothing("backends");
    answers.print(&args.output, &nothing, |form| {
        text(&answers, args.sort_by, form)
    })
}

/// A backend as one node sees it. In JSON, `node` is the reporting node.
#[derive(Clone, Debug, Serialize)]
struct Watched {
    backend: BackendRow,
}

/// The columns that shrink or are omitted on a narrow terminal.
const NARROW: Narrow<'static> = Narrow {
    optional: &["LOCAL", "ZONE", "SETS", "ON", "FLOWS", "POD"],
    sentence: None,
};

impl Listed for Watched {
    const NARROW: Narrow<'static> = NARROW;

    fn header(wide: bool) -> Vec<&'static str> {
        BackendRow::header(wide)
            .into_iter()
            .map(|column| if column == "NODE" { "ON" } else { column })
            .collect()
    }

    fn cells(&self, wide: bool) -> Vec<Cell> {
        self.backend.cells(wide)
    }

    fn key(&self) -> String {
        self.backend.key()
    }

    fn name(&self) -> String {
        self.backend.name()
    }
}

/// A backend, the nodes that report the same state, and the sums of their counts.
struct Row<'a> {
    backend: BackendRow,
    nodes: Vec<&'a str>,
}

pub(crate) fn text(answers: &Answers<Vec<BackendRow>>, order: BackendOrder, form: Form) -> String {
    let mut header = vec![
        "NODE", "SERVICE", "PORT", "ADDRESS", "POD", "ON", "STATE", "FLOWS",
    ];
    if form.wide {
        header.extend([
            "ZONE",
            "SETS",
            "WEIGHT",
            "CONNECT-P50",
            "CONNECT-P99",
            "FAILED",
            "UDP-ANSWERED",
        ]);
    }
    let all = answers.answered().count();
    let mut rows = merged(
        answers
            .answered()
            .map(|(node, rows)| (node, rows.as_slice())),
        form.wide,
    );
    order.sort(&mut rows, |row| &row.backend);
    form.narrowed(
        &header,
        NARROW,
        rows.into_iter().map(|row| row.cells(all, form.wide)),
    )
}

/// Merges equal backends of several nodes. Sets and weights are compared only if they are shown.
fn merged<'a>(
    answers: impl Iterator<Item = (&'a str, &'a [BackendRow])>,
    wide: bool,
) -> Vec<Row<'a>> {
    let mut rows = BTreeMap::new();
    for (node, backends) in answers {
        for row in backends {
            let BackendRow {
                namespace,
                service,
                port_name,
                protocol,
                port,
                backend,
            } = row;
            let place = (
                namespace,
                service,
                *port,
                port_name,
                protocol,
                backend.address,
            );
            let looks = (&backend.pod, &backend.node, row.state().content());
            let more = wide.then(|| (&backend.zone, row.sets(), backend.weight));
            let known = rows
                .entry((place, looks, more))
                .or_insert_with(|| Row::without_numbers(row));
            add_backend(&mut known.backend.backend, &row.backend);
            known.nodes.push(node);
        }
    }
    rows.into_values().collect()
}

impl Row<'_> {
    fn without_numbers(row: &BackendRow) -> Self {
        let mut backend = row.clone();
        let view = &mut backend.backend;
        (view.flows, view.open_flows) = (0, 0);
        (view.connect, view.udp) = (ConnectView::default(), None);
        Self {
            backend,
            nodes: Vec::new(),
        }
    }

    fn cells(&self, all: usize, wide: bool) -> Vec<Cell> {
        let BackendRow {
            namespace,
            service,
            backend,
            ..
        } = &self.backend;
        let pod = backend.pod.as_deref().unwrap_or_default();
        // A backend's pod is usually in its Service's namespace.
        let pod = pod
            .strip_prefix(namespace.as_str())
            .and_then(|pod| pod.strip_prefix('/'))
            .unwrap_or(pod);
        let mut cells = vec![
            cell(select::nodes(&self.nodes, all)),
            cell(format!("{namespace}/{service}")),
            cell(self.backend.port()),
            cell(backend.address),
            cell(pod),
            cell(backend.node.as_deref().unwrap_or_default()),
            self.backend.state(),
            cell(backend.flows),
        ];
        if wide {
            cells.push(cell(backend.zone.as_deref().unwrap_or_default()));
            cells.extend([cell(self.backend.sets()), self.backend.weight()]);
            cells.extend(
                [backend.connect.connect_p50, backend.connect.connect_p99]
                    .map(|time| cell(latency(time))),
            );
            cells.push(cell(backend.connect.failed));
            cells.push(cell(backend.udp.unwrap_or_default().text()));
        }
        cells
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row(address: &str, is_silent: bool, flows: u64) -> BackendRow {
        let row = json!({
            "namespace": "shop", "service": "web", "portName": "", "protocol": "TCP", "port": 80, "address": address, "pod": "shop/web-1",
            "node": "n1", "zone": null, "ready": true, "serving": true, "terminating": false, "local": true, "inClusterSet": true,
            "inLocalSet": flows > 4, "flows": flows, "silent": is_silent,
        });
        serde_json::from_value(row).unwrap()
    }

    #[test]
    fn nodes_that_see_a_backend_alike_share_a_row() {
        let nodes = [
            [
                row("10.244.1.3:8080", false, 5),
                row("10.244.1.2:8080", false, 1),
            ],
            [
                row("10.244.1.3:8080", false, 2),
                row("10.244.1.2:8080", true, 1),
            ],
        ];
        let texts = |wide| -> Vec<String> {
            let rows = merged(
                ["n1", "n2"]
                    .into_iter()
                    .zip(nodes.iter().map(<[_; 2]>::as_slice)),
                wide,
            );
            let text = |row: Row<'_>| {
                let cells: Vec<_> = row.cells(2, wide).iter().map(Cell::content).collect();
                [
                    cells[0].as_str(),
                    &cells[3],
                    &cells[4],
                    &cells[6],
                    &cells[7],
                ]
                .join(" ")
            };
            rows.into_iter().map(text).collect()
        };
        let silent = [
            "n1 10.244.1.2:8080 web-1 ready 1",
            "n2 10.244.1.2:8080 web-1 silent 1",
        ];
        assert_eq!(
            texts(false),
            [&silent[..], &["all 2 10.244.1.3:8080 web-1 ready 7"]].concat()
        );
        let by_sets = [
            "n2 10.244.1.3:8080 web-1 ready 2",
            "n1 10.244.1.3:8080 web-1 ready 5",
        ];
        assert_eq!(
            texts(true),
            [&silent[..], &by_sets].concat(),
            "their sets differ"
        );
    }

    #[test]
    fn watched_backend_keeps_its_own_node() {
        let data = serde_json::to_value(Watched {
            backend: row("10.244.1.2:8080", false, 0),
        })
        .unwrap();
        assert_eq!(
            (&data["node"], &data["backend"]["node"]),
            (&serde_json::Value::Null, &json!("n1"))
        );
        assert_eq!(Watched::header(false)[5], "ON");
    }
}
