//! `/ui/api/services` and `/ui/api/history`: answers that are made as a whole, off the runtime's
//! threads.
//!
//! An answer can have megabytes, and clients elsewhere may request it. So each answer holds a
//! permit until the client has read it. This bounds the memory for clients that do not read.

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

/// The number of bytes per piece. Pieces are copies, so they do not keep the whole answer in
/// memory.
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
    // The work holds the permit, because it continues after a client has left.
    let made = spawn_blocking(move || make().map(|whole| (whole, room)));
    match made.await.context("make the answer").flatten() {
        Ok((whole, room)) => {
            let json = [(header::CONTENT_TYPE, "application/json")];
            (json, Body::from_stream(pieces(whole, room))).into_response()
        }
        Err(error) => answer::<()>(Err(error)),
    }
}

/// Returns the answer in pieces. Each piece is made when the connection can send it.
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
