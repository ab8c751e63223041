//! An API server with prepared answers, which records the requests.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::{Stream, StreamExt as _, TryStreamExt as _, stream};
use http::{Request, Response};
use http_body_util::StreamBody;
use hyper::body::Frame;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};
use tower::service_fn;

use super::super::*;

pub(super) fn service(name: &str, version: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Service", "spec": {},
        "metadata": {"name": name, "namespace": "default", "resourceVersion": version}})
}

pub(super) fn list<const N: usize>(version: &str, more: &str, items: [Value; N]) -> Value {
    json!({"apiVersion": "v1", "kind": "ServiceList", "items": items.to_vec(),
        "metadata": {"resourceVersion": version, "continue": more}})
}

pub(super) fn failure(code: u16) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Failed", "message": "no such luck", "code": code})
}

pub(super) fn show<K: Compact>(update: &Update<K>) -> String {
    let name = |object: &K| object.name().name.to_string();
    let names = |all: &[K]| {
        std::iter::once("all".to_owned())
            .chain(all.iter().map(name))
            .collect::<Vec<_>>()
            .join(" ")
    };
    match update {
        Update::All(all) => names(all),
        Update::AllBut(all, unreadable) => {
            let unreadable: Vec<_> = unreadable.iter().map(ToString::to_string).collect();
            format!("{}, but {}", names(all), unreadable.join(" "))
        }
        Update::Refused => "refused".to_owned(),
        Update::Put(object) => format!("put {}", name(object)),
        Update::Del(name) => format!("del {name}"),
    }
}

/// An API server that gives prepared answers in order, and then no more.
#[derive(Clone)]
pub(super) struct Server {
    answers: Arc<Mutex<VecDeque<Answer>>>,
    asked: Arc<Mutex<Vec<String>>>,
    probed: Arc<AtomicUsize>,
    /// The number of refused streaming lists, which are not recorded.
    refused: Arc<AtomicUsize>,
    away: Arc<AtomicBool>,
    /// The version of lists of metadata.
    version: Arc<AtomicUsize>,
    /// The objects of metadata lists by name: the answers' objects, unless a test replaces them.
    objects: Arc<Mutex<BTreeMap<String, Value>>>,
}

