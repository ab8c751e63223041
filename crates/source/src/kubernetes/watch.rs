//! Lists and watches one kind of object until the receiver is dropped.
//!
//! The module does the work of kube's `watcher`, with three additions for a proxy: a bad object
//! affects only itself, the position outlives the client, and missing events are detected.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::pin::pin;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{AsyncBufRead, FutureExt as _, TryStreamExt as _};
use kube::{Client, Resource as _};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use self::backoff::Backoff;
use self::comparisons::{Comparisons, Wait, compare, disorder};
use self::event::{Event, ParsedObject};
use self::failure::{StreamEnd, WatchEnd, is_lost};
use self::lines::lines;
use self::list::{Listed, Lister};
use self::marks::Sent;
use self::selection::{PAGE, Selection};
use self::watch_health::WatchHealth;
use super::client::{Clients, READ_TIMEOUT};
use super::errors::explain;
use super::outage::Outage;
use crate::health::Health;
use crate::watches::Watches;
use proxy_core::compact::Compact;
use proxy_core::input::{Input, ObjectName, Update};

mod backoff;
mod comparisons;
pub(super) mod event;
pub(super) mod failure;
mod lines;
mod list;
mod marks;
mod selection;
mod watch_health;

/// A watch on one kind of object, with its input variant and its position.
pub(super) struct Watch<K, I = Input> {
    input: fn(Update<K>) -> I,
    selection: Selection,
    lister: Lister,
    dispensable: bool,
    optional: bool,
    backoff: Backoff,
    /// The resource version up to which all changes were sent. `None`: a new list is due.
    position: Option<String>,
    /// Set if the server has dropped the position from its history.
    expired: bool,
    /// Set after a list, or [`Update::Refused`], was sent.
    delivered: bool,
    /// The objects of the wrong shape, with the errors. Their last readable versions stay in use.
    unreadable: BTreeMap<ObjectName, String>,
    sent: Sent,
    comparisons: Comparisons,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum WatchExit {
    ReceiverGone,
    /// The credentials are refused, and old enough to be read again.
    Unauthorized,
}

/// The time until a kind that the API server does not serve is requested again.
const UNSERVED_RETRY: Duration = Duration::from_secs(300);
/// The minimum duration of a watch that counts as success.
const SETTLED: Duration = Duration::from_secs(2);
/// The age from which refused credentials are read again. Changed files are read at once.
const CREDENTIALS_AGE: Duration = Duration::from_secs(60);

impl<K, I> Watch<K, I> {
    /// Creates a watch on every object of a kind, listed consistently.
    pub(super) fn new(input: fn(Update<K>) -> I) -> Self {
        Self {
            input,
            selection: Selection::default(),
            lister: Lister::default(),
            dispensable: false,
            optional: false,
            backoff: Backoff::default(),
            position: None,
            expired: false,
            delivered: false,
            unreadable: BTreeMap::new(),
            sent: Sent::default(),
            comparisons: Comparisons::default(),
        }
    }

    pub(super) fn labels(self, selector: &str) -> Self {
        Self {
            selection: self.selection.labels(selector),
            ..self
        }
    }

    pub(super) fn fields(self, selector: &str) -> Self {
        Self {
            selection: self.selection.fields(selector),
            ..self
        }
    }

    /// Lists from the server's cache, for kinds where a slightly older state is harmless. Otherwise
    /// servers before Kubernetes 1.31 read all objects of the kind from etcd.
    pub(super) fn cached(self) -> Self {
        Self {
            selection: self.selection.cached(),
            ..self
        }
    }

    pub(super) fn in_namespace(self, name: &'static str) -> Self {
        Self {
            selection: self.selection.in_namespace(name),
            ..self
        }
    }

    /// Restricts the watch to the object with this name.
    pub(super) fn named(self, name: &str) -> Self {
        Self {
            selection: self.selection.named(name),
            ..self
        }
    }

