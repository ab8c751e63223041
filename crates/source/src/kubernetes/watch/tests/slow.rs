//! Answers byte by byte: the connection lives, and no event arrives.

use serde_json::json;
use tokio::time::timeout;

use super::super::*;
use super::server::{Answer, Server, list, list_end, service};
use crate::health::Problem;

#[tokio::test(start_paused = true)]
async fn watch_without_whole_event_is_followed_by_another() {
    let server = Server::new([
        Answer::Json(200, list("7", "", [service("a", "1")])),
        Answer::Trickle,
        Answer::OpenWatch(vec![json!({"type": "ADDED", "object": service("b", "8")})]),
    ]);
    let began = Instant::now();
    let mut running = server.run(Watch::new(Input::Service), &Health::default());
    assert_eq!(running.next().await, "all a");
    assert_eq!(running.next().await, "put b");
    assert!(
        began.elapsed() < READ_TIMEOUT + Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    assert!(
        server.asked()[2].contains("resourceVersion=7"),
        "from the same version: {:?}",
        server.asked()
    );
}

#[tokio::test(start_paused = true)]
async fn quiet_watch_with_bookmarks_goes_on() {
    let server = Server::new([
        Answer::Json(200, list("7", "", [])),
        Answer::QuietWatch("7"),
        Answer::OpenWatch(vec![json!({"type": "ADDED", "object": service("a", "8")})]),
    ]);
    let began = Instant::now();
    let mut running = server.run(Watch::new(Input::Service), &Health::default());
    assert_eq!(running.next().await, "all");
    assert_eq!(running.next().await, "put a");
    assert!(began.elapsed() > 2 * READ_TIMEOUT, "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn page_without_end_is_given_up() {
    let server = Server::new([
        Answer::Trickle,
        Answer::Json(200, list("7", "", [service("a", "1")])),
        Answer::OpenWatch(vec![]),
    ]);
    let health = Health::default();
    let began = Instant::now();
    let mut problems = health.subscribe();
    let mut running = server.run(Watch::new(Input::Service), &health);
    problems.changed().await.unwrap();
    let why = health.problems()[&Problem::Watch("Service".into())]
        .why
        .clone();
    assert_eq!(why, "the answer did not come to an end in time");
    assert_eq!(running.next().await, "all a");
    assert!(
        began.elapsed() < PAGE + Duration::from_secs(2),
        "{:?}",
        began.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn slow_stream_is_read_to_its_end() {
    let server = Server::new([
        Answer::SlowList(130, 190, Duration::ZERO, vec![list_end("9")]),
        Answer::OpenWatch(vec![json!({"type": "ADDED", "object": service("t", "10")})]),
    ]);
    let mut running = server.run(Watch::new(Input::Service), &Health::default());
    let all = running.next().await;
    assert_eq!(all.split(' ').count(), 1 + 130 * 190, "{} bytes", all.len());
    assert_eq!(running.next().await, "put t");
    assert_eq!(server.asked().len(), 2, "{:?}", server.asked());
}

#[tokio::test(start_paused = true)]
async fn list_of_a_stream_that_kept_pace_may_pause() {
    let pause = Duration::from_secs(20);
    let server = Server::new([
        Answer::SlowList(200, 62, pause, vec![list_end("9")]),
        Answer::OpenWatch(vec![]),
    ]);
    let mut running = server.run(Watch::new(Input::Service), &Health::default());
    assert_eq!(running.next().await.split(' ').count(), 1 + 200 * 62);
    assert_eq!(server.streams_refused(), 0, "{:?}", server.asked());
}

#[tokio::test(start_paused = true)]
async fn long_streams_that_break_are_followed_by_pages() {
    let long = || Answer::SlowList(200, 62, Duration::ZERO, vec![]);
    let server = Server::new([
        long(),
        long(),
        Answer::Json(200, list("7", "", [service("a", "1")])),
        Answer::OpenWatch(vec![]),
    ]);
    let mut running = server.run(Watch::new(Input::Service), &Health::default());
    assert_eq!(running.next().await, "all a");
    assert_eq!(server.streams_refused(), 0, "{:?}", server.asked());
}

/// A faulty server sends Services without end, in a stream or in a page.
#[tokio::test(start_paused = true)]
async fn list_without_end_ends_at_its_bound_with_a_problem() {
    let many = |page: u32| {
        let all = (0..10_001)
            .map(|nth| service(&format!("s{page}-{nth}"), "1"))
            .collect::<Vec<_>>();
        Answer::Json(
            200,
            json!({"apiVersion": "v1", "kind": "ServiceList", "items": all, "metadata": {"resourceVersion": "7", "continue": "more"}}),
        )
    };
    for first in [
        vec![Answer::SlowList(10_000, 1_000, Duration::ZERO, vec![])],
        vec![many(1), many(2), many(3)],
    ] {
        let server = Server::new(first);
        let health = Health::default();
        let mut problems = health.subscribe();
        let mut running = server.run(Watch::new(Input::Service), &health);
        timeout(Duration::from_secs(600), problems.changed())
            .await
            .expect("a problem")
            .unwrap();
        let why = health.problems()[&Problem::Watch("Service".into())]
            .why
            .clone();
        assert!(
            why.contains("a list of more than 30000 objects or 64 MiB"),
            "{why}"
        );
        server.answers([
            Answer::Json(200, list("7", "", [service("a", "1")])),
            Answer::OpenWatch(vec![]),
        ]);
        assert_eq!(running.next().await, "all a");
    }
}
