//! One kind of object, listed and watched until nobody listens.

use std::error::Error as _;
use std::fmt::Debug;
use std::mem;
use std::time::Duration;

use futures::StreamExt as _;
use kube::core::Status;
use kube::runtime::utils::Backoff as _;
use kube::runtime::watcher::{self, DefaultBackoff, Event, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};
use tower::ServiceBuilder;
use tracing::debug;

use crate::health::Health;
use crate::input::{Input, ObjectName, Update};
use crate::store::LAST_CHANGE_TRIGGER_TIME;

/// What is watched, and what it is sent as.
pub(super) struct Watch<K> {
    input: fn(Update<K>) -> Input,
    config: watcher::Config,
    dispensable: bool,
    slim: fn(&mut K),
}

/// Why a watch ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ended {
    ReceiverGone,
    /// The credentials are refused, and old enough to be read again.
    Unauthorized,
}

/// How long until a kind that the API server does not serve is asked for again.
const UNSERVED_RETRY: Duration = Duration::from_secs(300);
/// How long a resumed watch must hold to count as well: one that is answered and then broken at once does not.
const SETTLED: Duration = Duration::from_secs(2);
/// Credentials younger than this are not read again.
const CREDENTIALS_AGE: Duration = Duration::from_secs(60);
/// Requests per second and watch. Only a server that ends every watch at once gets so far.
const MAX_RATE: u64 = 10;
const PAGE_SIZE: u32 = 1000;

impl<K> Watch<K> {
    /// Everything of a kind, listed consistently in pages. (A streaming list would spare the server some memory, but
    /// servers before 1.32 refuse it; a consistent list comes from the server's cache since 1.31.)
    pub(super) fn new(input: fn(Update<K>) -> Input) -> Self {
        // The server ends watches at different times, so that not all nodes come back at once.
        let config = watcher::Config::default().page_size(PAGE_SIZE).timeout(rand::random_range(230..=290));
        Self { input, config, dispensable: false, slim: |_| () }
    }

    pub(super) fn labels(self, selector: &str) -> Self {
        Self { config: self.config.labels(selector), ..self }
    }

    pub(super) fn fields(self, selector: &str) -> Self {
        Self { config: self.config.fields(selector), ..self }
    }

    /// kpx can do without: as long as the server never served or allowed it, the list is empty.
    pub(super) fn dispensable(self) -> Self {
        Self { dispensable: true, ..self }
    }

    /// Drops fields that kpx never reads, beyond those that it reads of no object.
    pub(super) fn slimmed_by(self, slim: fn(&mut K)) -> Self {
        Self { slim, ..self }
    }
}

impl<K> Watch<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    pub(super) async fn run(self, client: &Client, inputs: &mpsc::Sender<Input>, health: &Health) -> Ended {
        let began = Instant::now();
        let (client, mut answered) = observed(client);
        let start = || watcher(Api::<K>::all(client.clone()), self.config.clone()).boxed();
        let mut events = start();
        let mut fold = Fold::default();
        let mut trouble = Trouble::new(format!("{} watch", K::kind(&())), health);
        loop {
            let event = tokio::select! {
                event = events.next() => event.expect("a watcher never ends"),
                () = settled(&mut answered), if trouble.unsettled => {
                    trouble.over();
                    continue;
                }
            };
            let (update, pause) = match event {
                Ok(event) => {
                    if !matches!(event, Event::Init) {
                        trouble.over();
                    }
                    (fold.event(event.modify(|object| self.slim(object))), Duration::ZERO)
                }
                Err(error) => {
                    answered.mark_unchanged();
                    let code = status(&error).map_or(0, |status| status.code);
                    let pause = trouble.begin(&error, self.dispensable && code == 404);
                    if code == 401 && began.elapsed() > CREDENTIALS_AGE {
                        sleep(pause).await;
                        return Ended::Unauthorized;
                    }
                    if loses_updates(&error) {
                        events = start();
                    }
                    let refused = self.dispensable && matches!(code, 403 | 404);
                    (if refused { fold.nothing() } else { None }, pause)
                }
            };
            if let Some(update) = update
                && inputs.send((self.input)(update)).await.is_err()
            {
                return Ended::ReceiverGone;
            }
            sleep(pause).await;
        }
    }

    fn slim(&self, object: &mut K) {
        let meta = object.meta_mut();
        meta.managed_fields = None;
        if let Some(annotations) = &mut meta.annotations {
            annotations.retain(|key, _| key == LAST_CHANGE_TRIGGER_TIME || key.starts_with("kpx.dev/"));
        }
        (self.slim)(object);
    }
}

/// Turns a watcher's events into updates: a list is sent when it is complete, or not at all.
struct Fold<K> {
    listed: Vec<K>,
    /// Something was sent before.
    delivered: bool,
}

