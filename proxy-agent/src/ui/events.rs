//! `/ui/api/events`: the events of `kpx monitor`, as server-sent events.
//!
//! The programs record only while someone watches, so the stream costs nothing once the browser has
//! left. A slow browser loses events and gets their number.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use futures::{Stream, stream};
use http::{StatusCode, header};
use proxy_common::counter::Reason;
use serde::Deserialize;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep_until};

use super::Page;
use crate::control::AgentHandle;
use crate::monitor::{Event, Feed, Filter, Limit};
use proxy_view::Names;
use proxy_view::object_name::ObjectName;

/// The maximum number of events per second for a browser. More would scroll away unread.
const PER_SECOND: u32 = 100;
/// The time after which a stream ends. The page then opens another stream; a forgotten client does
/// not.
const LIFE: Duration = Duration::from_secs(600);
/// The time without an event after which a comment is sent, because only a write shows that a
/// client is gone.
const SILENCE: Duration = Duration::from_secs(10);
/// The minimum time between two reads of the Services' names.
const NAMES_PERIOD: Duration = Duration::from_secs(1);

/// A browser's selection of events. A missing field does not restrict it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wanted {
    namespace: Option<String>,
    /// The Service as `[namespace/]name`.
    service: Option<String>,
    client: Option<String>,
    reason: Option<String>,
    /// The kind of event: `decisions` or `unserved`.
    kind: Option<String>,
    /// A lower limit of events per second.
    limit: Option<u32>,
}

pub(super) async fn events(State(page): State<Page>, Query(wanted): Query<Wanted>) -> Response {
    let limit = Limit::new(
        wanted
            .limit
            .map_or(PER_SECOND, |limit| limit.clamp(1, PER_SECOND)),
    );
    let filter = match wanted.filter() {
        Ok(filter) => filter,
        Err(why) => return (StatusCode::BAD_REQUEST, why).into_response(),
    };
    let room = match page.rooms.events.enter() {
        Ok(room) => room,
        Err(full) => return full.into_response(),
    };
    let now = Instant::now();
    let events = Events {
        feed: page.sources.watchers.feed(),
        filter,
        limit,
        namer: Namer {
            agent: page.sources.agent,
            names: Names::default(),
            next: now,
        },
        is_open: false,
        end: now + LIFE,
        _room: room,
    };
    (
        [(header::CONTENT_TYPE, "text/event-stream")],
        Body::from_stream(events.stream()),
    )
        .into_response()
}

impl Wanted {
    /// Returns the filter, or an error that names the invalid field.
    fn filter(self) -> Result<Filter, String> {
        let service = self
            .service
            .map(|name| name.parse::<ObjectName>())
            .transpose()?;
        let client = self.client.map(|text| {
            text.parse::<IpAddr>()
                .map_err(|_| format!("client {text:?} is not an address"))
        });
        let is_reason = |name: &String| Reason::ALL.iter().any(|reason| reason.name() == name);
        if let Some(name) = self.reason.as_ref().filter(|name| !is_reason(name)) {
            return Err(format!("unknown reason {name:?}"));
        }
        let kind = self.kind.as_deref();
        if let Some(kind) = kind.filter(|kind| !["decisions", "unserved"].contains(kind)) {
            return Err(format!("kind {kind:?} is neither decisions nor unserved"));
        }
        Ok(Filter {
            service,
            namespace: self.namespace,
            client: client.transpose()?,
            reason: self.reason,
            unserved: kind == Some("unserved"),
            decisions: kind == Some("decisions"),
        })
    }
}

/// A stream to one browser, which counts as a watcher until the stream ends.
struct Events {
    feed: Feed,
    filter: Filter,
    limit: Limit,
    namer: Namer,
    /// Set after the first text, which shows the browser that the stream is open.
    is_open: bool,
    end: Instant,
    _room: OwnedSemaphorePermit,
}

impl Events {
    fn stream(self) -> impl Stream<Item = Result<Bytes, Infallible>> + Send + 'static {
        stream::unfold(self, |mut events| async move {
            let text = events.next().await?;
            Some((Ok(Bytes::from(text)), events))
        })
    }

    /// Returns the next text; `None` at the end of the stream.
    async fn next(&mut self) -> Option<String> {
        if !std::mem::replace(&mut self.is_open, true) {
            return Some(": open\n\n".to_owned());
        }
        let sign_of_life = Instant::now() + SILENCE;
        loop {
            let event = tokio::select! {
                biased;
                () = sleep_until(self.end) => return None,
                () = sleep_until(sign_of_life) => return Some(": no event\n\n".to_owned()),
                event = self.feed.next() => event?,
            };
            if let Some(text) = self.text(event).await {
                return Some(text);
            }
        }
    }

    /// Returns the text for an event; `None` if the filter or the limit excludes the event.
    async fn text(&mut self, event: Arc<Event>) -> Option<String> {
        let mut event = Arc::unwrap_or_clone(event);
        self.namer.name(&mut event).await;
        if !self.filter.wants(&event) {
            return None;
        }
        let (lost, may) = self.limit.ask();
        let lost = (lost > 0).then(|| Event::lost(lost));
        let words: String = lost
            .iter()
            .chain(may.then_some(&event))
            .filter_map(of_event)
            .collect();
        (!words.is_empty()).then_some(words)
    }
}

fn of_event(event: &Event) -> Option<String> {
    Some(format!("data: {}\n\n", serde_json::to_string(event).ok()?))
}

/// Finds the names of Services.
struct Namer {
    agent: AgentHandle,
    names: Names,
    /// The earliest time at which an unknown Service, which may be new, causes another read of the
    /// names.
    next: Instant,
}

impl Namer {
    async fn name(&mut self, event: &mut Event) {
        event.name(&self.names);
        if event.lacks_name() && Instant::now() >= self.next {
            // On failure the event still shows addresses.
            if let Ok(names) = self.agent.names().await {
                self.names = Names::new(names);
            }
            self.next = Instant::now() + NAMES_PERIOD;
            event.name(&self.names);
        }
    }
}
