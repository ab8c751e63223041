//! Watches: the changes of a kind, as a stream of JSON lines.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use hyper::body::Frame;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, Interval, interval_at, sleep_until};

use super::failure::{Failure, Outcome};
use super::kinds::Kind;
use super::options::ListOptions;
use super::shared::{Shared, State};
use super::view::View;

/// The default lifetime of a watch, as in kube-apiserver.
const TIMEOUT: Duration = Duration::from_secs(1_800);

pub(crate) struct Watch {
    shared: Arc<Shared>,
    changes: watch::Receiver<()>,
    kind: &'static Kind,
    namespace: String,
    options: ListOptions,
    view: View,
    /// The last version that was processed.
    seen: u64,
    ready: VecDeque<Bytes>,
    /// True if the last ready line ends a list.
    ends_list: bool,
    last: Option<Bytes>,
    /// True once an event was written.
    begun: bool,
    disorder: bool,
    state: Running,
    deadline: Instant,
    bookmarks: Interval,
    cuts: u64,
    expiries: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Running {
    On,
    /// The watch has ended; ready events are still sent.
    Ended,
    /// The connection breaks.
    Cut,
}

impl Watch {
    /// Starts a watch at the requested version, or with all current objects.
    pub(crate) fn start(
        shared: &Arc<Shared>,
        kind: &'static Kind,
        namespace: &str,
        options: ListOptions,
        view: View,
    ) -> Outcome<Self> {
        let every = shared.bookmark_every;
        let mut changes = shared.changes();
        changes.mark_unchanged();
        shared.change(|state| {
            let store = &state.objects.store;
            let version = options.version.filter(|v| *v != 0);
            let starts_with_all = options.send_initial_events.unwrap_or(version.is_none());
            let start = version
                .filter(|_| options.send_initial_events.is_none())
                .unwrap_or(store.version());
            if let Some(version) =
                version.filter(|v| options.send_initial_events.is_some() && *v > store.version())
            {
                return Err(Failure::version_too_large(version, store.version()));
            }
            let expired = store.check_start(start).err();
            if let Some(failure) = expired.clone().filter(|_| state.faults.gone_by_status) {
                return Err(failure);
            }
            // Nothing may fail after this point: dropping a watch takes the lock, which is held
            // here.
            let life = state
                .faults
                .watch_life
                .unwrap_or(options.timeout.unwrap_or(TIMEOUT));
            let mut watch = Self {
                shared: shared.clone(),
                changes,
                kind,
                namespace: namespace.to_owned(),
                options,
                view,
                seen: start,
                ready: VecDeque::new(),
                ends_list: false,
                last: None,
                begun: false,
                disorder: state.faults.disorder,
                state: Running::On,
                deadline: Instant::now() + life,
                bookmarks: interval_at(Instant::now() + every, every),
                cuts: state.faults.cuts,
                expiries: state.faults.expiries,
            };
            match expired {
                Some(failure) => watch.end_with(&failure),
                None if starts_with_all => watch.push_all(state),
                None => {}
            }
            state.traffic.opened(kind.plural);
            Ok(watch)
        })
    }

    pub(crate) fn into_stream(self) -> impl Stream<Item = io::Result<Frame<Bytes>>> {
        futures::stream::unfold(self, async |mut watch| {
            watch.next().await.map(|item| (item, watch))
        })
    }

    async fn next(&mut self) -> Option<io::Result<Frame<Bytes>>> {
        loop {
            if let Some(line) = self.ready.pop_front() {
                if self.ready.is_empty() && std::mem::take(&mut self.ends_list) {
                    self.shared.meter.list_made();
                }
                return Some(Ok(Frame::data(line)));
            }
            match self.state {
                Running::On => {}
                Running::Ended => return None,
                Running::Cut => {
                    self.state = Running::Ended;
                    return Some(Err(io::Error::new(
                        io::ErrorKind::ConnectionAborted,
                        "watch was cut",
                    )));
                }
            }
            self.changes.mark_unchanged();
            let shared = self.shared.clone();
            shared.read(|state| self.collect(state));
            if !self.ready.is_empty() || self.state != Running::On {
                continue;
            }
            tokio::select! {
                // The sender lives as long as `shared`.
                _ = self.changes.changed() => {}
                () = sleep_until(self.deadline) => self.state = Running::Ended,
                _ = self.bookmarks.tick() => if self.options.bookmarks { self.push_bookmark(None) },
            }
        }
    }