impl<K> Default for Fold<K> {
    fn default() -> Self {
        Self { listed: Vec::new(), delivered: false }
    }
}

impl<K: Resource<DynamicType = ()>> Fold<K> {
    fn event(&mut self, event: Event<K>) -> Option<Update<K>> {
        match event {
            Event::Init => {
                self.listed = Vec::new();
                None
            }
            Event::InitApply(object) => {
                self.listed.push(object);
                None
            }
            Event::InitDone => {
                self.delivered = true;
                Some(Update::All(mem::take(&mut self.listed)))
            }
            Event::Apply(object) => Some(Update::Put(Box::new(object))),
            Event::Delete(object) => Some(Update::Del(ObjectName::from(&object))),
        }
    }

    /// Takes the place of a first list that will not come. What was once listed stays.
    fn nothing(&mut self) -> Option<Update<K>> {
        (!mem::replace(&mut self.delivered, true)).then(|| Update::All(Vec::new()))
    }
}

/// What is wrong with a watch, and how long to leave the server alone.
struct Trouble<'a> {
    what: String,
    health: &'a Health,
    backoff: DefaultBackoff,
    /// The last failure was the server's own word.
    reachable: bool,
    /// It failed, and has not yet been found well again. At first it has yet to be found well:
    /// an earlier watch, with other credentials, may have left a problem behind.
    unsettled: bool,
}

impl<'a> Trouble<'a> {
    fn new(what: String, health: &'a Health) -> Self {
        Self { what, health, backoff: DefaultBackoff::default(), reachable: true, unsettled: true }
    }

    fn begin(&mut self, error: &watcher::Error, unserved: bool) -> Duration {
        let why = explain(error);
        debug!(what = self.what, why, "watch failed");
        if unserved {
            self.over();
        } else if !is_routine(error) {
            self.health.begin(&self.what, why);
        }
        self.unsettled = true;
        if unserved {
            return UNSERVED_RETRY;
        }
        // A server that is back and first says that the watch is too old does not wait as long as one that was away.
        if !mem::replace(&mut self.reachable, status(error).is_some()) && self.reachable {
            self.backoff.reset();
        }
        // 0.8 s to 30 s, with jitter.
        self.backoff.next().expect("a back-off without end")
    }

    fn over(&mut self) {
        if mem::take(&mut self.unsettled) {
            self.health.end(&self.what);
            self.backoff.reset();
        }
    }
}

/// Connections break and resource versions grow old in the best of clusters. It is a problem if no new watch starts.
fn is_routine(error: &watcher::Error) -> bool {
    let broken = matches!(error, watcher::Error::WatchFailed(kube::Error::ReadEvents(_)));
    broken || status(error).is_some_and(|status| status.code == 410)
}

/// Whether only a new list can tell what happened. (The watcher lists anew by itself when a watch, once begun, says
/// that it is too old; not when it is refused for that, nor when an event could not be read.)
fn loses_updates(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::WatchError(_) => true,
        watcher::Error::WatchFailed(error) => !matches!(error, kube::Error::ReadEvents(_)),
        watcher::Error::WatchStartFailed(_)
        | watcher::Error::InitialListFailed(_)
        | watcher::Error::NoResourceVersion => status(error).is_some_and(|status| status.code == 410),
    }
}

/// What the server itself says of an error.
fn status(error: &watcher::Error) -> Option<&Status> {
    match error {
        watcher::Error::WatchError(status) => Some(status),
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status)) => Some(status),
        _ => None,
    }
}

/// The error and its causes, each once: many errors repeat what caused them.
fn explain(error: &watcher::Error) -> String {
    if let Some(Status { code, reason, message, .. }) = status(error) {
        return format!("{code} {reason}: {message}");
    }
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// A client of one watch, and what wakes when the server answers it with success. The watcher alone does not tell
/// that a watch was resumed: in a quiet cluster a problem that is over would stay for hours.
fn observed(client: &Client) -> (Client, watch::Receiver<()>) {
    let (succeeded, answered) = watch::channel(());
    let client = client.clone();
    let service = ServiceBuilder::new().rate_limit(MAX_RATE, Duration::from_secs(1)).service_fn(move |request| {
        let (client, succeeded) = (client.clone(), succeeded.clone());
        async move {
            let response = client.send(request).await?;
            if response.status().is_success() {
                succeeded.send_replace(());
            }
            Ok::<_, kube::Error>(response)
        }
    });
    (Client::new(service, "default"), answered)
}

async fn settled(answered: &mut watch::Receiver<()>) {
    answered.changed().await.expect("the watch has the client that holds the sender");
    sleep(SETTLED).await;
}

#[cfg(test)]
mod tests;
