//! Lists objects: as a stream of events where the server supports that (Kubernetes 1.32), else in pages. A stream takes
//! one request, and neither side ever has more than one object of it in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::pin::pin;
use std::time::Duration;

use futures::{AsyncBufReadExt as _, TryStreamExt as _};
use kube::api::{ListParams, WatchParams};
use kube::core::ObjectList;
use kube::{Client, Resource as _};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tracing::debug;

use super::event::{Event, Lenient};
use super::failure::Over;
use super::trouble::Trouble;
use super::{PAGE, Watch};
use crate::compact::Kept;
use crate::input::{Input, ObjectName, Update};

/// The number of streams in a row that may break before pages are asked for: the network may never let a stream reach
/// its end.
pub(super) const STREAMS: u8 = 3;
/// The timeout of the next event of a list: a server that takes a list for a watch has no more to say.
const SILENCE: Duration = Duration::from_secs(10);
/// The timeout of a whole list: where changes never cease, a watch is never silent.
const STREAM: Duration = Duration::from_secs(60);

/// A list of objects.
struct Listed<K> {
    objects: BTreeMap<ObjectName, K>,
    /// The objects of the wrong shape, with the errors.
    unreadable: BTreeMap<ObjectName, String>,
    version: String,
}

impl<K: Kept + Clone + Send + 'static> Watch<K> {
    /// Sends a list when it is complete, or not at all.
    pub(super) async fn list(
        &mut self,
        client: &Client,
        inputs: &mpsc::Sender<Input>,
        trouble: &mut Trouble<'_>,
    ) -> Result<(), Over> {
        let streamed = if self.streams > 0 { self.streamed(client).await? } else { None };
        self.streams = if streamed.is_some() { STREAMS } else { 0 };
        let Listed { objects, unreadable, version } = match streamed {
            Some(listed) => listed,
            None => self.paged(client).await?,
        };
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

    /// Lists by stream. Returns None if the server does not seem to stream lists.
    async fn streamed(&mut self, client: &Client) -> Result<Option<Listed<K>>, Over> {
        let listed = timeout(STREAM, self.stream(client)).await.unwrap_or(Ok(None));
        if let Ok(None) = listed {
            debug!(kind = %K::Object::kind(&()), "the server does not stream lists");
        }
        listed
    }

    async fn stream(&mut self, client: &Client) -> Result<Option<Listed<K>>, Over> {
        let params = WatchParams { send_initial_events: true, ..self.watch.clone() };
        let request = self.request().watch(&params, "").map_err(kube::Error::BuildRequest)?;
        let answer = client.request_stream(request).await.map_err(Over::from);
        // The count is restored if the stream reaches its end. An outage does not count against streams. A server that
        // refuses a stream may serve pages.
        self.streams -= u8::from(!matches!(&answer, Err(over) if over.is_outage()));
        let mut lines = match answer {
            Ok(stream) => pin!(stream.lines()),
            Err(over) if matches!(over.code(), Some(400 | 422)) => return Ok(None),
            Err(over) => return Err(over),
        };
        let mut listed = Listed::default();
        loop {
            let Ok(line) = timeout(SILENCE, lines.try_next()).await else { return Ok(None) };
            let line = line.map_err(kube::Error::ReadEvents)?.ok_or_else(cut_off)?;
            match Event::<K>::read(&line).map_err(kube::Error::SerdeError)?.ok_or_else(cut_off)? {
                Event::Put(object) => listed.put(object),
                // Such events happen during the list.
                Event::Gone(object) => listed.remove(&object.name),
                Event::Bookmark(_) => {}
                Event::Listed(version) => return Ok(Some(Listed { version, ..listed })),
                Event::Error(status) => return Err(kube::Error::Api(status).into()),
            }
        }
    }

    async fn paged(&self, client: &Client) -> Result<Listed<K>, Over> {
        let (mut listed, mut page) = (Listed::default(), self.list.clone());
        loop {
            let request = self.request().list(&page).map_err(kube::Error::BuildRequest)?;
            let answer = timeout(PAGE, client.request::<ObjectList<Lenient<K>>>(request)).await?;
            let list = match answer.map_err(Over::from) {
                // Pages that take longer than the server remembers would never end, so the list is read in one piece,
                // as in client-go.
                Err(Over::Lost(why)) if page.continue_token.is_some() => {
                    debug!(kind = %K::Object::kind(&()), why, "listed again in one piece");
                    listed = Listed::default();
                    page = ListParams { limit: None, ..self.list.clone() };
                    continue;
                }
                list => list?,
            };
            list.items.into_iter().for_each(|object| listed.put(object));
            page.continue_token = list.metadata.continue_.filter(|token| !token.is_empty());
            if page.continue_token.is_none() {
                let version = list.metadata.resource_version.unwrap_or_default();
                return Ok(Listed { version, ..listed });
            }
        }
    }
}

impl<K> Listed<K> {
    /// Adds an object. A readable version stays, even if a later one is unreadable.
    fn put(&mut self, Lenient { name, object, .. }: Lenient<K>) {
        match object {
            Ok(object) => {
                self.unreadable.remove(&name);
                self.objects.insert(name, object);
            }
            Err(why) => drop(self.unreadable.insert(name, why)),
        }
    }

    fn remove(&mut self, name: &ObjectName) {
        self.objects.remove(name);
        self.unreadable.remove(name);
    }
}

impl<K> Default for Listed<K> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), unreadable: BTreeMap::new(), version: String::new() }
    }
}

fn cut_off() -> kube::Error {
    kube::Error::ReadEvents(io::Error::new(io::ErrorKind::UnexpectedEof, "a list was cut off"))
}
