//! Limits the number of costly answers in progress.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The permits for one kind of answer.
#[derive(Clone)]
pub(super) struct Room {
    what: &'static str,
    size: usize,
    free: Arc<Semaphore>,
}

/// The permits of one page, by kind of answer.
#[derive(Clone)]
pub(super) struct Rooms {
    /// Each stream filters every event while it is open.
    pub(super) events: Room,
    /// Each list keeps a snapshot of all Services until the client has read the list.
    pub(super) rows: Room,
    /// Each stream makes all rows in each round, and remembers what it has sent.
    pub(super) changes: Room,
    /// Each answer is in memory until the client has read it.
    pub(super) wholes: Room,
    /// Each map reads the flow tables.
    pub(super) maps: Room,
    /// For each trace the kernel verifies a copy of the programs: about a second of one processor.
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
            changes: room("pages of the cluster", 8),
            wholes: room("answers", 8),
            maps: room("maps", 1),
            traces: room("traces", 1),
        }
    }
}

/// The answer for a client that must retry later.
#[derive(Clone, Copy, Debug)]
pub(super) struct Full {
    what: &'static str,
    size: usize,
}

impl Room {
    /// Returns a permit, which is free again when dropped.
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
