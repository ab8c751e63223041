//! Streams the programs' per-packet decisions to watchers, which may be slow.

mod command;
mod event;
mod filter;
mod past;
mod text;

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::vec;

use anyhow::{Context, Result};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Query;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures::{StreamExt, stream};
use http::StatusCode;
use jiff::Timestamp;
use serde::Deserialize;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, watch};
use tokio::task::yield_now;
use tokio::time::{Duration, MissedTickBehavior, interval};

use proxy_datapath::Monitor;

pub use command::{MonitorArgs, monitor};
pub use event::Event;
pub(crate) use filter::Filter;
use past::{Past, Place};
pub(crate) use proxy_view::limit::Limit;

/// The number of events by which a watcher may lag. A slower watcher loses events.
const BEHIND: usize = 8_192;
/// The maximum number of records forwarded at a time. The agent's loop shares the thread, and a
/// flood brings endless records.
const BATCH: usize = 256;
/// The time between two reads of the programs' count of lost records.
const LOST_PERIOD: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub struct Watchers {
    events: broadcast::Sender<Arc<Event>>,
    number: watch::Sender<usize>,
    /// The past events; `None` unless enabled.
    past: Arc<Mutex<Option<Past>>>,
}

impl Default for Watchers {
    fn default() -> Self {
        Self::keeping(0)
    }
}

/// A watcher's request. Default: no past events, all events from now on.
#[derive(Debug, Deserialize)]
struct Wanted {
    /// The start time of past events.
    since: Option<Timestamp>,
    /// False: past events only.
    follow: Option<bool>,
}

/// Counts as a watcher while it exists.
struct Watcher(watch::Sender<usize>);

impl Drop for Watcher {
    fn drop(&mut self) {
        self.0.send_modify(|number| *number -= 1);
    }
}

impl Watchers {
    /// Creates a registry that keeps the last `most` decisions and as many refusals. The programs
    /// then record even without watchers.
    pub(crate) fn keeping(most: usize) -> Self {
        let past = Past::of(most);
        let number = watch::Sender::new(usize::from(most > 0));
        Self {
            events: broadcast::Sender::new(BEHIND),
            number,
            past: Arc::new(Mutex::new(past)),
        }
    }

