//! Lists objects: as a stream of events if the server supports that (by default in Kubernetes 1.32,
//! and from 1.34 on), else in pages. A stream takes one request, and neither side holds all of its
//! JSON in memory.

use std::collections::BTreeMap;
use std::io;
use std::pin::pin;
use std::time::Duration;

use futures::{AsyncReadExt as _, TryStreamExt as _};
use kube::api::{ListParams, WatchParams};
use kube::{Client, Resource as _};
use tokio::time::{Instant, timeout};
use tracing::debug;

use super::event::{Event, List, ParsedObject};
use super::failure::WatchEnd;
use super::lines::lines;
use super::marks::Marks;
use super::selection::{PAGE, Selection};
use proxy_core::compact::Compact;
use proxy_core::input::ObjectName;

/// The number of consecutive broken streams before pages are used: the network may break every long
/// stream.
const STREAMS: u8 = 3;
/// The timeout of the next event of a list: a server that treats a list as a watch stops sending.
/// It becomes [`PACE`] once the list brought [`LEAST`] in that time.
const SILENCE: Duration = Duration::from_secs(10);
/// The timeout for the start of an answer, and the time in which a list must bring [`LEAST`].
/// [`SILENCE`] misses a watch with constant changes.
const PACE: Duration = Duration::from_secs(60);
/// The minimum size of new objects in bytes that a list must bring in [`PACE`]. A watch seldom
/// brings as much.
const LEAST: usize = 1 << 20;
/// The time after which a server ends a stream, in seconds. API servers end a page after 60 s.
const LIFE: u32 = 1_200;
/// The timeout of a whole stream, for a server that does not end it.
const STREAM: Duration = Duration::from_secs(LIFE as u64 + 30);

/// The maximum number of objects in a list, five times that of 100,000 Services: an endless list
/// would exhaust memory. (Tests have less time.)
const OBJECTS: usize = if cfg!(test) { 30_000 } else { 500_000 };
/// The maximum size of a list's text in bytes.
const BYTES: usize = if cfg!(test) { 64 << 20 } else { 512 << 20 };

pub(super) struct Listed<K> {
    /// The size of the objects' text in bytes.
    bytes: usize,
    pub(super) objects: BTreeMap<ObjectName, K>,
    /// The objects of the wrong shape, with the errors.
    pub(super) unreadable: BTreeMap<ObjectName, String>,
    /// The uids and versions of all objects.
    pub(super) marks: Marks,
    pub(super) version: String,
}

#[derive(Clone)]
pub(super) struct Lister {
    /// The number of remaining attempts to list by stream.
    streams: u8,
}

impl Default for Lister {
    fn default() -> Self {
        Self { streams: STREAMS }
    }
}

impl Lister {
    pub(super) async fn list<K: Compact + Clone>(
        &mut self,
        client: &Client,
        selection: &Selection,
    ) -> Result<Listed<K>, WatchEnd> {
        let streamed = if self.streams > 0 {
            self.streamed(client, selection).await?
        } else {
            None
        };
        self.streams = if streamed.is_some() { STREAMS } else { 0 };
        match streamed {
            Some(listed) => Ok(listed),
            None => paged(client, selection).await,
        }
    }

    /// Lists by stream. Returns `None` if the server does not seem to stream lists, or is too slow.
    async fn streamed<K: Compact>(
        &mut self,
        client: &Client,
        selection: &Selection,
    ) -> Result<Option<Listed<K>>, WatchEnd> {
        let began = Instant::now();
        let listed = timeout(STREAM, self.stream(client, selection))
            .await
            .unwrap_or(Ok(None));
        if listed.is_err() && began.elapsed() >= PACE {
            // The network may cut all long streams, and each attempt takes its time.
            self.streams = self.streams.min(1);
        }
        if let Ok(None) = listed {
            debug!(kind = %K::Object::kind(&()), after = ?began.elapsed(), "lists are requested in pages");
        }
        listed
    }

