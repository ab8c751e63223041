//! Tests of the answers that cost more than a read of the agent's state: who gets them, and how
//! many at a time.

use std::time::Duration;

use axum::Extension;

use super::*;
use crate::http_server::Client;
use crate::monitor::Event;

const COSTLY: [&str; 3] = [
    "/ui/api/events",
    "/ui/api/map?namespace=shop",
    "/ui/api/trace?to=10.96.0.10:80",
];
const OF_PAGE: [(&str, &str); 2] = [("host", "127.0.0.1:10249"), ("kpx-page", "1")];

/// Sends a request as a client on this host.
async fn ask_here(router: &Router, path: &str, headers: &[(&str, &str)]) -> Response {
    send(
        &router.clone().layer(Extension(Client::OnHost)),
        Method::GET,
        path,
        headers,
    )
    .await
}

#[tokio::test]
async fn only_page_on_this_host_gets_costly_answers() {
    let router = router(sources(), "n1");
    for path in COSTLY {
        let [host, page] = OF_PAGE;
        for (client, headers) in [
            (Client::Elsewhere, &[host, page][..]),
            (Client::OnHost, &[host]),
            (
                Client::OnHost,
                &[
                    host,
                    ("origin", "http://evil.example"),
                    ("sec-fetch-site", "cross-site"),
                ],
            ),
        ] {
            let response = send(
                &router.clone().layer(Extension(client)),
                Method::GET,
                path,
                headers,
            )
            .await;
            assert_eq!(
                response.status(),
                StatusCode::FORBIDDEN,
                "{path} for {client:?} with {headers:?}"
            );
            assert!(response.headers().contains_key("content-security-policy"));
        }
        assert_eq!(
            send(&router, Method::GET, path, &OF_PAGE).await.status(),
            StatusCode::FORBIDDEN,
            "unknown client"
        );
        let foreign = ask_here(&router, path, &[("host", "evil.example"), page]).await;
        assert_eq!(foreign.status(), StatusCode::MISDIRECTED_REQUEST, "{path}");
        assert_ne!(
            ask_here(&router, path, &OF_PAGE).await.status(),
            StatusCode::FORBIDDEN,
            "{path}"
        );
        // A browser asks for permission before it sends the header to another site, and gets none.
        for method in [Method::OPTIONS, Method::POST, Method::PUT, Method::DELETE] {
            let asked = router.clone().layer(Extension(Client::OnHost));
            let response = send(&asked, method.clone(), path, &OF_PAGE).await;
            assert_eq!(
                response.status(),
                StatusCode::METHOD_NOT_ALLOWED,
                "{method} {path}"
            );
            assert!(
                !response
                    .headers()
                    .keys()
                    .any(|name| name.as_str().starts_with("access-control"))
            );
        }
    }
}

#[tokio::test]
async fn events_are_filtered_and_end_with_their_reader() {
    let sources = sources();
    let router = router(sources.clone(), "n1");
    let mut all = open(&router, "/ui/api/events").await;
    let mut refused = open(
        &router,
        "/ui/api/events?kind=unserved&reason=no_endpoints&client=10.1.0.1",
    )
    .await;
    assert_eq!(sources.watchers.number(), 2);
    for (what, reason, client) in [
        ("decision", None, "10.1.0.1:1"),
        ("reject", Some("no_endpoints"), "10.1.0.2:2"),
        ("drop", Some("outside"), "10.1.0.1:3"),
        ("reject", Some("no_endpoints"), "10.1.0.1:4"),
    ] {
        let event = Event {
            what: what.to_owned(),
            reason: reason.map(str::to_owned),
            client: Some(client.parse().unwrap()),
            ..Event::lost(0)
        };
        sources.watchers.report(event);
    }
    for port in 1..=4 {
        assert_eq!(client_port(&next(&mut all).await), port);
    }
    assert_eq!(client_port(&next(&mut refused).await), 4);
    drop(all);
    assert_eq!(
        sources.watchers.number(),
        1,
        "recording goes on for the other reader"
    );
    drop(refused);
    assert_eq!(sources.watchers.number(), 0, "recording stops");
}

#[tokio::test(start_paused = true)]
async fn silent_stream_shows_life_and_ends() {
    let sources = sources();
    let router = router(sources.clone(), "n1");
    let mut stream = open(&router, "/ui/api/events").await;
    let opened = tokio::time::Instant::now();
    assert_eq!(next(&mut stream).await, ": no event\n\n");
    assert_eq!(opened.elapsed().as_secs(), 10);
    while stream.frame().await.is_some() {}
    assert_eq!(opened.elapsed().as_secs(), 600);
    drop(stream);
    assert_eq!(sources.watchers.number(), 0);
}

