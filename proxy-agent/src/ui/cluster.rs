//! The page of a whole cluster, which `kubectl kpx ui` serves on the user's machine.
//!
//! It is the page of a node with other data: proxy-cluster reads all nodes with the user's own
//! rights. Each request costs the cluster, so all of them must come from the page.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use axum::{Json, Router, middleware};
use futures::{Stream, StreamExt, stream};
use http::{StatusCode, header};
use proxy_cluster::ui::{EventQuery, Page};
use proxy_view::output::print;
use serde::Deserialize;
use serde_json::json;
use tokio::time::timeout;

use super::assets::Of;
use super::room::Rooms;
use super::rows::{Name, push};
use super::{guard, never_store, page, reasons};
use crate::http_server::{self, Room};

/// The time without a packet after which a comment is sent, because only a write shows that a
/// browser is gone.
const SILENCE: Duration = Duration::from_secs(10);

#[derive(Clone)]
struct Served {
    page: Page,
    rooms: Rooms,
}

/// Serves the page at 127.0.0.1 until a signal.
pub(crate) async fn serve(page: Page) -> Result<()> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, page.port()));
    let listener = http_server::bind(address, true)
        .with_context(|| format!("listen on {address}: --port names another port"))?;
    let address = listener.local_addr().context("find the page's address")?;
    print(&format!(
        "http://{address}/ui/ has the page of the cluster, until Ctrl-C\n"
    ))?;
    let served = http_server::serve(listener, router(page), Room::default().place());
    tokio::select! {
        () = served => Ok(()),
        stopped = tokio::signal::ctrl_c() => stopped.context("wait for Ctrl-C"),
    }
}

fn router(page_: Page) -> Router {
    let data = Router::new()
        .route("/ui/api/status", get(status))
        .route("/ui/api/rows", get(rows))
        .route("/ui/api/service", get(service))
        .route("/ui/api/history", get(history))
        .route("/ui/api/map", get(map))
        .route("/ui/api/trace", get(trace))
        .route("/ui/api/reasons", get(reasons))
        .route("/ui/api/events", get(events))
        .route_layer(middleware::from_fn(guard::page_on_host))
        .layer(middleware::map_response(never_store))
        .with_state(Served {
            page: page_,
            rooms: Rooms::default(),
        });
    let home = Router::new().route("/", get(|| async { Redirect::temporary("/ui/") }));
    page(Of::Cluster, data.merge(home), "localhost")
}

async fn status(State(Served { page, .. }): State<Served>) -> Response {
    Json(page.status()).into_response()
}

async fn rows(State(Served { page, rooms }): State<Served>) -> Response {
    let _room = match rooms.rows.enter() {
        Ok(room) => room,
        Err(full) => return full.into_response(),
    };
    let made = tokio::task::spawn_blocking(move || {
        let rows = page.rows();
        let mut lines = Vec::new();
        push(&mut lines, &json!({ "services": rows.len(), "ahead": 0 }))?;
        rows.iter().try_for_each(|row| push(&mut lines, row))?;
        Ok(lines)
    });
    match made.await.context("merge the rows").flatten() {
        Ok(lines) => ([(header::CONTENT_TYPE, "application/x-ndjson")], lines).into_response(),
        Err(error) => crate::control::answer::<()>(Err(error)),
    }
}

async fn service(
    State(Served { page, rooms }): State<Served>,
    Query(Name { namespace, name }): Query<Name>,
) -> Response {
    let _room = match rooms.wholes.enter() {
        Ok(room) => room,
        Err(full) => return full.into_response(),
    };
    match page.service(&namespace, &name).await {
        Some(service) => Json(service).into_response(),
        None => (StatusCode::NOT_FOUND, "no such Service\n").into_response(),
    }
}

/// The Service whose history is wanted too, as `NAMESPACE/NAME`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    service: Option<String>,
}

async fn history(
    State(Served { page, rooms }): State<Served>,
    Query(Wanted { service }): Query<Wanted>,
) -> Response {
    let _room = match rooms.wholes.enter() {
        Ok(room) => room,
        Err(full) => return full.into_response(),
    };
    Json(page.history(service.as_deref()).await).into_response()
}

/// The part of the flows that is wanted.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Called {
    namespace: String,
    service: Option<String>,
}

async fn map(
    State(Served { page, rooms }): State<Served>,
    Query(Called { namespace, service }): Query<Called>,
) -> Response {
    let _room = match rooms.maps.enter() {
        Ok(room) => room,
        Err(full) => return full.into_response(),
    };
    Json(page.map(&namespace, service.as_deref()).await).into_response()
}

/// A trace's client and destination, in the notation of `kubectl kpx trace`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Ends {
    from: String,
    to: String,
    node: Option<String>,
}

async fn trace(
    State(Served { page, rooms }): State<Served>,
    Query(Ends { from, to, node }): Query<Ends>,
) -> Response {
    let _room = match rooms.traces.enter() {
        Ok(room) => room,
        Err(full) => return full.into_response(),
    };
    match page.trace(from, to, node).await {
        Ok(trace) => Json(trace).into_response(),
        Err(error) => (StatusCode::UNPROCESSABLE_ENTITY, format!("{error:#}")).into_response(),
    }
}

async fn events(
    State(Served { page, rooms }): State<Served>,
    Query(query): Query<EventQuery>,
) -> Response {
    let room = match rooms.events.enter() {
        Ok(room) => room,
        Err(full) => return full.into_response(),
    };
    let events = match page.events(query).await {
        Ok(events) => events,
        Err(error) => return (StatusCode::BAD_REQUEST, format!("{error:#}")).into_response(),
    };
    let opened = stream::once(async { Bytes::from_static(b": open\n\n") });
    let texts = texts(events).map(move |text| {
        let _open = &room;
        text
    });
    let body = Body::from_stream(opened.chain(texts).map(Ok::<_, Infallible>));
    ([(header::CONTENT_TYPE, "text/event-stream")], body).into_response()
}

/// Returns the texts of events, and a comment after each silence.
fn texts(
    events: impl Stream<Item = serde_json::Value> + Send + 'static,
) -> impl Stream<Item = Bytes> + Send {
    stream::unfold(Box::pin(events), async |mut events| {
        match timeout(SILENCE, events.next()).await {
            Ok(Some(event)) => Some((Bytes::from(format!("data: {event}\n\n")), events)),
            Ok(None) => None,
            Err(_silent) => Some((Bytes::from_static(b": no event\n\n"), events)),
        }
    })
}