    /// Marks a kind that kpx can do without: the list is empty until the server serves the kind and
    /// permits it.
    pub(super) fn dispensable(self) -> Self {
        Self {
            dispensable: true,
            ..self
        }
    }

    /// Marks a dispensable kind. A denial before its first list is no problem.
    pub(super) fn optional(self) -> Self {
        Self {
            dispensable: true,
            optional: true,
            ..self
        }
    }
}

impl<K, I> Watch<K, I>
where
    K: Compact + Clone + Send + 'static,
{
    /// Returns the name of the watch in problems and metrics.
    fn kind() -> Cow<'static, str> {
        match K::WATCH {
            Some(name) => name.into(),
            None => K::Object::kind(&()),
        }
    }

    /// Runs until the receiver is gone or the credentials are refused. Cancel-safe: the next run
    /// continues; an interrupted list starts over.
    pub(super) async fn run(
        &mut self,
        clients: &Clients,
        inputs: &mpsc::Sender<I>,
        health: &Health,
        outage: &Outage,
    ) -> WatchExit {
        let began = Instant::now();
        self.lister = Lister::default();
        let mut watch_health = WatchHealth::new(Self::kind().into_owned(), health);
        loop {
            let mut is_of_list = false;
            let end = match self.position.clone() {
                Some(position) if !(self.expired && self.backoff.may_list()) => {
                    self.follow(&clients.paced, inputs, outage, &position, &mut watch_health)
                        .await
                }
                None if !self.backoff.may_list() => {
                    WatchEnd::Lost("waiting for the next list".to_owned())
                }
                _ => match self.list(&clients.limited, inputs, &mut watch_health).await {
                    Ok(()) => continue,
                    Err(end) => {
                        is_of_list = true;
                        end
                    }
                },
            };
            // A denial after a list is a fault: the listed objects stay in use, and become stale.
            let withheld = self.optional && self.position.is_none() && end.code() == Some(403);
            let unserved = self.dispensable && end.code() == Some(404) || withheld;
            let pause = match &end {
                WatchEnd::ReceiverGone => return WatchExit::ReceiverGone,
                WatchEnd::Failed(_) | WatchEnd::Late if unserved => UNSERVED_RETRY,
                WatchEnd::Failed(_) | WatchEnd::Late => self.pause_after(&end),
                WatchEnd::Lost(_) if is_of_list => self.backoff.after_failure(),
                WatchEnd::Closed(_) | WatchEnd::Lost(_) => self.pause_after(&end),
            };
            watch_health.ended(&end, unserved, self.backoff.ends());
            if self.dispensable
                && matches!(end.code(), Some(403 | 404))
                && !std::mem::replace(&mut self.delivered, true)
                && inputs.send((self.input)(Update::Refused)).await.is_err()
            {
                return WatchExit::ReceiverGone;
            }
            if outage.wait(pause, end.is_outage()).await {
                self.backoff.back();
            }
            if end.code() == Some(401) && began.elapsed() > CREDENTIALS_AGE {
                return WatchExit::Unauthorized;
            }
        }
    }

    /// Sends a list once it is complete.
    async fn list(
        &mut self,
        client: &Client,
        inputs: &mpsc::Sender<I>,
        watch_health: &mut WatchHealth<'_>,
    ) -> Result<(), WatchEnd> {
        let began = Instant::now();
        let Listed {
            objects,
            unreadable,
            marks,
            version,
            ..
        } = self.lister.list(client, &self.selection).await?;
        let objects = objects.into_values().collect();
        let update = match unreadable.is_empty() {
            true => Update::All(objects),
            false => Update::AllBut(objects, unreadable.keys().cloned().collect::<BTreeSet<_>>()),
        };
        inputs
            .send((self.input)(update))
            .await
            .map_err(|_| WatchEnd::ReceiverGone)?;
        self.backoff.listed(began);
        self.sent.list(marks, &version);
        (self.position, self.expired, self.delivered, self.unreadable) =
            (Some(version), false, true, unreadable);
        watch_health.listed(self.backoff.ends());
        watch_health.unreadable(&self.unreadable);
        Ok(())
    }