    async fn stream<K: Compact>(
        &mut self,
        client: &Client,
        selection: &Selection,
    ) -> Result<Option<Listed<K>>, WatchEnd> {
        let params = WatchParams {
            send_initial_events: true,
            ..selection.watch.clone().timeout(LIFE)
        };
        let request = selection
            .watch_request::<K>(&params, "")
            .map_err(kube::Error::BuildRequest)?;
        let Ok(answer) = timeout(PACE, client.request_stream(request)).await else {
            return Ok(None);
        };
        let answer = answer.map_err(WatchEnd::from);
        // A complete stream restores the count. An outage does not reduce it. A server that refuses
        // a stream may serve pages.
        self.streams -= u8::from(!matches!(&answer, Err(end) if end.is_outage()));
        let mut lines = match answer {
            Ok(stream) => pin!(lines(stream)),
            Err(end) if matches!(end.code(), Some(400 | 422)) => return Ok(None),
            Err(end) => return Err(end),
        };
        let mut listed = Listed::default();
        let mut since = Instant::now();
        let mut new = 0_usize;
        let mut silence = SILENCE;
        loop {
            if since.elapsed() >= PACE {
                if new < LEAST {
                    return Ok(None);
                }
                (since, new, silence) = (Instant::now(), 0, PACE);
            }
            let Ok(line) = timeout(silence, lines.try_next()).await else {
                return Ok(None);
            };
            let line = line.map_err(kube::Error::ReadEvents)?.ok_or_else(cut_off)?;
            match Event::<K>::read(&line)
                .map_err(kube::Error::SerdeError)?
                .ok_or_else(cut_off)?
            {
                Event::Put(object) => {
                    let bytes = if listed.put(object) { line.len() } else { 0 };
                    new += bytes;
                    listed.grow(bytes)?;
                }
                // Deletions happen during the list. Objects that come and go are not progress.
                Event::Gone(object) => {
                    listed.remove(&object.name);
                    new = new.saturating_sub(line.len());
                }
                Event::Bookmark(_) => {}
                Event::Listed(version) => return Ok(Some(Listed { version, ..listed })),
                Event::Error(status) => return Err(kube::Error::Api(status).into()),
            }
        }
    }
}

async fn paged<K: Compact + Clone>(
    client: &Client,
    selection: &Selection,
) -> Result<Listed<K>, WatchEnd> {
    let mut listed = Listed::default();
    let mut page = selection.list.clone();
    loop {
        let request = selection
            .list_request::<K>(&page)
            .map_err(kube::Error::BuildRequest)?;
        let list = match timeout(PAGE, read_page(client, request, &mut listed)).await? {
            // The server compacted the list's version before the last page, and may do so again.
            // The list is therefore read in one piece, as in client-go.
            Err(WatchEnd::Lost(why)) if page.continue_token.is_some() => {
                debug!(kind = %K::Object::kind(&()), why, "listed again without pages");
                listed = Listed::default();
                page = ListParams {
                    limit: None,
                    ..selection.list.clone()
                };
                continue;
            }
            list => list?,
        };
        let (objects, version, more) = list.parts();
        for object in objects {
            listed.put(object);
        }
        listed.grow(0)?;
        page.continue_token = more;
        if page.continue_token.is_none() {
            return Ok(Listed { version, ..listed });
        }
    }
}

async fn read_page<K: Compact + Clone>(
    client: &Client,
    request: http::Request<Vec<u8>>,
    listed: &mut Listed<K>,
) -> Result<List<ParsedObject<K>>, WatchEnd> {
    let answer = client.request_stream(request).await?;
    let mut text = Vec::new();
    let most = (BYTES - listed.bytes) as u64 + 1;
    pin!(answer)
        .take(most)
        .read_to_end(&mut text)
        .await
        .map_err(kube::Error::ReadEvents)?;
    listed.grow(text.len())?;
    Ok(serde_json::from_slice(&text).map_err(kube::Error::SerdeError)?)
}

impl<K> Listed<K> {
    /// Counts more text. Returns an error for a list larger than any cluster's.
    fn grow(&mut self, bytes: usize) -> Result<(), kube::Error> {
        self.bytes += bytes;
        if self.bytes > BYTES || self.objects.len() + self.unreadable.len() > OBJECTS {
            let why = format!(
                "a list of more than {OBJECTS} objects or {} MiB: the previous state stays programmed",
                BYTES >> 20
            );
            return Err(kube::Error::ReadEvents(io::Error::new(
                io::ErrorKind::InvalidData,
                why,
            )));
        }
        Ok(())
    }

    /// Adds an object. A readable version survives a later unreadable version. Returns true for a
    /// new object.
    fn put(
        &mut self,
        ParsedObject {
            name,
            uid,
            version,
            object,
        }: ParsedObject<K>,
    ) -> bool {
        self.marks.put(&name, (&uid, &version));
        match object {
            Ok(object) => {
                let was_unreadable = self.unreadable.remove(&name).is_some();
                self.objects.insert(name, object).is_none() && !was_unreadable
            }
            Err(why) => {
                self.unreadable.insert(name.clone(), why).is_none()
                    && !self.objects.contains_key(&name)
            }
        }
    }

    fn remove(&mut self, name: &ObjectName) {
        self.marks.remove(name);
        self.objects.remove(name);
        self.unreadable.remove(name);
    }
}

impl<K> Default for Listed<K> {
    fn default() -> Self {
        let objects = BTreeMap::new();
        let unreadable = BTreeMap::new();
        Self {
            bytes: 0,
            objects,
            unreadable,
            marks: Marks::default(),
            version: String::new(),
        }
    }
}

fn cut_off() -> kube::Error {
    kube::Error::ReadEvents(io::Error::new(
        io::ErrorKind::UnexpectedEof,
        "a list was cut off",
    ))
}
