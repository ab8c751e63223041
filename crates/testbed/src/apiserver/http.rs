//! HTTP: authentication, routing and answers.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use serde_json::{Value, json};

use super::discovery;
use super::failure::{Cause, Failure, Outcome};
use super::faults::Garbage;
use super::kinds::{Kind, Status, version};
use super::kubelet;
use super::list::list;
use super::objects::Target;
use super::options::{ListOptions, Query};
use super::patch::patched;
use super::review;
use super::shared::{Shared, State};
use super::store::Key;
use super::view::View;
use super::watch::Watch;

pub(crate) type Answer = Response<UnsyncBoxBody<Bytes, io::Error>>;

/// The parts of an object's path; missing parts are empty.
#[derive(Clone, Debug)]
struct Route {
    kind: &'static Kind,
    namespace: String,
    name: String,
    status: bool,
}

/// Answers a request. `has_certificate`: the client presented a certificate of the server's CA.
pub(crate) async fn answer(
    shared: Arc<Shared>,
    has_certificate: bool,
    request: Request<Incoming>,
) -> Result<Answer, Infallible> {
    Ok(respond(shared, has_certificate, request)
        .await
        .unwrap_or_else(|failure| {
            let status =
                StatusCode::from_u16(failure.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            let mut answer = json_answer(status, &failure.status());
            if let Some(seconds) = failure.retry_after {
                answer
                    .headers_mut()
                    .insert(header::RETRY_AFTER, seconds.into());
            }
            answer
        }))
}

async fn respond(
    shared: Arc<Shared>,
    has_certificate: bool,
    request: Request<Incoming>,
) -> Outcome<Answer> {
    let path = request.uri().path().to_owned();
    shared.change(|state| state.traffic.arrived(request.version()));
    if let Some(failure) = shared.read(|state| state.faults.everything.clone()) {
        return Err(failure);
    }
    let is_public = matches!(
        path.as_str(),
        "/version" | "/healthz" | "/livez" | "/readyz"
    );
    authenticate(&shared, has_certificate, &request, is_public)?;
    if matches!(path.as_str(), "/healthz" | "/livez" | "/readyz") {
        return Ok(whole_answer(
            StatusCode::OK,
            "text/plain; charset=utf-8",
            Bytes::from_static(b"ok"),
        ));
    }
    if let Some(asked) = kubelet::Asked::of(&path) {
        return kubelet::answer(&shared, &asked, request).await;
    }
    if path == review::PATH {
        return review::answer(&shared, request).await;
    }
    let Some(route) = route(&path) else {
        let document = discovery::document(&path).ok_or_else(Failure::no_such_path)?;
        return Ok(json_answer(StatusCode::OK, &document));
    };
    let query = Query::parse(request.uri().query().unwrap_or_default());
    let verb = verb(request.method(), &route, &query)?;
    let view = View::accepted(
        header_text(&request, header::ACCEPT),
        query.get("includeObject"),
    )?;
    shared.change(|state| state.traffic.count(verb, route.kind, view));
    if let Some(failure) = shared.read(|state| state.faults.answer(verb, route.kind.plural)) {
        return Err(failure);
    }
    let answer = match verb {
        "list" if query.flag("watch") != Some(true) => {
            answer_list(&shared, &route, &query, view).await
        }
        "list" | "watch" => answer_watch(&shared, &route, &query, view).await,
        "get" => {
            let key = Key::new(route.kind, &route.namespace, &route.name);
            let object = shared.read(|state| state.objects.store.get(&key).cloned());
            let object = object.ok_or_else(|| Failure::not_found(route.kind, &route.name))?;
            Ok(json_answer(
                StatusCode::OK,
                &view.of(route.kind, &object, true),
            ))
        }
        _ => answer_write(&shared, verb, &route, &query, view, request).await,
    };
    match shared.read(|state| state.faults.is_unanswered(verb, route.kind.plural)) {
        true => std::future::pending().await,
        false => answer,
    }
}

/// Accepts the token or a client certificate. As in kube-apiserver, a wrong token fails even if
/// none is needed.
fn authenticate(
    shared: &Shared,
    has_certificate: bool,
    request: &Request<Incoming>,
    is_public: bool,
) -> Outcome<()> {
    let given = header_text(request, header::AUTHORIZATION).strip_prefix("Bearer ");
    let refused = shared.read(|state| state.faults.tokens_refused);
    match given {
        Some(token) if token.trim() != shared.token || refused => Err(Failure::unauthorized()),
        None if !has_certificate && !is_public => Err(Failure::unauthorized()),
        _ => Ok(()),
    }
}

/// Parses a path: `/api/v1/...` or `/apis/GROUP/VERSION/...`, then
/// `[namespaces/NAMESPACE/]PLURAL[/NAME[/status]]`.
fn route(path: &str) -> Option<Route> {
    let segments: Vec<_> = path.trim_matches('/').split('/').collect();
    let (group, rest) = match &segments[..] {
        ["api", "v1", rest @ ..] => ("", rest),
        ["apis", group, given, rest @ ..] if *given == version(group) => (*group, rest),
        _ => return None,
    };
    let is_namespaced = |plural: &str| Kind::at(group, plural).is_some_and(|k| k.namespaced);
    let (namespace, rest) = match rest {
        ["namespaces", namespace, plural, ..] if is_namespaced(plural) => (*namespace, &rest[2..]),
        _ => ("", rest),
    };
    let kind = Kind::at(group, rest.first()?)?;
    let (name, status) = match rest[1..] {
        [] => ("", false),
        [name] => (name, false),
        [name, "status"] if kind.status != Status::None => (name, true),
        _ => return None,
    };
    if kind.namespaced && namespace.is_empty() && !name.is_empty() {
        return None;
    }
    Some(Route {
        kind,
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        status,
    })
}

fn verb(method: &Method, route: &Route, query: &Query) -> Outcome<&'static str> {
    let is_collection = route.name.is_empty();
    let is_homeless = route.kind.namespaced && route.namespace.is_empty();
    Ok(match *method {
        // Counts and faults treat a streaming list as a list.
        Method::GET if is_collection && query.flag("sendInitialEvents") == Some(true) => "list",
        Method::GET if is_collection && query.flag("watch") == Some(true) => "watch",
        Method::GET if is_collection => "list",
        Method::GET => "get",
        Method::POST if is_collection && !is_homeless => "create",
        Method::PUT if !is_collection => "update",
        Method::PATCH if !is_collection => "patch",
        Method::DELETE if !is_collection && !route.status => "delete",
        _ => return Err(Failure::method_not_allowed()),
    })
}

