//! The rows of `kpx backends`.

use std::cmp::Reverse;

use clap::ValueEnum;
use comfy_table::Cell;
use serde::{Deserialize, Serialize};

use super::Listed;
use crate::output::{Narrow, cell, green, list, yellow};
use crate::{BackendView, ServiceView, latency};

/// A backend and its service port.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendRow {
    pub namespace: String,
    pub service: String,
    /// The name of the port; empty for a port without a name.
    pub port_name: String,
    pub protocol: String,
    pub port: u16,
    #[serde(flatten)]
    pub backend: BackendView,
}

/// The order of backends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum BackendOrder {
    /// By namespace, Service and port.
    #[default]
    Service,
    Address,
    Node,
    /// Backends that are not ready or silent first.
    State,
    /// Most flows first.
    Flows,
}

impl BackendOrder {
    /// Sorts the backends; the sort is stable.
    pub fn sort<T>(self, rows: &mut [T], row: impl Fn(&T) -> &BackendRow) {
        match self {
            Self::Service => {}
            Self::Address => rows.sort_by_key(|one| row(one).backend.address),
            Self::Node => rows.sort_by_cached_key(|one| row(one).backend.node.clone()),
            Self::State => rows.sort_by_key(|one| {
                let backend = &row(one).backend;
                backend.ready && !backend.terminating && !backend.silent
            }),
            Self::Flows => rows.sort_by_key(|one| Reverse(row(one).backend.flows)),
        }
    }
}

impl BackendRow {
    /// Returns the backends of a Service, port by port.
    pub fn of(service: ServiceView) -> impl Iterator<Item = Self> {
        let namespace = service.namespace;
        let name = service.name;
        service.ports.into_iter().flat_map(move |port| {
            let namespace = namespace.clone();
            let service = name.clone();
            port.backends.into_iter().map(move |backend| Self {
                namespace: namespace.clone(),
                service: service.clone(),
                port_name: port.name.clone(),
                protocol: port.protocol.clone(),
                port: port.port,
                backend,
            })
        })
    }

    /// Returns the service port as `name/TCP`, or `80/TCP` for a port without a name.
    pub fn port(&self) -> String {
        let port = if self.port_name.is_empty() {
            self.port.to_string()
        } else {
            self.port_name.clone()
        };
        format!("{port}/{}", self.protocol)
    }

    /// Returns the sets from which new flows choose this backend.
    pub fn sets(&self) -> String {
        let BackendView {
            in_cluster_set,
            in_local_set,
            in_redirect_set,
            ..
        } = self.backend;
        let sets = [
            (in_cluster_set, "cluster"),
            (in_local_set, "local"),
            (in_redirect_set, "redirect"),
        ];
        list(sets.iter().filter(|(is_in, _)| *is_in).map(|(_, set)| set))
    }

    /// Returns the state in one word: the endpoint's conditions, the weight 0, or the health.
    pub fn state(&self) -> Cell {
        let backend = &self.backend;
        if backend.is_ejected() {
            return yellow("ejected");
        }
        if backend.silent {
            return yellow("silent");
        }
        match (backend.ready, backend.serving, backend.terminating) {
            (true, _, false) if backend.weight == 0 => yellow("drained"),
            (true, _, false) => green("ready"),
            (_, true, true) => yellow("terminating"),
            (_, false, true) => yellow("terminated"),
            (false, _, false) => yellow("unready"),
        }
    }

    /// Returns the weight; a weight of 0, which takes no new flows, is marked.
    pub fn weight(&self) -> Cell {
        if self.backend.weight == 0 {
            yellow(0)
        } else {
            cell(self.backend.weight)
        }
    }
}

impl Listed for BackendRow {
    const NARROW: Narrow<'static> = Narrow {
        optional: &["LOCAL", "ZONE", "SETS", "NODE", "FLOWS", "POD"],
        sentence: None,
    };

    fn header(wide: bool) -> Vec<&'static str> {
        let mut header = vec![
            "NAMESPACE",
            "SERVICE",
            "PORT",
            "ADDRESS",
            "POD",
            "NODE",
            "ZONE",
            "STATE",
            "LOCAL",
            "SETS",
            "FLOWS",
        ];
        if wide {
            header.extend([
                "OPEN",
                "WEIGHT",
                "CONNECT-P50",
                "CONNECT-P99",
                "FAILED",
                "UDP-ANSWERED",
                "READY",
                "SERVING",
                "TERMINATING",
            ]);
        }
        header
    }

    fn cells(&self, wide: bool) -> Vec<Cell> {
        let Self { backend, .. } = self;
        let mut cells = vec![
            cell(&self.namespace),
            cell(&self.service),
            cell(self.port()),
            cell(backend.address),
            cell(backend.pod.as_deref().unwrap_or_default()),
            cell(backend.node.as_deref().unwrap_or_default()),
            cell(backend.zone.as_deref().unwrap_or_default()),
            self.state(),
            cell(yes(backend.local)),
            cell(self.sets()),
            cell(backend.flows),
        ];
        if wide {
            let connect = &backend.connect;
            cells.extend([cell(backend.open_flows), self.weight()]);
            cells
                .extend([connect.connect_p50, connect.connect_p99].map(|time| cell(latency(time))));
            cells.push(cell(connect.failed));
            cells.push(cell(backend.udp.unwrap_or_default().text()));
            cells.extend(
                [backend.ready, backend.serving, backend.terminating]
                    .map(|condition| cell(yes(condition))),
            );
        }
        cells
    }

    fn way(&self) -> Option<Cell> {
        let way = self.backend.way.as_deref()?;
        Some(if way == "unreachable" {
            yellow(way)
        } else {
            cell(way)
        })
    }

    fn key(&self) -> String {
        let Self {
            namespace,
            service,
            protocol,
            port,
            backend,
            ..
        } = self;
        format!(
            "{namespace}/{service} {port}/{protocol} {}",
            backend.address
        )
    }

    /// Returns the pod, or the address of a backend without a pod.
    fn name(&self) -> String {
        match &self.backend.pod {
            Some(pod) => format!("pod/{pod}"),
            None => self.backend.address.to_string(),
        }
    }
}

const fn yes(is: bool) -> &'static str {
    if is { "yes" } else { "no" }
}
