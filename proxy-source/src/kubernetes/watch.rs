//! Lists and watches one kind of object until the receiver is gone.
//!
//! The module does the same as kube's `watcher`, and three things that a proxy needs beyond it. A bad object costs only
//! itself, the position outlives the client, and gaps between events are noticed.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::time::Duration;

use futures::future::{BoxFuture, OptionFuture};
use futures::{AsyncBufReadExt as _, FutureExt as _, TryStreamExt as _};
use kube::core::{ObjectList, PartialObjectMeta};
use kube::{Client, Resource as _};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tracing::debug;

use self::event::{Event, Lenient};
use self::failure::{End, Over, explain, is_lost};
use self::list::{Listed, Lister};
use self::pace::Pace;
use self::selection::{PAGE, Selection, request};
use self::trouble::Trouble;
use super::client::Clients;
use super::outage::Outage;
use crate::health::Health;
use crate::watches::Watches;
use proxy_core::compact::Kept;
use proxy_core::input::{Input, ObjectName, Update};

mod event;
pub(super) mod failure;
mod list;
mod pace;
mod selection;
mod trouble;

/// A watch on one kind of object, with its input variant and its position.
pub(super) struct Watch<K> {
    input: fn(Update<K>) -> Input,
    selection: Selection,
    lister: Lister,
    dispensable: bool,
    pace: Pace,
    /// The version up to which everything was sent. None: a new list is needed.
    position: Option<String>,
    /// Set if the server says that it no longer knows the position.
    expired: bool,
    /// Set after a list was sent, or its refusal.
    delivered: bool,
    /// The objects of the wrong shape, with the errors. The last readable version stays in force.
    unreadable: BTreeMap<ObjectName, String>,
}

/// The reason why a run ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ended {
    ReceiverGone,
    /// The credentials are refused, and old enough to be read again.
    Unauthorized,
}

/// The time until a kind that the API server does not serve is asked for again.
const UNSERVED_RETRY: Duration = Duration::from_secs(300);
/// The time that a watch must hold to count: a watch that breaks at once does not.
const SETTLED: Duration = Duration::from_secs(2);
/// The age before which credentials are not read again, unless their files have changed.
const CREDENTIALS_AGE: Duration = Duration::from_secs(60);

impl<K> Watch<K> {
    /// Creates a watch on every object of a kind, listed consistently.
    pub(super) fn new(input: fn(Update<K>) -> Input) -> Self {
        Self {
            input,
            selection: Selection::default(),
            lister: Lister::default(),
            dispensable: false,
            pace: Pace::default(),
            position: None,
            expired: false,
            delivered: false,
            unreadable: BTreeMap::new(),
        }
    }

    pub(super) fn labels(self, selector: &str) -> Self {
        Self { selection: self.selection.labels(selector), ..self }
    }

    pub(super) fn fields(self, selector: &str) -> Self {
        Self { selection: self.selection.fields(selector), ..self }
    }

    /// Restricts the watch to the one object of that name.
    pub(super) fn named(self, name: &str) -> Self {
        Self { selection: self.selection.named(name), ..self }
    }

    /// Marks a kind that kpx can do without: until the server serves and allows it, the list is empty.
    pub(super) fn dispensable(self) -> Self {
        Self { dispensable: true, ..self }
    }
}