pub(super) enum Answer {
    Json(u16, Value),
    /// Events, then the end of the watch.
    Watch(Vec<Value>),
    /// A silence of this length, then an optional last line, and the end.
    SilentWatch(Duration, io::Result<&'static str>),
    /// Only bookmarks of this version, one a minute, and the end after 290 s.
    QuietWatch(&'static str),
    /// A byte a second, without end.
    Trickle,
    /// Events that a test sends later.
    FedWatch(mpsc::UnboundedReceiver<Value>),
    /// Events, then silence.
    OpenWatch(Vec<Value>),
    /// The events of a list. Without such an answer streaming lists are refused, as by an old
    /// server.
    List(Vec<Value>),
    /// Events, then silence.
    OpenList(Vec<Value>),
    /// Events, then another event each second.
    EndlessList(Vec<Value>, Value),
    /// The numbers of objects a second and of seconds. After a pause come these events and the end.
    SlowList(usize, usize, Duration, Vec<Value>),
    /// No answer, not even its start.
    UnansweredList,
    /// A byte a second, without end.
    TrickledList,
    Unreachable,
}

pub(super) struct RunningWatch {
    pub(super) inputs: mpsc::Receiver<Input>,
    pub(super) ended: tokio::task::JoinHandle<WatchExit>,
}

impl Server {
    pub(super) fn new(answers: impl IntoIterator<Item = Answer>) -> Self {
        let answers = Arc::new(Mutex::new(answers.into_iter().collect()));
        let version = Arc::new(AtomicUsize::new(1_000_000));
        let (asked, probed, refused, away, objects) = Default::default();
        Self {
            answers,
            asked,
            probed,
            refused,
            away,
            version,
            objects,
        }
    }

    pub(super) fn set_away(&self, away: bool) {
        self.away.store(away, Relaxed);
    }

    /// Replaces the remaining answers.
    pub(super) fn answers(&self, answers: impl IntoIterator<Item = Answer>) {
        *self.answers.lock().unwrap() = answers.into_iter().collect();
    }

    pub(super) fn versions_from(&self, version: usize) {
        self.version.store(version, Relaxed);
    }

    pub(super) fn probed(&self) -> usize {
        self.probed.load(Relaxed)
    }

    pub(super) fn streams_refused(&self) -> usize {
        self.refused.load(Relaxed)
    }

    pub(super) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }

    /// Replaces the server's objects without a watch event.
    pub(super) fn has(&self, objects: impl IntoIterator<Item = Value>) {
        *self.objects.lock().unwrap() = objects
            .into_iter()
            .map(|object| (name_of(&object), object))
            .collect();
    }

    /// Returns the lists of metadata among the requests.
    pub(super) fn comparisons(&self) -> Vec<String> {
        self.asked()
            .into_iter()
            .filter(|uri| uri.ends_with(OF_METADATA))
            .collect()
    }

    pub(super) fn run<K>(&self, mut watch: Watch<K>, health: &Health) -> RunningWatch
    where
        K: Compact + Clone + Send + Sync + 'static,
    {
        let (sender, inputs) = mpsc::channel(1);
        let clients = Clients {
            limited: self.client(),
            paced: self.client(),
        };
        let health = health.clone();
        let ended = tokio::spawn(async move {
            let outage = Outage::new();
            tokio::select! {
                ended = watch.run(&clients, &sender, &health, &outage) => ended,
                never = outage.probe(&clients.paced) => never,
            }
        });
        RunningWatch { inputs, ended }
    }

    fn client(&self) -> Client {
        let server = self.clone();
        let service = service_fn(move |request: Request<Body>| {
            let answer = server.answer(&request);
            async move {
                let Some(answer) =
                    answer.filter(|answer| !matches!(answer, Answer::UnansweredList))
                else {
                    return std::future::pending().await;
                };
                answer.response().ok_or("no route")
            }
        });
        Client::new(service, "default")
    }
}

impl Server {
    fn answer(&self, request: &Request<Body>) -> Option<Answer> {
        let uri = request.uri().to_string();
        let mut answers = self.answers.lock().unwrap();
        let is_away =
            self.away.load(Relaxed) || matches!(answers.front(), Some(Answer::Unreachable));
        if uri == "/readyz" {
            self.probed.fetch_add(1, Relaxed);
            return Some(if is_away {
                Answer::Unreachable
            } else {
                Answer::Json(200, json!("ok"))
            });
        }
        let accepted = request
            .headers()
            .get(http::header::ACCEPT)
            .map(|accept| accept.to_str().unwrap());
        let is_of_metadata =
            accepted.is_some_and(|accept| accept.contains("PartialObjectMetadata"));
        let has_lists = answers.front().is_some_and(Answer::is_list);
        if uri.contains("sendInitialEvents") && !has_lists && !is_away {
            self.refused.fetch_add(1, Relaxed);
            return Some(Answer::Json(422, failure(422)));
        }
        self.asked.lock().unwrap().push(format!(
            "{uri}{}",
            if is_of_metadata { OF_METADATA } else { "" }
        ));
        if self.away.load(Relaxed) {
            return Some(Answer::Unreachable);
        }
        if is_of_metadata
            && !matches!(
                answers.front(),
                Some(Answer::Unreachable) | Some(Answer::Json(400.., _))
            )
        {
            let mut metadata = list(&self.version.load(Relaxed).to_string(), "", []);
            metadata["items"] = self.objects.lock().unwrap().values().cloned().collect();
            return Some(Answer::Json(200, metadata));
        }
        let answer = answers.pop_front();
        answer
            .iter()
            .for_each(|answer| self.report(answer, uri.contains("continue=")));
        answer
    }

