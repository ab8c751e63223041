//! `/ui/api/services` and `/ui/api/history`: answers that are made in one go, off the runtime's
//! threads.
//!
//! Either may have megabytes, and clients elsewhere may ask for them. So an answer keeps its room
//! until its reader has taken it: the memory of readers that do not read is bounded.

use anyhow::{Context, Result};
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use futures::{Stream, stream};
use http::header;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::spawn_blocking;

use super::Page;
use crate::control::answer;
use crate::history::Wanted;
use proxy_view::views;

/// The bytes that are handed to the connection in one go. They are copies, so none of them holds
/// the whole answer.
const PIECE: usize = 64 * 1024;

pub(super) async fn services(State(page): State<Page>) -> Response {
    let room = match page.rooms.wholes.enter() {
        Ok(room) => room,
        Err(full) => return full.into_response(),
    };
    let (snapshot, flows) = match page.sources.agent.flows().await {
        Ok(state) => state,
        Err(error) => return answer::<()>(Err(error)),
    };
    let make = move || {
        let counts = flows.recent_counts().context("count the traffic")?;
        serde_json::to_vec(&views(&snapshot, &counts)).context("write the views of Services")
    };
    send(room, make).await
}

pub(super) async fn history(State(page): State<Page>, Query(wanted): Query<Wanted>) -> Response {
    let room = match page.rooms.wholes.enter() {
        Ok(room) => room,
        Err(full) => return full.into_response(),
    };
    let make = move || {
        serde_json::to_vec(&page.sources.agent.history.view(&wanted)).context("write the history")
    };
    send(room, make).await
}

async fn send(
    room: OwnedSemaphorePermit,
    make: impl FnOnce() -> Result<Vec<u8>> + Send + 'static,
) -> Response {
    // The room goes along, because a client that leaves does not end the work.
    let made = spawn_blocking(move || make().map(|whole| (whole, room)));
    match made.await.context("make the answer").flatten() {
        Ok((whole, room)) => {
            let json = [(header::CONTENT_TYPE, "application/json")];
            (json, Body::from_stream(pieces(whole, room))).into_response()
        }
        Err(error) => answer::<()>(Err(error)),
    }
}

/// Returns the pieces. One is made when the connection has room for it.
fn pieces(
    whole: Vec<u8>,
    room: OwnedSemaphorePermit,
) -> impl Stream<Item = Result<Bytes>> + Send + 'static {
    stream::unfold((whole, 0, room), |(whole, sent, room)| async move {
        let piece = whole
            .get(sent..)?
            .chunks(PIECE)
            .next()
            .map(Bytes::copy_from_slice)?;
        let sent = sent + piece.len();
        Some((Ok(piece), (whole, sent, room)))
    })
}
