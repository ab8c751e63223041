//! The web page, which shows the node's state in a browser. If the operator enables it, the metrics
//! address serves it.
//!
//! The page only reads. No other site may read its data: neither through a name that resolves to
//! this server, nor by a script, nor in a frame. Requests that cost the agent more than a read of
//! its state must come from the page, in a browser that reaches this host by loopback.

mod assets;
mod changes;
pub(crate) mod cluster;
mod events;
mod guard;
mod map;
mod room;
mod rows;
mod trace;
mod whole_answers;

use std::path::Path;
use std::sync::Arc;

use axum::extract::{FromRef, State};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use axum::{Json, Router, middleware};
use http::{HeaderValue, header};
use proxy_common::counter::Reason;
use serde::Serialize;

use crate::cli::named_options;
use crate::control::{AgentHandle, answer};
use crate::monitor::Watchers;
use assets::Of;
use proxy_trace::{meaning, remedy};
use room::Rooms;

#[derive(Clone)]
pub struct Sources {
    pub agent: AgentHandle,
    pub watchers: Watchers,
    /// The run directory of the agent, whose tables a trace reads.
    pub run_dir: Arc<Path>,
}

impl Sources {
    pub fn new(agent: &AgentHandle, watchers: &Watchers, run_dir: &Path) -> Self {
        Self {
            agent: agent.clone(),
            watchers: watchers.clone(),
            run_dir: run_dir.into(),
        }
    }
}

#[derive(Clone)]
struct Page {
    sources: Sources,
    rooms: Rooms,
}

impl Page {
    fn new(sources: Sources) -> Self {
        Self {
            sources,
            rooms: Rooms::default(),
        }
    }
}

impl FromRef<Page> for AgentHandle {
    fn from_ref(page: &Page) -> Self {
        page.sources.agent.clone()
    }
}

/// Returns the data that the page of a cluster reads of a node, for local processes at the agent's
/// socket. They may read, and traces cost the node CPU time: that page runs `kpx trace` instead.
pub fn local_router(sources: Sources) -> Router {
    Router::new()
        .route("/ui/api/status", get(status))
        .route("/ui/api/service", get(rows::service))
        .route("/ui/api/events", get(events::events))
        .route("/ui/api/changes", get(changes::changes))
        .route("/ui/api/shapes", get(changes::shapes))
        .route("/ui/api/clock", get(changes::clock))
        .route("/ui/api/history", get(whole_answers::history))
        .route("/ui/api/map", get(map::map))
        .layer(middleware::map_response(never_store))
        .with_state(Page::new(sources))
}

fn api() -> Router<Page> {
    let costly = Router::new()
        .route("/ui/api/events", get(events::events))
        .route("/ui/api/map", get(map::map))
        .route("/ui/api/trace", get(trace::trace))
        .route_layer(middleware::from_fn(guard::page_on_host));
    Router::new()
        .route("/ui/api/status", get(status))
        .route("/ui/api/options", get(options))
        .route("/ui/api/services", get(whole_answers::services))
        .route("/ui/api/rows", get(rows::rows))
        .route("/ui/api/service", get(rows::service))
        .route("/ui/api/reasons", get(reasons))
        .route("/ui/api/history", get(whole_answers::history))
        .merge(costly)
        .layer(middleware::map_response(never_store))
}

/// Returns `/ui/` and the paths below it. The host of a request must be an address, localhost or
/// `node_name`.
pub fn router(sources: Sources, node_name: &str) -> Router {
    page(Of::Node, api().with_state(Page::new(sources)), node_name)
}

/// Returns a page with its data, which no other site can read.
fn page(of: Of, data: Router, node_name: &str) -> Router {
    Router::new()
        .route("/ui", get(|| async { Redirect::permanent("/ui/") }))
        .merge(assets::router(of))
        .merge(data)
        .layer(middleware::map_response(guard::protect))
        .layer(middleware::from_fn_with_state(
            Arc::from(node_name),
            guard::known_host,
        ))
}

async fn status(State(agent): State<AgentHandle>) -> Response {
    answer(agent.status().await)
}

async fn options(State(agent): State<AgentHandle>) -> Response {
    answer(agent.status().await.map(|status| named_options(&status)))
}

/// A reason why a packet is not translated, with its verdict, as in `kpx explain`.
#[derive(Serialize)]
struct ReasonView {
    name: &'static str,
    /// The verdict: `pass`, `drop` or `reject`.
    verdict: &'static str,
    meaning: &'static str,
    /// The operator's next steps, each a sentence.
    remedy: &'static [&'static str],
}

async fn reasons() -> Response {
    Json(Reason::ALL.map(reason_view)).into_response()
}

fn reason_view(reason: Reason) -> ReasonView {
    ReasonView {
        name: reason.name(),
        verdict: reason.verdict().name(),
        meaning: meaning(reason),
        remedy: remedy(reason),
    }
}

async fn never_store(mut response: Response) -> Response {
    response
        .headers_mut()
        .insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests;
