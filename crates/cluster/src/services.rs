//! `kubectl kpx services`: the Services of all nodes in one table. Nodes with the same state share
//! a row.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use proxy_view::ServiceView;
use proxy_view::list::{Listed, port};
use proxy_view::output::{Form, OutputArgs, cell, lines, yellow};

use crate::answers::{Answers, ask};
use crate::connect::ConnectArgs;
use crate::pods::Cluster;
use crate::select::{self, SelectArgs};
use crate::watch::{WatchArgs, watch};

/// List the Services as programmed on each node. Nodes with the same state share a row.
#[derive(Args, Debug)]
pub(crate) struct ServicesArgs {
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    watch: WatchArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) async fn services(connect: &ConnectArgs, args: &ServicesArgs) -> Result<ExitCode> {
    let arguments = args.select.arguments("services");
    let wants = |service: &ServiceView| args.select.names(&service.namespace, &service.name);
    if args.watch.watch {
        let wanted = |services: Vec<ServiceView>| services.into_iter().filter(wants).collect();
        return watch(connect, args.output.kind(), &arguments, wanted).await;
    }
    let cluster = Cluster::find(connect).await?;
    let mut answers: Answers<Vec<ServiceView>> = ask(&cluster, connect, &arguments).await;
    args.select
        .check(answers.answered().flat_map(|(_, services)| services))?;
    answers.retain(wants);
    let nothing = args.select.nothing("Services");
    answers.print(&args.output, &nothing, |form| text(&answers, form))
}

/// The printed fields. Nodes with equal fields share a row.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    namespace: String,
    name: String,
    kind: String,
    cluster_ips: Vec<String>,
    ports: Vec<String>,
    backends: (usize, usize),
    conflicts: Vec<String>,
}

pub(crate) fn text(answers: &Answers<Vec<ServiceView>>, form: Form) -> String {
    let mut header = vec![
        "NODE",
        "NAMESPACE",
        "NAME",
        "TYPE",
        "CLUSTER-IP",
        "PORT(S)",
        "BACKENDS",
        "FLOWS",
    ];
    if form.wide {
        header.push("CONFLICTS");
    }
    let all = answers.answered().count();
    let rows = merged(
        answers
            .answered()
            .map(|(node, services)| (node, services.as_slice())),
    );
    form.narrowed(
        &header,
        ServiceView::NARROW,
        rows.into_iter()
            .map(|(row, (nodes, flows))| cells(row, &nodes, flows, all, form.wide)),
    )
}

/// Groups the nodes with equal rows of a Service, and sums the flows.
fn merged<'a>(
    answers: impl Iterator<Item = (&'a str, &'a [ServiceView])>,
) -> BTreeMap<Row, (Vec<&'a str>, u64)> {
    let mut rows: BTreeMap<Row, (Vec<&str>, u64)> = BTreeMap::new();
    for (node, services) in answers {
        for service in services {
            let (nodes, flows) = rows.entry(Row::of(service)).or_default();
            nodes.push(node);
            *flows = service
                .ports
                .iter()
                .fold(*flows, |sum, port| sum.saturating_add(port.counts.flows));
        }
    }
    rows
}

impl Row {
    fn of(service: &ServiceView) -> Self {
        let conflicts = service.ports.iter().flat_map(|port| &port.frontends);
        Self {
            namespace: service.namespace.clone(),
            name: service.name.clone(),
            kind: service.r#type.clone(),
            cluster_ips: service
                .cluster_ips
                .iter()
                .map(ToString::to_string)
                .collect(),
            ports: service.ports.iter().map(port).collect(),
            backends: service.backends_in_use(),
            conflicts: conflicts
                .filter_map(|frontend| frontend.conflict.clone())
                .collect(),
        }
    }
}

fn cells(row: Row, nodes: &[&str], flows: u64, all: usize, wide: bool) -> Vec<Cell> {
    let (in_use, listed) = row.backends;
    let backends = format!("{in_use}/{listed}");
    let mut cells = vec![
        cell(select::nodes(nodes, all)),
        cell(row.namespace),
        cell(row.name),
        cell(row.kind),
        lines(row.cluster_ips),
        lines(row.ports),
        if in_use == 0 {
            yellow(backends)
        } else {
            cell(backends)
        },
        cell(flows),
    ];
    if wide {
        cells.push(cell(row.conflicts.join("; ")));
    }
    cells
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn service(name: &str, in_use: bool, flows: u64) -> ServiceView {
        let backend = json!({
            "address": "10.244.1.10:8080", "pod": "shop/web-1", "node": "n1", "zone": null, "ready": in_use, "serving": in_use,
            "terminating": false, "local": true, "inClusterSet": in_use, "inLocalSet": in_use, "flows": flows,
        });
        let counts = json!({
            "flowsOpened": 0, "flows": flows, "packets": 0, "bytes": 0, "packetsReturned": 0, "bytesReturned": 0, "refused": 0,
        });
        let port = json!({
            "name": "", "protocol": "TCP", "port": 80, "nodePort": 30080, "frontends": [], "backends": [backend], "counts": counts,
        });
        let service = json!({
            "namespace": "shop", "name": name, "type": "NodePort", "created": null, "clusterIps": ["10.96.0.1"], "externalIps": [],
            "loadBalancerIps": [], "internalTrafficPolicy": "Cluster", "externalTrafficPolicy": "Cluster", "affinitySecs": null,
            "healthCheckNodePort": null, "algorithm": "random", "ports": [port],
        });
        serde_json::from_value(service).unwrap()
    }

    #[test]
    fn nodes_that_serve_alike_share_a_row() {
        let same = [service("web", true, 2)];
        let other = [service("web", false, 1)];
        let rows = merged([("n1", &same[..]), ("n2", &same[..]), ("n3", &other[..])].into_iter());
        let rows: Vec<_> = rows
            .iter()
            .map(|(row, (nodes, flows))| (row.backends, select::nodes(nodes, 3), *flows))
            .collect();
        assert_eq!(
            rows,
            [
                ((0, 1), "n3".to_owned(), 1),
                ((1, 1), "n1,n2".to_owned(), 4)
            ]
        );
    }
}
