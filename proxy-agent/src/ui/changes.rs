//! `/ui/api/changes`: the rows of all Services, and then their changes, as long as the client
//! reads. `/ui/api/shapes`: the shapes behind digests. `/ui/api/clock`: this node's time.
//!
//! The page of a cluster reads these from many nodes over slow paths, so an idle node sends almost
//! nothing and a busy one a limited number of bytes ([`proxy_view::page`]).

use std::collections::HashSet;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use futures::{TryStream, stream};
use http::{StatusCode, header};
use jiff::Timestamp;
use serde::Deserialize;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::spawn_blocking;
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::Page;
use super::rows::{push, row};
use crate::control::{AgentHandle, answer};
use proxy_view::page::{Clock, Digest, Row, Sent, Shaped};

const LINES: [(header::HeaderName, &str); 1] = [(header::CONTENT_TYPE, "application/x-ndjson")];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wanted {
    /// The seconds between two rounds: 1 to 60.
    every: u64,
}

/// A stream to one client.
struct Changes {
    agent: AgentHandle,
    sent: Sent,
    rounds: Interval,
    _room: OwnedSemaphorePermit,
}

pub(super) async fn changes(State(page): State<Page>, Query(wanted): Query<Wanted>) -> Response {
    if !(1..=60).contains(&wanted.every) {
        return (StatusCode::BAD_REQUEST, "every is 1 to 60 seconds\n").into_response();
    }
    let room = match page.rooms.changes.enter() {
        Ok(room) => room,
        Err(full) => return full.into_response(),
    };
    let mut rounds = interval(Duration::from_secs(wanted.every));
    rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let changes = Changes {
        agent: page.sources.agent,
        sent: Sent::default(),
        rounds,
        _room: room,
    };
    (LINES, Body::from_stream(changes.lines())).into_response()
}

impl Changes {
    fn lines(self) -> impl TryStream<Ok = Bytes, Error = anyhow::Error> + Send + 'static {
        stream::try_unfold(self, |mut changes| async {
            changes.rounds.tick().await;
            let rows = rows(&changes.agent).await?;
            let round = spawn_blocking(move || {
                let round = changes.sent.round(rows);
                (changes, round)
            });
            let (changes, round) = round.await.context("find the changes")?;
            let mut line = Vec::new();
            push(&mut line, &round)?;
            Ok(Some((Bytes::from(line), changes)))
        })
    }
}

async fn rows(agent: &AgentHandle) -> Result<Vec<Row>> {
    let failing = agent.history.failing();
    let (snapshot, flows) = agent.flows().await?;
    let made = spawn_blocking(move || {
        let counts = flows.recent_counts().context("count the traffic")?;
        let services = snapshot.services.iter();
        let rows = services.map(|service| row(&snapshot, &counts, &failing, service));
        Ok(rows.collect())
    });
    made.await.context("make the rows")?
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Of {
    /// The digests, separated by commas; `None` for all shapes.
    of: Option<String>,
}

pub(super) async fn shapes(State(page): State<Page>, Query(Of { of }): Query<Of>) -> Response {
    let room = match page.rooms.rows.enter() {
        Ok(room) => room,
        Err(full) => return full.into_response(),
    };
    let wanted = of.map(|of| {
        let digests = of
            .split(',')
            .filter_map(|one| one.to_owned().try_into().ok());
        digests.collect::<HashSet<Digest>>()
    });
    let rows = match rows(&page.sources.agent).await {
        Ok(rows) => rows,
        Err(error) => return answer::<()>(Err(error)),
    };
    let made = spawn_blocking(move || {
        let _room = room;
        let mut lines = Vec::new();
        for Row { shape, .. } in rows {
            let digest = Digest::of(&shape);
            if wanted
                .as_ref()
                .is_none_or(|wanted| wanted.contains(&digest))
            {
                push(&mut lines, &Shaped { digest, shape })?;
            }
        }
        Ok(lines)
    });
    match made.await.context("make the shapes").flatten() {
        Ok(lines) => (LINES, lines).into_response(),
        Err(error) => answer::<()>(Err(error)),
    }
}

pub(super) async fn clock() -> Response {
    let now = Timestamp::now();
    Json(Clock { now }).into_response()
}
