//! Bounds the costly answers that are made at a time.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The room for one kind of answer.
#[derive(Clone)]
pub(super) struct Room {
    what: &'static str,
    size: usize,
    free: Arc<Semaphore>,
}

/// The rooms of one page.
#[derive(Clone)]
pub(super) struct Rooms {
    /// Each stream costs a look at every event while it lives.
    pub(super) events: Room,
    /// Each list keeps a snapshot of all Services until its reader has taken it.
    pub(super) rows: Room,
    /// Each answer is whole in memory until its reader has taken it.
    pub(super) wholes: Room,
    /// Each map walks the flow tables.
    pub(super) maps: Room,
    /// Each trace has the kernel verify a copy of the programs: about a second of one processor.
    pub(super) traces: Room,
}

impl Default for Rooms {
    fn default() -> Self {
        let room = |what, size| Room {
            what,
            size,
            free: Arc::new(Semaphore::new(size)),
        };
        Self {
            events: room("streams", 8),
            rows: room("lists", 8),
            wholes: room("answers", 8),
            maps: room("maps", 1),
            traces: room("traces", 1),
        }
    }
}

/// The answer for a client that must come again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Full {
    what: &'static str,
    size: usize,
}

impl Room {
    /// Returns a place that is free again when the result is dropped.
    pub(super) fn enter(&self) -> Result<OwnedSemaphorePermit, Full> {
        Arc::clone(&self.free)
            .try_acquire_owned()
            .map_err(|_| Full {
                what: self.what,
                size: self.size,
            })
    }
}

impl IntoResponse for Full {
    fn into_response(self) -> Response {
        let text = format!(
            "the limit of concurrent {} is reached: {}\n",
            self.what, self.size
        );
        (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
    }
}