    /// Sends the events after `position`.
    async fn follow(
        &mut self,
        client: &Client,
        inputs: &mpsc::Sender<I>,
        outage: &Outage,
        position: &str,
        watch_health: &mut WatchHealth<'_>,
    ) -> WatchEnd {
        let began = Instant::now();
        let mut lines = match self.begin(client, position).await {
            Ok(answer) => pin!(lines(answer)),
            Err(end) => return self.record(end),
        };
        // The connection's own timeout misses a line that arrives byte by byte.
        let mut stalled = pin!(sleep(READ_TIMEOUT));
        let _open = Watches::of_process().open(&Self::kind());
        let mut settled = pin!(sleep(SETTLED));
        let mut holds = false;
        let wait = Wait {
            delay: self
                .comparisons
                .delay(watch_health.comparison_delay(self.sent.objects())),
            may_be_outage: false,
        };
        let mut comparison = self.compare(client, outage, wait);
        loop {
            let line = tokio::select! {
                line = lines.try_next() => {
                    stalled.as_mut().reset(Instant::now() + READ_TIMEOUT);
                    line
                }
                () = &mut stalled => {
                    let why = format!("no event was complete within {} s", READ_TIMEOUT.as_secs());
                    return WatchEnd::Closed(StreamEnd::Broken(why));
                }
                () = &mut settled, if !holds => {
                    (holds, self.expired) = (true, false);
                    self.backoff.settled();
                    watch_health.clear();
                    continue;
                }
                found = &mut comparison => {
                    let next = match found {
                        Ok(None) => {
                            watch_health.history_is_known();
                            Wait {
                                delay: self.comparisons.done(),
                                may_be_outage: false,
                            }
                        }
                        Ok(Some(why)) => {
                            let _next = self.comparisons.done();
                            let end = self.lose(why);
                            return self.record(end);
                        }
                        Err(end) => {
                            watch_health.comparison_failed(&end);
                            Wait {
                                delay: self.pause_after(&end),
                                may_be_outage: end.is_outage(),
                            }
                        }
                    };
                    comparison = self.compare(client, outage, next);
                    continue;
                }
            };
            let taken = match self.event(line, began) {
                Ok(event) => self.take(event, inputs, watch_health).await,
                Err(end) => Err(end),
            };
            if let Err(end) = taken {
                return self.record(end);
            }
        }
    }

    /// Requests the events after `position`. Returns an error unless the answer begins in time.
    async fn begin(
        &self,
        client: &Client,
        position: &str,
    ) -> Result<impl AsyncBufRead + use<K, I>, WatchEnd> {
        let request = self
            .selection
            .watch_request::<K>(&self.selection.watch, position);
        let request = request.map_err(kube::Error::BuildRequest)?;
        Ok(timeout(PAGE, client.request_stream(request)).await??)
    }

    /// Returns the event of a line, or the end of the watch. `began` is the start of the watch.
    fn event(
        &mut self,
        line: io::Result<Option<String>>,
        began: Instant,
    ) -> Result<Event<K>, WatchEnd> {
        match line {
            Ok(Some(line)) => match Event::read(&line) {
                Ok(Some(event)) => Ok(event),
                Ok(None) => Err(WatchEnd::Closed(StreamEnd::Broken(
                    "an event was cut off".to_owned(),
                ))),
                Err(error) => Err(self.lose(format!("unreadable event: {error}"))),
            },
            Ok(None) if began.elapsed() < self.life() => Err(WatchEnd::Closed(StreamEnd::Early)),
            Ok(None) => Err(WatchEnd::Closed(StreamEnd::InTime)),
            // The next watch from the same position would begin with the same line.
            Err(error) if error.kind() == ErrorKind::InvalidData => {
                Err(self.lose(format!("unreadable event: {error}")))
            }
            Err(error) => Err(WatchEnd::Closed(StreamEnd::Broken(error.to_string()))),
        }
    }