impl<K> Watch<K>
where
    K: Kept + Clone + Send + 'static,
{
    /// Runs until the end. The future may be cancelled and go on with another client: nothing is lost.
    pub(super) async fn run(
        &mut self,
        clients: &Clients,
        inputs: &mpsc::Sender<Input>,
        health: &Health,
        outage: &Outage,
    ) -> Ended {
        let began = Instant::now();
        self.lister = Lister::default();
        let mut trouble = Trouble::new(K::Object::kind(&()).into_owned(), health);
        loop {
            let mut is_of_list = false;
            let over = match self.position.clone() {
                Some(position) if !(self.expired && self.pace.may_list()) => {
                    self.follow(&clients.paced, inputs, outage, &position, &mut trouble).await
                }
                None if !self.pace.may_list() => Over::Lost("waiting for the next list".to_owned()),
                _ => match self.list(&clients.limited, inputs, &mut trouble).await {
                    Ok(()) => continue,
                    Err(over) => {
                        is_of_list = true;
                        over
                    }
                },
            };
            let unserved = self.dispensable && over.code() == Some(404);
            let pause = match &over {
                Over::ReceiverGone => return Ended::ReceiverGone,
                Over::Failed(_) | Over::Late if unserved => UNSERVED_RETRY,
                Over::Failed(_) | Over::Late => self.pause_after(&over),
                Over::Lost(_) if is_of_list => self.pace.after_failure(),
                Over::Ended(_) | Over::Lost(_) => self.pause_after(&over),
            };
            trouble.met(&over, unserved, self.pace.ends());
            if self.dispensable
                && matches!(over.code(), Some(403 | 404))
                && !std::mem::replace(&mut self.delivered, true)
                && inputs.send((self.input)(Update::Refused)).await.is_err()
            {
                return Ended::ReceiverGone;
            }
            if outage.wait(pause, over.is_outage()).await {
                self.pace.back();
            }
            if over.code() == Some(401) && began.elapsed() > CREDENTIALS_AGE {
                return Ended::Unauthorized;
            }
        }
    }

    /// Sends a list when it is complete, or not at all.
    async fn list(
        &mut self,
        client: &Client,
        inputs: &mpsc::Sender<Input>,
        trouble: &mut Trouble<'_>,
    ) -> Result<(), Over> {
        let Listed { objects, unreadable, version } = self.lister.list(client, &self.selection).await?;
        let objects = objects.into_values().collect();
        let update = match unreadable.is_empty() {
            true => Update::All(objects),
            false => Update::AllBut(objects, unreadable.keys().cloned().collect::<BTreeSet<_>>()),
        };
        inputs.send((self.input)(update)).await.map_err(|_| Over::ReceiverGone)?;
        self.pace.listed();
        (self.position, self.expired, self.delivered, self.unreadable) = (Some(version), false, true, unreadable);
        trouble.listed(self.pace.ends());
        trouble.unreadable(&self.unreadable);
        Ok(())
    }

    /// Sends the events after `position`.
    async fn follow(
        &mut self,
        client: &Client,
        inputs: &mpsc::Sender<Input>,
        outage: &Outage,
        position: &str,
        trouble: &mut Trouble<'_>,
    ) -> Over {
        let began = Instant::now();
        let request = match request::<K>().watch(&self.selection.watch, position) {
            Ok(request) => request,
            Err(error) => return Over::Failed(kube::Error::BuildRequest(error)),
        };
        let mut lines = match client.request_stream(request).await {
            Ok(stream) => pin!(stream.lines()),
            Err(error) => return self.note(Over::from(error)),
        };
        let _open = Watches::of_process().open(&K::Object::kind(&()));
        let mut settled = pin!(sleep(SETTLED));
        let mut holds = false;
        let mut look_at = pin!(outage.wait(trouble.before_look(), false));
        let mut look = None;
        loop {
            let line = tokio::select! {
                line = lines.try_next() => line,
                () = &mut settled, if !holds => {
                    (holds, self.expired) = (true, false);
                    self.pace.settled();
                    trouble.over();
                    continue;
                }
                _ = &mut look_at, if trouble.is_in_doubt() && look.is_none() => {
                    look = Some(self.look(client));
                    continue;
                }
                Some(found) = OptionFuture::from(look.as_mut()) => {
                    look = None;
                    match found {
                        Ok(None) => trouble.is_back(),
                        Ok(Some(why)) => {
                            let over = self.lose(why);
                            return self.note(over);
                        }
                        Err(over) => {
                            trouble.untold(&over);
                            look_at.set(outage.wait(self.pause_after(&over), over.is_outage()));
                        }
                    }
                    continue;
                }
            };
            let taken = match line {
                Ok(Some(line)) => match Event::read(&line) {
                    Ok(Some(event)) => self.take(event, inputs, trouble).await,
                    Ok(None) => Err(Over::Ended(End::Broken("an event was cut off".to_owned()))),
                    Err(error) => Err(self.lose(format!("unreadable event: {error}"))),
                },
                Ok(None) if began.elapsed() < self.life() => Err(Over::Ended(End::Early)),
                Ok(None) => Err(Over::Ended(End::InTime)),
                Err(error) => Err(Over::Ended(End::Broken(error.to_string()))),
            };
            if let Err(over) = taken {
                return self.note(over);
            }
        }
    }

    /// Returns the wait before the next attempt.
    fn pause_after(&mut self, over: &Over) -> Duration {
        // Where servers stand in for each other, the next one may have just started.
        if over.is_outage() || matches!(over, Over::Ended(End::Early | End::Broken(_))) {
            self.pace.away();
        }
        match over {
            Over::Ended(_) | Over::Lost(_) => self.pace.after_end(),
            _ if over.is_denial() => self.pace.after_denial(),
            _ => self.pace.after_failure(),
        }
    }

    /// Notes a lost position for the next attempt.
    fn note(&mut self, over: Over) -> Over {
        self.expired |= matches!(over, Over::Lost(_));
        over
    }

    /// Forgets the position. Only a new list can tell what is missing.
    fn lose(&mut self, why: String) -> Over {
        self.position = None;
        Over::Lost(why)
    }

    async fn take(&mut self, event: Event<K>, inputs: &mpsc::Sender<Input>, trouble: &Trouble<'_>) -> Result<(), Over> {
        let (object, gone) = match event {
            Event::Put(object) => (object, false),
            Event::Gone(object) => (object, true),
            Event::Bookmark(version) | Event::Listed(version) => return self.advance(version),
            // The server may know the version again later: asking again is cheap.
            Event::Error(status) if is_lost(&status) => return Err(Over::Lost(explain(&kube::Error::Api(status)))),
            Event::Error(status) => return Err(self.lose(explain(&kube::Error::Api(status)))),
        };
        let Lenient { name, version, object } = object;
        self.check_order(&version)?;
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
                inputs.send((self.input)(update)).await.map_err(|_| Over::ReceiverGone)?;
                self.unreadable.remove(&name).is_some()
            }
            None => true,
        };
        if is_news {
            trouble.unreadable(&self.unreadable);
        }
        self.advance(version)
    }

    fn advance(&mut self, version: String) -> Result<(), Over> {
        self.check_order(&version)?;
        self.position = Some(version);
        Ok(())
    }

    /// Checks that versions of a kind grow (KEP-5504). Otherwise events are missing, or the server's data are older
    /// than ours.
    fn check_order(&mut self, version: &str) -> Result<(), Over> {
        match self.position.as_deref().and_then(|position| disorder(version, position)) {
            Some(why) => Err(self.lose(why)),
            None => Ok(()),
        }
    }

    /// Probes the server's version. After the server was away, its data may have been restored from a backup. The
    /// server then grants a watch from a version that is yet to come, and is silent until that version. So this request
    /// asks for the version beside the watch, without waiting for the watch. Returns the contradiction, if there is
    /// one.
    fn look(&self, client: &Client) -> BoxFuture<'static, Result<Option<String>, Over>> {
        let request = request::<K>().list_metadata(&self.selection.look).map_err(kube::Error::BuildRequest);
        let (client, position) = (client.clone(), self.position.clone().unwrap_or_default());
        let look = async move {
            let list: ObjectList<PartialObjectMeta<K::Object>> = timeout(PAGE, client.request(request?)).await??;
            let now = list.metadata.resource_version.unwrap_or_default();
            debug!(kind = %K::Object::kind(&()), position, now, "probed the server's version");
            Ok(disorder(&now, &position))
        };
        look.boxed()
    }

    /// Returns the shortest life of a watch that is not interrupted. The margin allows for different clocks.
    fn life(&self) -> Duration {
        Duration::from_secs(self.selection.watch.timeout.unwrap_or_default().saturating_sub(1).into())
    }
}

/// Describes a version that is older than an earlier one. Other servers than Kubernetes' own may have versions that are
/// no numbers.
fn disorder(version: &str, after: &str) -> Option<String> {
    let is_older =
        matches!((version.parse::<u64>(), after.parse::<u64>()), (Ok(version), Ok(after)) if version < after);
    is_older.then(|| format!("version {version} after {after}"))
}

#[cfg(test)]
mod tests;
