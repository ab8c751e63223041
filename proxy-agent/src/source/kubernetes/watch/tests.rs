use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::stream;
use http::{Request, Response};
use http_body_util::StreamBody;
use hyper::body::Frame;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::time::timeout;
use tower::service_fn;

use super::*;

#[test]
fn a_list_is_sent_when_it_is_complete_or_not_at_all() {
    let service = |name: &str| serde_json::from_value::<Service>(service(name, "1")).unwrap();
    let mut fold = Fold::default();
    let sent: Vec<_> = [
        Event::Init,
        Event::InitApply(service("interrupted")),
        Event::Init,
        Event::InitApply(service("a")),
        Event::InitApply(service("b")),
        Event::InitDone,
        Event::Apply(service("c")),
        Event::Delete(service("a")),
        Event::Init,
        Event::InitApply(service("d")),
        Event::InitDone,
    ]
    .into_iter()
    .filter_map(|event| fold.event(event))
    .map(|update| show(&update))
    .collect();
    assert_eq!(sent, ["all a b", "put c", "del default/a", "all d"]);
    assert!(fold.nothing().is_none(), "what was listed is not emptied by a refusal");
}

#[tokio::test(start_paused = true)]
async fn lists_in_pages_watches_and_lists_again_when_the_watch_is_too_old() {
    let server = Server::new([
        Answer::Json(200, list("", "more", [service("a", "1")])),
        Answer::Json(200, list("7", "", [service("b", "2")])),
        Answer::Watch(vec![
            json!({"type": "ADDED", "object": service("c", "8")}),
            json!({"type": "DELETED", "object": service("a", "9")}),
            json!({"type": "ERROR", "object": failure(410)}),
        ]),
        Answer::Json(200, list("20", "", [service("d", "20")])),
        Answer::Watch(vec![]),
        Answer::OpenWatch(vec![json!({"type": "MODIFIED", "object": service("d", "21")})]),
    ]);
    let health = Health::default();
    let watch = Watch::new(Input::Service).labels("!unwanted").fields("spec.clusterIP!=None");
    let mut running = server.run(watch, &health);
    for expected in ["all a b", "put c", "del default/a", "all d", "put d"] {
        assert_eq!(running.next().await, expected);
    }
    assert!(health.problems().is_empty(), "an old watch is no problem: {:?}", health.problems());
    let asked = server.asked();
    let selectors = "&labelSelector=%21unwanted&fieldSelector=spec.clusterIP%21%3DNone";
    assert!(asked[0].starts_with("/api/v1/services?") && asked[0].contains("limit=1000"), "{asked:?}");
    assert!(asked[1].contains("continue=more"), "{asked:?}");
    assert!(asked[2].contains("watch=true") && asked[2].contains("resourceVersion=7"), "{asked:?}");
    assert!(asked[2].contains("timeoutSeconds=2") && asked[2].contains("allowWatchBookmarks=true"), "{asked:?}");
    assert!(asked[3].contains("limit=1000"), "{asked:?}");
    assert!(asked[5].contains("watch=true") && asked[5].contains("resourceVersion=20"), "{asked:?}");
    for selector in selectors.split('&') {
        assert!(asked.iter().all(|asked| asked.contains(selector)), "{selector}: {asked:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_refused_as_too_old_lists_again() {
    let server = Server::new([
        Answer::Json(200, list("7", "", [service("a", "1")])),
        Answer::Json(410, failure(410)),
        Answer::Json(200, list("20", "", [service("b", "20")])),
        Answer::OpenWatch(vec![]),
    ]);
    let health = Health::default();
    let mut running = server.run(Watch::new(Input::Service), &health);
    assert_eq!(running.next().await, "all a");
    assert_eq!(running.next().await, "all b");
    assert!(health.problems().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_comes_back_is_listed_at_once() {
    let away = (0..8).map(|_| Answer::Unreachable);
    let server = Server::new(
        [Answer::Json(200, list("7", "", [service("a", "1")])), Answer::Watch(vec![])]
            .into_iter()
            .chain(away)
            .chain([Answer::Json(410, failure(410)), Answer::Json(200, list("20", "", [service("b", "20")]))]),
    );
    let health = Health::default();
    let mut running = server.run(Watch::new(Input::Service), &health);
    assert_eq!(running.next().await, "all a");
    let asked = async {
        while server.asked().len() < 11 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(600), asked).await.expect("asked until it is back");
    let back = Instant::now();
    assert!(health.problems()["Service watch"].why.ends_with("no route"), "{:?}", health.problems());
    assert_eq!(running.next().await, "all b");
    assert!(back.elapsed() < Duration::from_secs(2), "{:?}", back.elapsed());
    assert!(health.problems().is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_event_that_cannot_be_read_costs_a_new_list_and_not_an_update() {
    let mut broken = service("a", "8");
    broken["spec"]["ports"] = json!("eighty");
    let server = Server::new([
        Answer::Json(200, list("7", "", [service("a", "1")])),
        Answer::OpenWatch(vec![json!({"type": "MODIFIED", "object": broken})]),
        Answer::Json(200, list("9", "", [service("a", "9"), service("b", "9")])),
        Answer::OpenWatch(vec![]),
    ]);
    let health = Health::default();
    let mut running = server.run(Watch::new(Input::Service), &health);
    assert_eq!(running.next().await, "all a");
    assert_eq!(running.next().await, "all a b");
}

#[tokio::test(start_paused = true)]
async fn what_is_refused_but_needed_holds_the_list_back_until_it_is_allowed() {
    let server = Server::new([
        Answer::Json(403, failure(403)),
        Answer::Json(403, failure(403)),
        Answer::Json(200, list("7", "", [service("a", "1")])),
        Answer::OpenWatch(vec![]),
    ]);
    let health = Health::default();
    let mut problems = health.subscribe();
    let mut running = server.run(Watch::new(Input::Service), &health);
    problems.changed().await.unwrap();
    assert_eq!(health.problems()["Service watch"].why, "403 Failed: no such luck");
    assert_eq!(running.next().await, "all a");
    assert!(health.problems().is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_is_refused_and_dispensable_is_empty_once() {
    let cidrs = json!({"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDRList", "metadata": {"resourceVersion": "3"},
        "items": [{"metadata": {"name": "kubernetes", "resourceVersion": "1"}}]});
    let server = Server::new([
        Answer::Json(403, failure(403)),
        Answer::Json(403, failure(403)),
        Answer::Json(200, cidrs),
        Answer::Json(403, failure(403)),
        Answer::Json(403, failure(403)),
        Answer::OpenWatch(vec![]),
    ]);
    let health = Health::default();
    let mut running = server.run(Watch::<ServiceCIDR>::new(Input::ServiceCidr).dispensable(), &health);
    assert_eq!(running.next().await, "refused");
    assert_eq!(health.problems()["ServiceCIDR watch"].why, "403 Failed: no such luck");
    assert_eq!(running.next().await, "all kubernetes");
    let mut problems = health.subscribe();
    problems.wait_for(|problems| !problems.is_empty()).await.unwrap();
    problems.wait_for(|problems| problems.is_empty()).await.unwrap();
    assert!(running.inputs.try_recv().is_err(), "what was listed stays when the watch is refused");
}

#[tokio::test(start_paused = true)]
async fn a_kind_that_is_not_served_is_empty_no_problem_and_asked_for_again() {
    let server = Server::new([Answer::Json(404, failure(404)), Answer::Json(404, failure(404))]);
    let health = Health::default();
    let mut running = server.run(Watch::<ServiceCIDR>::new(Input::ServiceCidr).dispensable(), &health);
    assert_eq!(running.next().await, "refused");
    assert!(timeout(UNSERVED_RETRY.mul_f32(2.5), running.inputs.recv()).await.is_err());
    assert!(health.problems().is_empty());
    assert_eq!(server.asked().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_problem_is_over_when_the_watch_is_resumed_even_if_nothing_happens() {
    let server = Server::new([
        Answer::Json(200, list("7", "", [service("a", "1")])),
        Answer::Watch(vec![]),
        Answer::Json(503, failure(503)),
        Answer::Json(503, failure(503)),
        Answer::OpenWatch(vec![]),
    ]);
    let health = Health::default();
    let mut problems = health.subscribe();
    let mut running = server.run(Watch::new(Input::Service), &health);
    assert_eq!(running.next().await, "all a");
    problems.wait_for(|problems| problems.contains_key("Service watch")).await.unwrap();
    let began = Instant::now();
    problems.wait_for(|problems| problems.is_empty()).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ends_every_watch_at_once_is_not_flooded() {
    let first = Answer::Json(200, list("7", "", []));
    let server = Server::new(std::iter::once(first).chain((0..10_000).map(|_| Answer::Watch(vec![]))));
    let mut running = server.run(Watch::new(Input::Service), &Health::default());
    assert_eq!(running.next().await, "all");
    assert!(timeout(Duration::from_secs(10), running.inputs.recv()).await.is_err());
    let asked = server.asked().len();
    assert!((50..=120).contains(&asked), "{asked} requests in 10 s");
}

#[tokio::test(start_paused = true)]
async fn refused_credentials_are_read_again_after_a_while() {
    let server = Server::new((0..100).map(|_| Answer::Json(401, failure(401))));
    let health = Health::default();
    let began = Instant::now();
    let ended = server.run(Watch::new(Input::Service), &health).ended.await.unwrap();
    assert_eq!(ended, Ended::Unauthorized);
    assert!(began.elapsed() > CREDENTIALS_AGE);
    assert_eq!(health.problems()["Service watch"].why, "401 Failed: no such luck");
}

#[test]
fn fields_that_nobody_reads_are_dropped() {
    let mut object: Service = serde_json::from_value(json!({"metadata": {
        "name": "a",
        "managedFields": [{"manager": "kubectl"}],
        "annotations": {"kpx.dev/algorithm": "maglev", "note": "long", LAST_CHANGE_TRIGGER_TIME: "2026-01-01T00:00:00Z"},
    }}))
    .unwrap();
    Watch::new(Input::Service).slim(&mut object);
    assert!(object.metadata.managed_fields.is_none());
    let kept: Vec<_> = object.metadata.annotations.unwrap().into_keys().collect();
    assert_eq!(kept, [LAST_CHANGE_TRIGGER_TIME, "kpx.dev/algorithm"]);
}

fn service(name: &str, version: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Service", "spec": {},
        "metadata": {"name": name, "namespace": "default", "resourceVersion": version}})
}

fn list<const N: usize>(version: &str, more: &str, items: [Value; N]) -> Value {
    json!({"apiVersion": "v1", "kind": "ServiceList", "items": items.to_vec(),
        "metadata": {"resourceVersion": version, "continue": more}})
}

fn failure(code: u16) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Failed", "message": "no such luck", "code": code})
}

fn show<K: Resource<DynamicType = ()>>(update: &Update<K>) -> String {
    let name = |object: &K| object.meta().name.clone().unwrap_or_default();
    match update {
        Update::All(all) => std::iter::once("all".to_owned()).chain(all.iter().map(name)).collect::<Vec<_>>().join(" "),
        Update::Refused => "refused".to_owned(),
        Update::Put(object) => format!("put {}", name(object)),
        Update::Del(name) => format!("del {name}"),
    }
}

/// An API server that gives prepared answers one after the other, and then none.
#[derive(Clone)]
struct Server {
    answers: Arc<Mutex<VecDeque<Answer>>>,
    asked: Arc<Mutex<Vec<String>>>,
}

enum Answer {
    Json(u16, Value),
    /// Events, then the end of the watch.
    Watch(Vec<Value>),
    /// Events, then silence.
    OpenWatch(Vec<Value>),
    Unreachable,
}

struct RunningWatch {
    inputs: mpsc::Receiver<Input>,
    ended: tokio::task::JoinHandle<Ended>,
}

impl Server {
    fn new(answers: impl IntoIterator<Item = Answer>) -> Self {
        Self { answers: Arc::new(Mutex::new(answers.into_iter().collect())), asked: Arc::default() }
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }

    fn run<K>(&self, watch: Watch<K>, health: &Health) -> RunningWatch
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    {
        let (sender, inputs) = mpsc::channel(1);
        let (client, health) = (self.client(), health.clone());
        let ended = tokio::spawn(async move { watch.run(&client, &sender, &health).await });
        RunningWatch { inputs, ended }
    }

    fn client(&self) -> Client {
        let server = self.clone();
        let service = service_fn(move |request: Request<Body>| {
            server.asked.lock().unwrap().push(request.uri().to_string());
            let answer = server.answers.lock().unwrap().pop_front();
            async move {
                let Some(answer) = answer else { return std::future::pending().await };
                answer.response().ok_or("no route")
            }
        });
        Client::new(service, "default")
    }
}

impl Answer {
    fn response(self) -> Option<Response<impl hyper::body::Body<Data = Bytes, Error = Infallible>>> {
        let (code, chunks, open) = match self {
            Self::Json(code, value) => (code, vec![value], false),
            Self::Watch(events) => (200, events, false),
            Self::OpenWatch(events) => (200, events, true),
            Self::Unreachable => return None,
        };
        let frames = chunks.into_iter().map(|chunk| Ok::<_, Infallible>(Frame::data(format!("{chunk}\n").into())));
        let silence = stream::pending().take(usize::from(open));
        let body = StreamBody::new(stream::iter(frames).chain(silence));
        Some(Response::builder().status(code).body(body).unwrap())
    }
}

impl RunningWatch {
    async fn next(&mut self) -> String {
        let input = timeout(Duration::from_secs(600), self.inputs.recv()).await.expect("an input").expect("a sender");
        match input {
            Input::Service(update) => show(&update),
            Input::ServiceCidr(update) => show(&update),
            Input::EndpointSlice(_) | Input::Node(_) => panic!("not watched: {input:?}"),
        }
    }
}
