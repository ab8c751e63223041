//! The backends of a Service, computed from two samples of an agent. Does no I/O.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use proxy_view::object_name::full_name;
use proxy_view::output::{Form, Narrow, cell};
use proxy_view::rates::{ConnectRates, connect_cells, number};
use proxy_view::{BackendView, ConnectView, PortView, ServiceView};

use super::rows::{Sample, seconds};

const COLUMNS: [&str; 10] = [
    "BACKEND",
    "POD",
    "PORT",
    "STATE",
    "CONNECTS/S",
    "CONN-P50",
    "CONN-P99",
    "REFUSED/S",
    "SILENT/S",
    "FLOWS",
];
const NARROW: Narrow<'static> = Narrow {
    optional: &[
        "CONN-P50",
        "CONN-P99",
        "SILENT/S",
        "REFUSED/S",
        "CONNECTS/S",
        "FLOWS",
        "POD",
    ],
    sentence: None,
};

/// The backends of a Service, by port and address.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Backends {
    /// The Service as `namespace/name`.
    pub(super) service: String,
    /// `None` if the agent no longer has the Service.
    pub(super) rows: Option<Vec<Row>>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    /// The name and protocol of the port: `http/TCP`.
    pub(super) port: String,
    pub(super) backend: BackendView,
    /// The connections between the samples.
    pub(super) connect: ConnectRates,
}

/// Computes the connect rates of a Service's backends between two samples.
pub(super) fn backends(before: &Sample, now: &Sample, service: &str) -> Backends {
    let secs = seconds(before, now);
    let old: BTreeMap<_, _> = find(before, service)
        .into_iter()
        .flat_map(of_ports)
        .collect();
    let row = |(key, backend): ((String, SocketAddr), &BackendView)| {
        let nothing = ConnectView::default();
        let old = old.get(&key);
        let change = backend
            .connect
            .since(old.map_or(&nothing, |old| &old.connect));
        let udp = old.and_then(|old| old.udp).unwrap_or_default();
        let udp = backend.udp.unwrap_or_default().since(udp);
        Row {
            port: key.0,
            backend: backend.clone(),
            connect: ConnectRates::of(&change, udp, secs),
        }
    };
    let rows = find(now, service).map(|found| of_ports(found).map(row).collect());
    Backends {
        service: service.to_owned(),
        rows,
    }
}

fn find<'a>(sample: &'a Sample, service: &str) -> Option<&'a ServiceView> {
    sample.services.iter().find(|one| full_name(one) == service)
}

fn of_ports(service: &ServiceView) -> impl Iterator<Item = ((String, SocketAddr), &BackendView)> {
    let name = |port: &PortView| {
        if port.name.is_empty() {
            port.port.to_string()
        } else {
            port.name.clone()
        }
    };
    service.ports.iter().flat_map(move |port| {
        let name = format!("{}/{}", name(port), port.protocol);
        port.backends
            .iter()
            .map(move |backend| ((name.clone(), backend.address), backend))
    })
}

pub(super) fn text(backends: &Backends, form: Form) -> String {
    let Some(rows) = &backends.rows else {
        return format!("kpx serves no Service {}\n", backends.service);
    };
    if rows.is_empty() {
        return format!("Service {} has no endpoints\n", backends.service);
    }
    let rows = rows
        .iter()
        .map(|row| cells(row).into_iter().map(cell).collect());
    form.narrowed(&COLUMNS, NARROW, rows)
}

fn cells(
    Row {
        port,
        backend,
        connect,
    }: &Row,
) -> Vec<String> {
    let pod = backend.pod.clone().unwrap_or_default();
    let [p50, p99, refused, silent] = connect_cells(connect);
    let connects = number(connect.per_sec);
    let words = [
        backend.address.to_string(),
        pod,
        port.clone(),
        state(backend).to_owned(),
    ];
    words
        .into_iter()
        .chain([
            connects,
            p50,
            p99,
            refused,
            silent,
            backend.flows.to_string(),
        ])
        .collect()
}

/// Returns the state of the backend: `in use`, or the reason why not, worded as in `kpx backends`.
fn state(backend: &BackendView) -> &'static str {
    if backend.is_ejected() {
        return "ejected";
    }
    if backend.silent {
        return "silent";
    }
    let is_used = backend.in_cluster_set || backend.in_local_set || backend.in_redirect_set;
    match (is_used, backend.terminating, backend.ready) {
        (true, true, _) => "terminating",
        (true, false, _) => "in use",
        (false, true, _) => "terminated",
        (false, false, true) if backend.weight == 0 => "drained",
        (false, false, true) => "not in use",
        (false, false, false) => "unready",
    }
}