    /// Forwards the programs' records to the watchers. The programs write records only while there
    /// are watchers. Returns only on failure.
    pub async fn serve(&self, monitor: Monitor) -> Result<()> {
        #[expect(
            deprecated,
            reason = "its successor is unsafe, for descriptors that change: the ring keeps its own"
        )]
        let mut monitor =
            AsyncFd::with_interest(monitor, Interest::READABLE).context("wait for records")?;
        let mut number = self.number.subscribe();
        number.mark_changed();
        let mut lost_period = interval(LOST_PERIOD);
        lost_period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut on = false;
        let mut more = false;
        let mut lost = 0;
        loop {
            tokio::select! {
                changed = number.changed() => {
                    changed.context("watchers are counted here")?;
                    let watched = *number.borrow_and_update() > 0;
                    if watched != on {
                        (on, more) = (watched, false);
                        monitor.get_mut().watch(on)?;
                        lost = monitor.get_ref().lost()?;
                    }
                }
                ready = monitor.readable_mut(), if on && !more => {
                    let mut ready = ready.context("wait for records")?;
                    // The flag is cleared before the read, so that a record after the last read
                    // sets it again.
                    ready.clear_ready();
                    more = self.hand_on(ready.get_inner_mut());
                }
                () = yield_now(), if more => more = self.hand_on(monitor.get_mut()),
                _ = lost_period.tick(), if on => {
                    let now = monitor.get_ref().lost()?;
                    if now > lost {
                        self.report(Event::lost(now - lost));
                        lost = now;
                    }
                }
            }
        }
    }

    /// Forwards some records. Returns true if more may be pending.
    fn hand_on(&self, monitor: &mut Monitor) -> bool {
        for _ in 0..BATCH {
            let Some(record) = monitor.record() else {
                return false;
            };
            if !event::is_housekeeping(&record) {
                self.report(Event::of(&record));
            }
        }
        true
    }

    /// Sends an event to the watchers, and stores it if past events are kept.
    pub(crate) fn report(&self, event: Event) {
        let event = Arc::new(event);
        let mut past = self.past();
        if let Some(past) = &mut *past {
            past.keep(Arc::clone(&event));
        }
        let _heard = self.events.send(event);
    }

    fn past(&self) -> MutexGuard<'_, Option<Past>> {
        self.past.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the path `/monitor`, which streams events as lines of JSON.
    pub fn router(&self) -> Router {
        let watchers = self.clone();
        Router::new().route(
            "/monitor",
            get(async move |Query(wanted): Query<Wanted>| watchers.response(&wanted)),
        )
    }

    fn response(self, wanted: &Wanted) -> Response {
        let follows = wanted.follow.unwrap_or(true);
        let place = match (wanted.since, &*self.past()) {
            (None, _) => None,
            (Some(since), Some(past)) => Some(past.place(since, follows)),
            (Some(_), None) => {
                let why = "this kpx keeps no history: start it with --monitor-history";
                return (StatusCode::NOT_FOUND, why).into_response();
            }
        };
        let feed = (follows && place.is_none()).then(|| self.feed());
        let reader = Reader {
            watchers: self,
            follows,
            place,
            batch: Vec::new().into_iter(),
            feed,
        };
        let lines = stream::unfold(reader, async |mut reader| {
            Some((reader.next().await?, reader))
        });
        let lines = lines.filter_map(async |event| line(&event));
        Body::from_stream(lines.map(Ok::<_, Infallible>)).into_response()
    }

    pub(crate) fn feed(&self) -> Feed {
        let events = self.events.subscribe();
        self.number.send_modify(|number| *number += 1);
        Feed {
            events,
            _watcher: Watcher(self.number.clone()),
        }
    }

    #[cfg(test)]
    pub(crate) fn number(&self) -> usize {
        *self.number.borrow()
    }
}

fn line(event: &Event) -> Option<Bytes> {
    let mut line = serde_json::to_vec(event).ok()?;
    line.push(b'\n');
    Some(Bytes::from(line))
}

/// A client's position in the past, and its feed after the past.
struct Reader {
    watchers: Watchers,
    follows: bool,
    /// The position in the past events; `None` after their end.
    place: Option<Place>,
    /// Past events about to be sent. They are few, because a client may stop reading.
    batch: vec::IntoIter<Arc<Event>>,
    feed: Option<Feed>,
}

impl Reader {
    async fn next(&mut self) -> Option<Arc<Event>> {
        if self.batch.len() == 0 {
            self.go_on();
        }
        match self.batch.next() {
            Some(event) => Some(event),
            None => self.feed.as_mut()?.next().await,
        }
    }

    /// Reads the next past events, or begins to follow.
    fn go_on(&mut self) {
        let past = self.watchers.past();
        let (Some(place), Some(past)) = (&mut self.place, &*past) else {
            return;
        };
        self.batch = past.next(place, BATCH).into_iter();
        if self.batch.len() == 0 {
            self.place = None;
            // The lock excludes an event between the past events and the feed.
            self.feed = self.follows.then(|| self.watchers.feed());
        }
    }
}

/// The events for one watcher, which counts as a watcher while it lives.
pub(crate) struct Feed {
    events: broadcast::Receiver<Arc<Event>>,
    _watcher: Watcher,
}

impl Feed {
    /// Returns the next event; `None` at the end of the agent. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Option<Arc<Event>> {
        match self.events.recv().await {
            Ok(event) => Some(event),
            Err(RecvError::Lagged(lost)) => Some(Arc::new(Event::lost(lost))),
            Err(RecvError::Closed) => None,
        }
    }
}
