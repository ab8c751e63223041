//! Lists objects: as a stream of events where the server supports that (Kubernetes 1.32), else in pages. A stream takes
//! one request, and neither side ever has more than one object of it in memory.

use std::collections::BTreeMap;
use std::io;
use std::pin::pin;
use std::time::Duration;

use futures::TryStreamExt as _;
use kube::api::{ListParams, WatchParams};
use kube::core::ObjectList;
use kube::{Client, Resource as _};
use tokio::time::{Instant, timeout};
use tracing::debug;

use super::event::{Event, ParsedObject};
use super::failure::WatchEnd;
use super::lines::lines;
use super::selection::{PAGE, Selection, request};
use proxy_core::compact::Compact;
use proxy_core::input::ObjectName;

/// The number of streams in a row that may break before pages are asked for: the network may never let a stream reach
/// its end.
const STREAMS: u8 = 3;
/// The timeout of the next event of a list: a server that takes a list for a watch has no more to say.
const SILENCE: Duration = Duration::from_secs(10);
/// The timeout of an answer, and the time in which a list has to bring [`LEAST`] objects. Where changes never cease, a
/// watch is never silent.
const STREAM: Duration = Duration::from_secs(60);
/// The number of objects that a list of a slow server or network brings in [`STREAM`], and new objects of a watch do not.
const LEAST: usize = 600;

/// A list of objects.
pub(super) struct Listed<K> {
    pub(super) objects: BTreeMap<ObjectName, K>,
    /// The objects of the wrong shape, with the errors.
    pub(super) unreadable: BTreeMap<ObjectName, String>,
    pub(super) version: String,
}

/// The way in which lists are asked for over one connection.
pub(super) struct Lister {
    /// How many more streaming lists are tried.
    streams: u8,
}

impl Default for Lister {
    fn default() -> Self {
        Self { streams: STREAMS }
    }
}

impl Lister {
    /// A complete list, or none.
    pub(super) async fn list<K: Compact + Clone>(
        &mut self,
        client: &Client,
        selection: &Selection,
    ) -> Result<Listed<K>, WatchEnd> {
        let streamed = if self.streams > 0 { self.streamed(client, selection).await? } else { None };
        self.streams = if streamed.is_some() { STREAMS } else { 0 };
        match streamed {
            Some(listed) => Ok(listed),
            None => paged(client, selection).await,
        }
    }

    /// Lists by stream. Returns None if the server does not seem to stream lists.
    async fn streamed<K: Compact>(
        &mut self,
        client: &Client,
        selection: &Selection,
    ) -> Result<Option<Listed<K>>, WatchEnd> {
        let listed = self.stream(client, selection).await;
        if let Ok(None) = listed {
            debug!(kind = %K::Object::kind(&()), "the server does not stream lists");
        }
        listed
    }

    async fn stream<K: Compact>(
        &mut self,
        client: &Client,
        selection: &Selection,
    ) -> Result<Option<Listed<K>>, WatchEnd> {
        let params = WatchParams { send_initial_events: true, ..selection.watch.clone() };
        let request = request::<K>().watch(&params, "").map_err(kube::Error::BuildRequest)?;
        let Ok(answer) = timeout(STREAM, client.request_stream(request)).await else { return Ok(None) };
        let answer = answer.map_err(WatchEnd::from);
        // The count is restored if the stream reaches its end. An outage does not count against streams. A server that
        // refuses a stream may serve pages.
        self.streams -= u8::from(!matches!(&answer, Err(end) if end.is_outage()));
        let mut lines = match answer {
            Ok(stream) => pin!(lines(stream)),
            Err(end) if matches!(end.code(), Some(400 | 422)) => return Ok(None),
            Err(end) => return Err(end),
        };
        let mut listed = Listed::default();
        let (mut since, mut had) = (Instant::now(), 0);
        loop {
            if since.elapsed() >= STREAM {
                let has = listed.len();
                if has < had + LEAST {
                    return Ok(None);
                }
                (since, had) = (Instant::now(), has);
            }
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
}

async fn paged<K: Compact + Clone>(client: &Client, selection: &Selection) -> Result<Listed<K>, WatchEnd> {
    let (mut listed, mut page) = (Listed::default(), selection.list.clone());
    loop {
        let request = request::<K>().list(&page).map_err(kube::Error::BuildRequest)?;
        let answer = timeout(PAGE, client.request::<ObjectList<ParsedObject<K>>>(request)).await?;
        let list = match answer.map_err(WatchEnd::from) {
            // Pages that take longer than the server remembers would never end, so the list is read in one piece,
            // as in client-go.
            Err(WatchEnd::Lost(why)) if page.continue_token.is_some() => {
                debug!(kind = %K::Object::kind(&()), why, "listed again in one piece");
                listed = Listed::default();
                page = ListParams { limit: None, ..selection.list.clone() };
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

impl<K> Listed<K> {
    /// Adds an object. A readable version stays, even if a later one is unreadable.
    fn put(&mut self, ParsedObject { name, object, .. }: ParsedObject<K>) {
        match object {
            Ok(object) => {
                self.unreadable.remove(&name);
                self.objects.insert(name, object);
            }
            Err(why) => drop(self.unreadable.insert(name, why)),
        }
    }

    /// Counts an object twice whose later version is unreadable.
    fn len(&self) -> usize {
        self.objects.len() + self.unreadable.len()
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