#[tokio::test(start_paused = true)]
async fn flood_of_events_is_cut_and_counted() {
    let sources = sources();
    let mut stream = open(&router(sources.clone(), "n1"), "/ui/api/events").await;
    let tell = |number: u16| {
        let client = Some(([10, 1, 0, 1], number).into());
        sources.watchers.report(Event {
            what: "decision".to_owned(),
            client,
            ..Event::lost(0)
        });
    };
    (1..=1_000).for_each(tell);
    for number in 1..=100 {
        assert_eq!(client_port(&next(&mut stream).await), number);
    }
    let early = tokio::time::timeout(Duration::from_millis(500), next(&mut stream)).await;
    assert!(early.is_err(), "one too many in a second: {early:?}");
    // The number of lost events comes with the first event of the next second.
    tokio::time::advance(Duration::from_millis(500)).await;
    tell(1_001);
    let words = next(&mut stream).await;
    assert!(words.contains("\"lost\":900"), "{words}");
    assert!(words.contains("10.1.0.1:1001"), "{words}");
}

#[tokio::test]
async fn streams_at_a_time_are_bounded() {
    let router = router(sources(), "n1");
    let mut streams = Vec::new();
    for _ in 0..8 {
        streams.push(open(&router, "/ui/api/events").await);
    }
    let ninth = ask_here(&router, "/ui/api/events", &OF_PAGE).await;
    assert_eq!(ninth.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(
        text(ninth).await,
        "the limit of concurrent streams is reached: 8\n"
    );
    streams.pop();
    drop(open(&router, "/ui/api/events").await);
}

#[tokio::test]
async fn wrong_questions_are_named() {
    let router = router(sources(), "n1");
    let long = format!("/ui/api/trace?to={}", "a".repeat(301));
    for (path, why) in [
        (
            "/ui/api/events?client=web",
            "client \"web\" is not an address",
        ),
        ("/ui/api/events?reason=bored", "unknown reason \"bored\""),
        ("/ui/api/events?kind=all", "kind \"all\" is neither"),
        ("/ui/api/events?service=a/b/c", "is not a name"),
        ("/ui/api/events?verdict=drop", "unknown field `verdict`"),
        ("/ui/api/map", "missing field `namespace`"),
        ("/ui/api/trace?from=10.1.0.1", "missing field `to`"),
        (
            "/ui/api/trace?to=10.96.0.10:http",
            "To and Port: \"10.96.0.10:http\" is not IP:PORT",
        ),
        (
            "/ui/api/trace?from=--manifests&to=10.96.0.10:80",
            "From: \"--manifests\" is not IP",
        ),
        ("/ui/api/trace?to=", "To and Port: \"\" is not "),
        (&long, "To and Port: longer than 300"),
    ] {
        let response = ask_here(&router, path, &OF_PAGE).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{path}");
        let text = text(response).await;
        assert!(text.contains(why), "{path}: {text}");
        assert!(!text.contains("--from") && !text.contains("--to"), "{text}");
    }
    // The agent of these tests has no socket.
    let response = ask_here(&router, "/ui/api/trace?to=10.96.0.10:80", &OF_PAGE).await;
    assert_eq!(response.status(), StatusCode::UNPROCESSABLE_ENTITY);
    let text = text(response).await;
    assert!(
        text.contains("no kpx answers at /nonexistent/kpx.sock") || text.contains("takes root"),
        "{text}"
    );
}

async fn open(router: &Router, path: &str) -> Body {
    let response = ask_here(router, path, &OF_PAGE).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    assert_eq!(response.headers()["cache-control"], "no-store");
    let mut body = response.into_body();
    assert_eq!(next(&mut body).await, ": open\n\n");
    body
}

async fn next(body: &mut Body) -> String {
    let frame = body.frame().await.expect("the stream goes on").unwrap();
    String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap()
}

fn client_port(text: &str) -> u16 {
    let event: serde_json::Value =
        serde_json::from_str(text.strip_prefix("data: ").unwrap()).unwrap();
    event["client"]
        .as_str()
        .unwrap()
        .rsplit(':')
        .next()
        .unwrap()
        .parse()
        .unwrap()
}