async fn answer_list(shared: &Shared, route: &Route, query: &Query, view: View) -> Outcome<Answer> {
    tokio::time::sleep(shared.read(|state| state.faults.list_delay)).await;
    shared.read(|state| {
        let options = ListOptions::parse(route.kind, query, false, state.faults.streaming_lists)?;
        let list = list(
            &state.objects.store,
            route.kind,
            &route.namespace,
            &options,
            view,
        )?;
        let answer = match state.faults.list_trickle {
            Some(time) => trickle(Bytes::from(list.to_string()), time),
            None => json_answer(StatusCode::OK, &list),
        };
        shared.meter.list_made();
        Ok(answer)
    })
}

/// Returns a body in pieces, evenly over `time`.
fn trickle(body: Bytes, time: Duration) -> Answer {
    const PIECES: usize = 20;
    let pieces: Vec<Bytes> = body
        .chunks(body.len().div_ceil(PIECES).max(1))
        .map(Bytes::copy_from_slice)
        .collect();
    let pieces = futures::stream::unfold(pieces.into_iter(), move |mut pieces| async move {
        tokio::time::sleep(time / PIECES as u32).await;
        Some((Ok::<_, io::Error>(Frame::data(pieces.next()?)), pieces))
    });
    with_type(
        "application/json",
        Response::new(StreamBody::new(Box::pin(pieces)).boxed_unsync()),
    )
}

/// Returns garbage instead of events, until the fault ends or all watches are cut.
fn garbled(
    shared: Arc<Shared>,
    resource: &'static str,
    garbage: Garbage,
) -> impl Stream<Item = io::Result<Frame<Bytes>>> {
    let cuts = shared.read(|state| state.faults.cuts);
    futures::stream::unfold(shared, move |shared| async move {
        let piece: &[u8] = match garbage {
            Garbage::EndlessLine => &[b'x'; 65_536],
            Garbage::Trickle => {
                tokio::time::sleep(Duration::from_secs(1)).await;
                b" "
            }
        };
        let goes_on = |state: &State| {
            state.faults.cuts == cuts && state.faults.garbage(resource) == Some(garbage)
        };
        shared
            .read(goes_on)
            .then(|| (Ok(Frame::data(Bytes::from_static(piece))), shared))
    })
}

