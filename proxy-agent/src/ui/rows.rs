//! `/ui/api/rows`: the table of Services, one line of JSON per Service. `/ui/api/service`: one
//! Service with all details.
//!
//! A cluster may have 10,000 Services, and the page reads their rows every two seconds. So a row
//! has only the table's fields, and the first rows are sent before the last are made. Rows are
//! sorted by namespace and name. If requested, the rows of failing Services are sent before all
//! rows.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result};
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use futures::{TryStream, stream};
use http::{StatusCode, header};
use serde::{Deserialize, Serialize};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::spawn_blocking;

use super::Page;
use crate::control::answer;
use proxy_core::desired::{ServiceSnapshot, Snapshot};
use proxy_core::input::ObjectName;
use proxy_datapath::{Counts, FlowMaps};
use proxy_view::history::{Failures, shared};
use proxy_view::page::{Row, RowFailures};
use proxy_view::{ServiceView, view};

const BATCH: usize = 512;
/// The maximum number of rows that are sent first: as many as the page shows before it has all
/// rows.
const AHEAD: usize = 200;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wanted {
    /// True to send the rows of failing Services first.
    #[serde(default)]
    ahead: bool,
}

/// The first line of the answer.
#[derive(Serialize)]
struct Head {
    services: usize,
    /// The number of rows that are sent first, and again in their place.
    ahead: usize,
}

pub(super) async fn rows(State(page): State<Page>, Query(wanted): Query<Wanted>) -> Response {
    let room = match page.rooms.rows.enter() {
        Ok(room) => room,
        Err(full) => return full.into_response(),
    };
    let failing = page.sources.agent.history.failing();
    match page.sources.agent.flows().await {
        Ok((snapshot, flows)) => match Rows::open(snapshot, flows, failing, &wanted, room).await {
            Ok(rows) => (
                [(header::CONTENT_TYPE, "application/x-ndjson")],
                Body::from_stream(rows.lines()),
            )
                .into_response(),
            Err(error) => answer::<()>(Err(error)),
        },
        Err(error) => answer::<()>(Err(error)),
    }
}

/// A list while it is sent.
struct Rows {
    snapshot: Snapshot,
    counts: Arc<Counts>,
    failing: BTreeMap<ObjectName, Failures>,
    /// True if failing Services are sent first.
    ahead: bool,
    /// The number of rows made so far; `None` before the first line.
    made: Option<usize>,
    _room: OwnedSemaphorePermit,
}

impl Rows {
    async fn open(
        snapshot: Snapshot,
        flows: FlowMaps,
        failing: BTreeMap<ObjectName, Failures>,
        wanted: &Wanted,
        room: OwnedSemaphorePermit,
    ) -> Result<Self> {
        let counts = spawn_blocking(move || flows.recent_counts().context("count the traffic"));
        Ok(Self {
            snapshot,
            counts: counts.await.context("count the traffic")??,
            failing,
            ahead: wanted.ahead,
            made: None,
            _room: room,
        })
    }

    /// Returns the lines. Each batch is made when the client has read the previous batch.
    fn lines(self) -> impl TryStream<Ok = Bytes, Error = anyhow::Error> + Send + 'static {
        stream::try_unfold(self, |mut rows| async {
            let batch = spawn_blocking(move || {
                let lines = rows.next_lines();
                (rows, lines)
            });
            let (rows, lines) = batch.await.context("make the rows")?;
            Ok(lines?.map(|lines| (lines, rows)))
        })
    }

    fn next_lines(&mut self) -> Result<Option<Bytes>> {
        let services = &self.snapshot.services;
        let mut lines = Vec::new();
        let from = match self.made {
            Some(made) if made == services.len() => return Ok(None),
            Some(made) => made,
            None => {
                let ahead = if self.ahead {
                    ahead(services, &self.failing)
                } else {
                    Vec::new()
                };
                push(
                    &mut lines,
                    &Head {
                        services: services.len(),
                        ahead: ahead.len(),
                    },
                )?;
                for service in ahead {
                    push(&mut lines, &self.row(service))?;
                }
                0
            }
        };
        let batch = services.iter().skip(from).take(BATCH);
        for service in batch.clone() {
            push(&mut lines, &self.row(service))?;
        }
        self.made = Some(from + batch.len());
        Ok(Some(lines.into()))
    }

    fn row(&self, service: &ServiceSnapshot) -> Row {
        row(&self.snapshot, &self.counts, &self.failing, service)
    }
}

/// Returns the row of a Service.
pub(super) fn row(
    snapshot: &Snapshot,
    counts: &Counts,
    failing: &BTreeMap<ObjectName, Failures>,
    service: &ServiceSnapshot,
) -> Row {
    let failures = failing.get(&service.object.name);
    Row {
        failures: failures.map(|&Failures { unserved, failed }| RowFailures { unserved, failed }),
        ..Row::new(view(snapshot, counts, service))
    }
}

/// Returns the failing Services in the order of the page's problems, at most [`AHEAD`].
fn ahead<'a>(
    services: &'a [ServiceSnapshot],
    failing: &BTreeMap<ObjectName, Failures>,
) -> Vec<&'a ServiceSnapshot> {
    let rank = |service: &ServiceSnapshot| match failing.get(&service.object.name) {
        Some(failures) if failures.unserved > 0.0 => Some((0, failures.unserved)),
        _ if is_down(service) => Some((1, 0.0)),
        Some(failures) => Some((2, failures.failed)),
        None => None,
    };
    let mut ahead: Vec<_> = services
        .iter()
        .filter_map(|service| Some((rank(service)?, service)))
        .collect();
    ahead.sort_by(|((a, a_rate), _), ((b, b_rate), _)| a.cmp(b).then(b_rate.total_cmp(a_rate)));
    let ahead = ahead.into_iter().map(|(_, service)| service).collect();
    shared(ahead, AHEAD, |service| &service.object.name.namespace)
}

/// Returns true if a Service has endpoints and none is ready.
fn is_down(service: &ServiceSnapshot) -> bool {
    let slices = service.slices.iter().filter(|slice| !slice.is_headless);
    let mut endpoints = slices.flat_map(|slice| &slice.endpoints).peekable();
    endpoints.peek().is_some() && !endpoints.any(|endpoint| endpoint.ready)
}

pub(super) fn push(lines: &mut Vec<u8>, line: &impl Serialize) -> Result<()> {
    serde_json::to_writer(&mut *lines, line).context("write a row")?;
    lines.push(b'\n');
    Ok(())
}

#[derive(Deserialize)]
pub(super) struct Name {
    pub(super) namespace: String,
    pub(super) name: String,
}

pub(super) async fn service(State(page): State<Page>, Query(name): Query<Name>) -> Response {
    match one(&page, name).await {
        Ok(None) => (StatusCode::NOT_FOUND, "no such Service\n").into_response(),
        found => answer(found),
    }
}

async fn one(page: &Page, Name { namespace, name }: Name) -> Result<Option<ServiceView>> {
    let (snapshot, flows) = page.sources.agent.flows().await?;
    let made = spawn_blocking(move || {
        let is_it = |of: &ObjectName| *of.namespace == *namespace && *of.name == *name;
        let Some(service) = snapshot
            .services
            .iter()
            .find(|service| is_it(&service.object.name))
        else {
            return Ok(None);
        };
        let counts = flows.recent_counts().context("count the traffic")?;
        Ok(Some(view(&snapshot, &counts, service)))
    });
    made.await.context("make the view of a Service")?
}