    /// Turns the changes since the last call into events.
    fn collect(&mut self, state: &State) {
        if state.faults.cuts != self.cuts {
            self.state = Running::Cut;
            return;
        }
        if state.faults.expiries != self.expiries {
            let version = state.objects.store.version();
            return self.end_with(&Failure::expired(format!(
                "too old resource version: {} ({version})",
                self.seen
            )));
        }
        let changes = match state.objects.store.changes_after(self.seen) {
            Ok(changes) => changes,
            Err(failure) => return self.end_with(&failure),
        };
        for change in changes {
            self.seen = change.version;
            let is_in_scope = self.namespace.is_empty() || change.key.namespace == self.namespace;
            if !is_in_scope || !change.key.is_of(self.kind) {
                continue;
            }
            let selected = |object: &Option<Arc<Value>>| {
                object.clone().filter(|o| self.options.selector.matches(o))
            };
            // For this watch, an object that stops matching is deleted in its last matching form.
            match (selected(&change.old), selected(&change.new)) {
                (None, Some(new)) => self.push("ADDED", &new),
                (Some(_), Some(new)) => self.push("MODIFIED", &new),
                (Some(old), None) => {
                    let mut old = Value::clone(&old);
                    old["metadata"]["resourceVersion"] = json!(change.version.to_string());
                    self.push("DELETED", &old);
                }
                (None, None) => {}
            }
        }
    }

    fn push_all(&mut self, state: &State) {
        let objects = state
            .objects
            .store
            .objects(self.kind, &self.namespace)
            .map(|(_, object)| object.clone());
        let selected: Vec<_> = objects
            .filter(|object| self.options.selector.matches(object))
            .collect();
        selected
            .iter()
            .for_each(|object| self.push("ADDED", object));
        if self.options.send_initial_events == Some(true) && self.options.bookmarks {
            self.push_bookmark(Some(json!({"k8s.io/initial-events-end": "true"})));
            self.ends_list = true;
        }
    }

    fn push(&mut self, event: &str, object: &Value) {
        let shown = self.view.of(self.kind, object, !self.begun);
        self.begun = true;
        let event = Bytes::from(format!("{}\n", json!({"type": event, "object": shown})));
        let before = self.last.replace(event.clone());
        self.ready.push_back(event.clone());
        self.shared.meter.event_made(self.seen);
        if self.disorder {
            self.ready.extend([event].into_iter().chain(before));
        }
    }

    fn push_bookmark(&mut self, annotations: Option<Value>) {
        let mut metadata = json!({"resourceVersion": self.seen.to_string()});
        if let Some(annotations) = annotations {
            metadata["annotations"] = annotations;
        }
        // kube-apiserver writes a bookmark in this form: an object with only a version.
        let object = match (self.view, self.kind.kind) {
            (View::Table(_), _) => {
                json!({"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata,
                "columnDefinitions": [], "rows": []})
            }
            (View::Metadata, _) => {
                json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata})
            }
            (View::Whole, "EndpointSlice") => {
                json!({"kind": self.kind.kind, "apiVersion": self.kind.api_version(),
                "metadata": metadata, "addressType": "", "endpoints": null, "ports": null})
            }
            (View::Whole, "Service") => {
                json!({"kind": self.kind.kind, "apiVersion": self.kind.api_version(),
                "metadata": metadata, "spec": {}, "status": {"loadBalancer": {}}})
            }
            (View::Whole, _) => {
                json!({"kind": self.kind.kind, "apiVersion": self.kind.api_version(),
                "metadata": metadata, "spec": {}, "status": {}})
            }
        };
        self.push_line(&json!({"type": "BOOKMARK", "object": object}));
    }

    fn end_with(&mut self, failure: &Failure) {
        self.push_line(&json!({"type": "ERROR", "object": failure.status()}));
        self.state = Running::Ended;
    }

    fn push_line(&mut self, event: &Value) {
        self.ready.push_back(Bytes::from(format!("{event}\n")));
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared
            .change(|state| state.traffic.closed(self.kind.plural));
    }
}