async fn answer_watch(
    shared: &Arc<Shared>,
    route: &Route,
    query: &Query,
    view: View,
) -> Outcome<Answer> {
    // A list that trickles is paged.
    let streaming_lists =
        shared.read(|state| state.faults.streaming_lists && state.faults.list_trickle.is_none());
    let options = ListOptions::parse(route.kind, query, true, streaming_lists)?;
    if options.send_initial_events == Some(true) {
        tokio::time::sleep(shared.read(|state| state.faults.list_delay)).await;
    }
    let garbage = shared.read(|state| state.faults.garbage(route.kind.plural));
    if let Some(garbage) = garbage.filter(|_| options.send_initial_events != Some(true)) {
        let body = StreamBody::new(Box::pin(garbled(
            shared.clone(),
            route.kind.plural,
            garbage,
        )));
        return Ok(with_type(
            "application/json",
            Response::new(body.boxed_unsync()),
        ));
    }
    let watch = Watch::start(shared, route.kind, &route.namespace, options, view)?;
    let body = StreamBody::new(Box::pin(watch.into_stream()));
    Ok(with_type(
        "application/json",
        Response::new(body.boxed_unsync()),
    ))
}

async fn answer_write(
    shared: &Shared,
    verb: &str,
    route: &Route,
    query: &Query,
    view: View,
    request: Request<Incoming>,
) -> Outcome<Answer> {
    let media_type = header_text(&request, header::CONTENT_TYPE)
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_owned();
    if verb != "patch" && !matches!(media_type.as_str(), "" | "application/json") {
        return Err(Failure::new(415, "415: Unsupported Media Type"));
    }
    let body = request
        .into_body()
        .collect()
        .await
        .map_err(|e| Failure::bad_request(e.to_string()))?
        .to_bytes();
    let unreadable = |e: serde_json::Error| match verb {
        "patch" => Failure::bad_request(format!("error decoding patch: {e}")),
        _ => {
            let what = format!(
                "the object provided is unrecognized (must be of type {})",
                route.kind.kind
            );
            Failure::bad_request(format!("{what}: {e}"))
        }
    };
    let body: Value = match body.is_empty() && verb == "delete" {
        true => json!({}),
        false => serde_json::from_slice(&body).map_err(unreadable)?,
    };
    let dry_run = query.get("dryRun").or(body["dryRun"][0].as_str());
    if let Some(other) = dry_run.filter(|d| *d != "All") {
        let why = format!("[\"{other}\"]: supported values: \"All\"");
        return Err(Failure::invalid(
            "PatchOptions",
            "meta.k8s.io",
            "",
            "dryRun",
            Cause::NotSupported,
            &why,
        ));
    }
    let target = Target {
        kind: route.kind,
        namespace: route.namespace.clone(),
        name: route.name.clone(),
        patch: verb == "patch",
        status: route.status,
        dry_run: dry_run.is_some(),
        strict: query.get("fieldValidation") == Some("Strict"),
    };
    let show = |object: &Value| view.of(route.kind, object, true);
    shared.change(|state| {
        let objects = &mut state.objects;
        let (status, shown) = match verb {
            "create" => (StatusCode::CREATED, show(&*objects.create(&target, &body)?)),
            "update" => (
                StatusCode::OK,
                show(&*objects.update(&target, |_| Ok(body))?),
            ),
            "patch" => {
                let changed =
                    objects.update(&target, |old| patched(route.kind, old, &media_type, &body))?;
                (StatusCode::OK, show(&changed))
            }
            _ => match objects.delete(&target, &body)? {
                (old, true) => (StatusCode::OK, deleted(route.kind, &old)),
                (old, false) => (StatusCode::OK, show(&old)),
            },
        };
        Ok(json_answer(status, &shown))
    })
}

fn deleted(kind: &Kind, object: &Value) -> Value {
    let mut details = json!({"name": object["metadata"]["name"], "kind": kind.plural, "uid": object["metadata"]["uid"]});
    if !kind.group.is_empty() {
        details["group"] = json!(kind.group);
    }
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})
}

fn header_text(request: &Request<Incoming>, name: header::HeaderName) -> &str {
    request
        .headers()
        .get(name)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
}

pub(super) fn json_answer(status: StatusCode, body: &Value) -> Answer {
    whole_answer(status, "application/json", Bytes::from(body.to_string()))
}

fn whole_answer(status: StatusCode, media_type: &'static str, body: Bytes) -> Answer {
    let body = Full::new(body)
        .map_err(|never| match never {})
        .boxed_unsync();
    let mut answer = with_type(media_type, Response::new(body));
    *answer.status_mut() = status;
    answer
}

fn with_type(media_type: &'static str, mut answer: Answer) -> Answer {
    let headers = answer.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static(media_type),
    );
    headers.insert(
        header::CACHE_CONTROL,
        header::HeaderValue::from_static("no-cache, private"),
    );
    answer
}
