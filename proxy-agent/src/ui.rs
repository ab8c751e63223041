//! The web page, which shows the node's state in a browser. The page is served beside the metrics if the operator asks
//! for it.
//!
//! The page only reads. No other site may read its data: neither by a name that resolves to this server, nor by a
//! script, nor in a frame.

mod assets;
mod guard;

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use axum::{Json, Router, middleware};
use http::{HeaderValue, header};
use proxy_common::counter::Reason;
use serde::Serialize;

use crate::control::{AgentHandle, answer};
use crate::history;
use proxy_trace::meaning;

/// Returns `/ui/` and the paths below it. A request must name the server by an address, as localhost or as `node_name`.
pub fn router(agent: AgentHandle, node_name: &str) -> Router {
    let api = Router::new()
        .route("/ui/api/status", get(status))
        .route("/ui/api/services", get(services))
        .route("/ui/api/reasons", get(reasons))
        .route("/ui/api/history", get(history::history))
        .layer(middleware::map_response(never_store))
        .with_state(agent);
    Router::new()
        .route("/ui", get(|| async { Redirect::permanent("/ui/") }))
        .merge(assets::router())
        .merge(api)
        .layer(middleware::map_response(guard::protect))
        .layer(middleware::from_fn_with_state(Arc::from(node_name), guard::known_host))
}

async fn status(State(agent): State<AgentHandle>) -> Response {
    answer(agent.status().await)
}

async fn services(State(agent): State<AgentHandle>) -> Response {
    answer(agent.services().await)
}

/// A reason why a packet is not translated, with the verdict.
#[derive(Serialize)]
struct ReasonView {
    name: &'static str,
    /// The verdict: `pass`, `drop` or `reject`.
    verdict: &'static str,
    meaning: &'static str,
}

async fn reasons() -> Response {
    Json(Reason::ALL.map(reason_view)).into_response()
}

fn reason_view(reason: Reason) -> ReasonView {
    ReasonView { name: reason.name(), verdict: reason.verdict().name(), meaning: meaning(reason) }
}

async fn never_store(mut response: Response) -> Response {
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests;
