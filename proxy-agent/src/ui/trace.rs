//! `/ui/api/trace`: the result of `kpx trace` for a packet.

use std::error::Error;
use std::path::Path;

use anyhow::{Context, Result};
use axum::Json;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use clap::Parser;
use clap::error::{ContextKind, ContextValue};
use http::StatusCode;
use serde::Deserialize;
use tokio::task::spawn_blocking;

use super::Page;
use crate::config::NodeArgs;
use proxy_trace::TraceArgs;

/// The maximum length in bytes of an endpoint: a DNS name and a port.
const LONGEST: usize = 300;

/// The endpoints of a packet, in the notation of `kpx trace --from --to`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Ends {
    /// The client; `None` for a process of this node.
    from: Option<String>,
    to: String,
}

/// The names of the form's fields. Its second and third field make up `to`.
const FROM: &str = "From";
const TO: &str = "To and Port";

/// The command line of a trace.
#[derive(Debug, Parser)]
#[command(name = "trace")]
struct Line {
    #[command(flatten)]
    args: TraceArgs<NodeArgs>,
}

pub(super) async fn trace(State(page): State<Page>, Query(ends): Query<Ends>) -> Response {
    let args = match ends.args(&page.sources.run_dir) {
        Ok(args) => args,
        Err(why) => return (StatusCode::BAD_REQUEST, why).into_response(),
    };
    let room = match page.rooms.traces.enter() {
        Ok(room) => room,
        Err(full) => return full.into_response(),
    };
    // The permit is held until the trace ends, even if the browser has left.
    let traced = spawn_blocking(move || {
        let _room = room;
        proxy_trace::run(args)
    });
    match traced.await.context("trace").flatten() {
        Ok(trace) => Json(trace).into_response(),
        Err(error) => (StatusCode::UNPROCESSABLE_ENTITY, format!("{error:#}")).into_response(),
    }
}

impl Ends {
    /// Returns the arguments of the command, or an error that names the form's invalid field.
    fn args(&self, run_dir: &Path) -> Result<TraceArgs<NodeArgs>, String> {
        let fields = [(FROM, self.from.as_ref()), (TO, Some(&self.to))];
        let is_long = |end: Option<&String>| end.is_some_and(|end| end.len() > LONGEST);
        if let Some((field, _)) = fields.into_iter().find(|(_, end)| is_long(*end)) {
            return Err(format!("{field}: longer than {LONGEST} letters"));
        }
        let from = self
            .from
            .as_ref()
            .map_or_else(|| "--host".to_owned(), |from| format!("--from={from}"));
        // A text after an equals sign is a value, even if it looks like a flag.
        let line = [
            "trace".to_owned(),
            format!("--run-dir={}", run_dir.display()),
            from,
            format!("--to={}", self.to),
        ];
        let parsed = Line::try_parse_from(line);
        Ok(parsed.map_err(|error| fault(&error))?.args)
    }
}

/// Returns the form's field and its error. The form has no flags, so the text names none.
fn fault(error: &clap::Error) -> String {
    let field = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(flag)) if flag.starts_with("--from") => FROM,
        _ => TO,
    };
    let why = error
        .source()
        .map_or_else(|| error.kind().to_string(), ToString::to_string);
    format!("{field}: {why}")
}