    /// Records the objects of an answer.
    fn report(&self, answer: &Answer, is_next_page: bool) {
        let mut objects = self.objects.lock().unwrap();
        match answer {
            Answer::Json(200, list) => {
                if !is_next_page {
                    objects.clear();
                }
                let items = list["items"].as_array().into_iter().flatten();
                objects.extend(items.map(|object| (name_of(object), object.clone())));
            }
            Answer::Watch(events)
            | Answer::OpenWatch(events)
            | Answer::List(events)
            | Answer::OpenList(events) => {
                for event in events {
                    let name = name_of(&event["object"]);
                    let object = event["object"].clone();
                    match event["type"].as_str() {
                        Some("ADDED" | "MODIFIED") => drop(objects.insert(name, object)),
                        Some("DELETED") => drop(objects.remove(&name)),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
}

/// The suffix of a recorded request for metadata.
const OF_METADATA: &str = " (metadata)";

fn name_of(object: &Value) -> String {
    object["metadata"]["name"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

impl Answer {
    fn is_list(&self) -> bool {
        matches!(
            self,
            Self::List(_)
                | Self::OpenList(_)
                | Self::EndlessList(..)
                | Self::SlowList(..)
                | Self::UnansweredList
                | Self::TrickledList
        )
    }

    fn response(self) -> Option<Response<impl hyper::body::Body<Data = Bytes, Error = io::Error>>> {
        let (code, chunks, then) = match self {
            Self::Json(code, value) => (code, vec![value], stream::empty().boxed()),
            Self::Watch(events) | Self::List(events) => (200, events, stream::empty().boxed()),
            Self::OpenWatch(events) | Self::OpenList(events) => {
                (200, events, stream::pending().boxed())
            }
            Self::SilentWatch(time, last) => (200, Vec::new(), after(time, last).boxed()),
            Self::FedWatch(events) => (200, Vec::new(), fed(events).boxed()),
            Self::QuietWatch(version) => (200, Vec::new(), bookmarks(version).boxed()),
            Self::Trickle | Self::TrickledList => {
                (200, Vec::new(), each_second(" ".to_owned()).boxed())
            }
            Self::EndlessList(events, event) => (200, events, each_second(line(event)).boxed()),
            Self::SlowList(objects, secs, pause, then) => (
                200,
                Vec::new(),
                slow_list(objects, secs, pause, then).boxed(),
            ),
            Self::Unreachable | Self::UnansweredList => return None,
        };
        let chunks = stream::iter(chunks)
            .map(|chunk| Ok(line(chunk)))
            .chain(then);
        let body = StreamBody::new(chunks.map_ok(|chunk| Frame::data(chunk.into())));
        Some(Response::builder().status(code).body(body).unwrap())
    }
}

fn line(value: Value) -> String {
    format!("{value}\n")
}

fn each_second(line: String) -> impl Stream<Item = io::Result<String>> {
    stream::repeat(line).then(async |line| {
        sleep(Duration::from_secs(1)).await;
        Ok(line)
    })
}

fn slow_list(
    objects: usize,
    secs: usize,
    pause: Duration,
    then: Vec<Value>,
) -> impl Stream<Item = io::Result<String>> {
    let second = move |second: usize| {
        let added = |n| line(json!({"type": "ADDED", "object": service(&format!("s{n:05}"), "1")}));
        after_secs(
            1,
            (second * objects..(second + 1) * objects)
                .map(added)
                .collect(),
        )
    };
    let end = after_secs(pause.as_secs(), then.into_iter().map(line).collect());
    stream::iter(0..secs).then(second).chain(stream::once(end))
}

fn bookmarks(version: &str) -> impl Stream<Item = io::Result<String>> + use<> {
    let bookmark =
        line(json!({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": version}}}));
    stream::iter([60, 60, 60, 60, 50]).then(move |secs| after_secs(secs, bookmark.clone()))
}

fn fed(events: mpsc::UnboundedReceiver<Value>) -> impl Stream<Item = io::Result<String>> {
    stream::unfold(events, async |mut events| {
        Some((Ok(line(events.recv().await?)), events))
    })
}

/// The bookmark after the last object of a streaming list.
pub(super) fn list_end(version: &str) -> Value {
    json!({"type": "BOOKMARK", "object": {"kind": "Service", "apiVersion": "v1", "metadata": {
        "resourceVersion": version, "annotations": {"k8s.io/initial-events-end": "true"}}}})
}

async fn after_secs(secs: u64, line: String) -> io::Result<String> {
    sleep(Duration::from_secs(secs)).await;
    Ok(line)
}

fn after(time: Duration, last: io::Result<&'static str>) -> impl Stream<Item = io::Result<String>> {
    stream::once(async move {
        sleep(time).await;
        last.map(str::to_owned)
    })
}

impl RunningWatch {
    pub(super) async fn next(&mut self) -> String {
        let input = timeout(Duration::from_secs(600), self.inputs.recv())
            .await
            .expect("an input")
            .expect("a sender");
        match input {
            Input::Service(update) => show(&update),
            Input::ServiceCidr(update) => show(&update),
            Input::Node(update) => show(&update),
            Input::EndpointSlice(_)
            | Input::Pod(_)
            | Input::LocalRedirect(_)
            | Input::ApiServer(_) => {
                panic!("not watched: {input:?}")
            }
        }
    }
}