    fn pause_after(&mut self, end: &WatchEnd) -> Duration {
        // Behind a load balancer, the next server may have just started.
        if end.is_outage()
            || matches!(
                end,
                WatchEnd::Closed(StreamEnd::Early | StreamEnd::Broken(_))
            )
        {
            self.backoff.away();
        }
        match end {
            WatchEnd::Closed(_) | WatchEnd::Lost(_) => self.backoff.after_end(),
            _ if end.is_denial() => self.backoff.after_denial(),
            _ => self.backoff.after_failure(),
        }
    }

    /// Records a lost position for the next attempt.
    fn record(&mut self, end: WatchEnd) -> WatchEnd {
        self.expired |= matches!(end, WatchEnd::Lost(_));
        end
    }

    /// Drops the position, so that a new list fills the gap.
    fn lose(&mut self, why: String) -> WatchEnd {
        self.position = None;
        WatchEnd::Lost(why)
    }

    async fn take(
        &mut self,
        event: Event<K>,
        inputs: &mpsc::Sender<I>,
        watch_health: &WatchHealth<'_>,
    ) -> Result<(), WatchEnd> {
        let (object, gone) = match event {
            Event::Put(object) => (object, false),
            Event::Gone(object) => (object, true),
            Event::Bookmark(version) | Event::Listed(version) => return self.advance(version),
            // The server may have the version again later: a retry is cheap.
            Event::Error(status) if is_lost(&status) => {
                return Err(WatchEnd::Lost(explain(&kube::Error::Api(status))));
            }
            Event::Error(status) => return Err(self.lose(explain(&kube::Error::Api(status)))),
        };
        let ParsedObject {
            name,
            uid,
            version,
            object,
        } = object;
        self.check_order(&version)?;
        self.sent.event(&name, (!gone).then_some((&uid, &version)));
        let update = match object {
            _ if gone => Some(Update::Del(name.clone())),
            Ok(object) => Some(Update::Put(Box::new(object))),
            Err(why) => {
                self.unreadable.insert(name.clone(), why);
                None
            }
        };
        let is_news = match update {
            Some(update) => {
                inputs
                    .send((self.input)(update))
                    .await
                    .map_err(|_| WatchEnd::ReceiverGone)?;
                self.unreadable.remove(&name).is_some()
            }
            None => true,
        };
        if is_news {
            watch_health.unreadable(&self.unreadable);
        }
        self.advance(version)
    }

    fn advance(&mut self, version: String) -> Result<(), WatchEnd> {
        self.check_order(&version)?;
        self.sent.advance(&version);
        self.position = Some(version);
        Ok(())
    }

    /// Checks that resource versions of a kind grow (KEP-5504). If one is smaller, events are
    /// missing, or the server's data are older than kpx's.
    fn check_order(&mut self, version: &str) -> Result<(), WatchEnd> {
        match self
            .position
            .as_deref()
            .and_then(|position| disorder(version, position))
        {
            Some(why) => Err(self.lose(why)),
            None => Ok(()),
        }
    }

    /// Compares, after a wait, the sent objects with the server's metadata. Returns the
    /// contradiction, if any.
    fn compare(
        &self,
        client: &Client,
        outage: &Outage,
        wait: Wait,
    ) -> BoxFuture<'static, Result<Option<String>, WatchEnd>> {
        let client = client.clone();
        let outage = outage.clone();
        let sent = self.sent.clone();
        compare::<K>(
            client,
            outage,
            wait,
            sent,
            self.selection.clone(),
            self.lister.clone(),
        )
        .boxed()
    }

    /// Returns the minimum duration of an uninterrupted watch, with a margin for clock differences.
    fn life(&self) -> Duration {
        Duration::from_secs(
            self.selection
                .watch
                .timeout
                .unwrap_or_default()
                .saturating_sub(1)
                .into(),
        )
    }
}

#[cfg(test)]
mod tests;
