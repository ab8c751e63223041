//! The metrics server: `/metrics`, and kube-proxy's other paths there (its
//! `cmd/kube-proxy/app/server.go`).

use std::time::Duration;

use axum::Router;
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, StatusCode};
use serde_json::Value;
use tracing::debug;

use crate::control::AgentHandle;
use crate::http_server::{nosniff, not_found};
use crate::settings::Settings;
use proxy_metrics::{Metrics, TEXT_FORMAT};

/// The answer of `/proxyMode`, where kube-proxy answers `iptables`, `ipvs` or `nftables`.
const PROXY_MODE: &str = "ebpf";
/// The maximum time for which a scrape waits for the agent. Later it gets only the kernel's
/// numbers.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Returns the paths of the metrics address, with the extra paths `more`.
pub fn router(agent: AgentHandle, metrics: Metrics, settings: &Settings, more: Router) -> Router {
    let slis = metrics.slis.clone();
    let text = |body: &'static str| move || async move { plain(body) };
    Router::new()
        .route(
            "/metrics/slis",
            any(move || async move { exposition(slis.text()) }),
        )
        .route("/healthz", any(healthz).with_state(metrics.clone()))
        .route("/healthz/ping", any(text("ok")))
        .route("/proxyMode", any(text(PROXY_MODE)))
        .merge(configz_router(settings.configz.clone()))
        .merge(scrape_router(agent, metrics))
        .merge(more)
        .fallback(not_found)
}

/// Returns the path `/configz`: the configuration in use.
pub fn configz_router(configz: Value) -> Router {
    Router::new().route("/configz", any(async move || json(&configz)))
}

pub fn scrape_router(agent: AgentHandle, metrics: Metrics) -> Router {
    Router::new()
        .route("/metrics", any(scrape))
        .with_state((agent, metrics))
}

async fn scrape(State((agent, metrics)): State<(AgentHandle, Metrics)>) -> Response {
    let readings = match tokio::time::timeout(TIMEOUT, agent.readings()).await {
        Ok(Ok(readings)) => Some(readings),
        Ok(Err(error)) => {
            debug!(
                error = format!("{error:#}"),
                "scrape without the kernel's numbers"
            );
            None
        }
        Err(_) => None,
    };
    exposition(metrics.text(readings))
}

/// Reports only that the process runs, as all Kubernetes components do.
async fn healthz(State(metrics): State<Metrics>, RawQuery(query): RawQuery) -> Response {
    metrics.slis.pinged();
    let verbose = query.is_some_and(|query| {
        query
            .split('&')
            .any(|part| part.split('=').next() == Some("verbose"))
    });
    plain(if verbose {
        "[+]ping ok\nhealthz check passed\n"
    } else {
        "ok"
    })
}

fn plain(body: &'static str) -> Response {
    let mut response = body.into_response();
    nosniff(&mut response);
    response
}

fn json(value: &Value) -> Response {
    let mut response = axum::Json(value).into_response();
    nosniff(&mut response);
    response
}

fn exposition(text: Result<String, std::fmt::Error>) -> Response {
    match text {
        Ok(text) => (
            [(CONTENT_TYPE, HeaderValue::from_static(TEXT_FORMAT))],
            text,
        )
            .into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
