//! Looks at the server's history, which a restored backup changes.

use std::io;

use serde_json::json;
use tokio::time::{sleep, timeout};

use super::super::*;
use super::server::{Answer, Server, failure, list, service};

#[tokio::test(start_paused = true)]
async fn a_server_whose_data_were_restored_is_listed_anew() {
    let server = Server::new([
        Answer::Json(200, list("700", "", [service("a", "1"), service("b", "600")])),
        Answer::Watch(vec![]),
        Answer::Unreachable,
        Answer::OpenWatch(vec![]),
        Answer::Json(200, list("20", "", [service("a", "1")])),
        Answer::OpenWatch(vec![]),
    ]);
    server.versions_from(20);
    let mut running = server.run(Watch::new(Input::Service).labels("!unwanted"), &Health::default());
    assert_eq!(running.next().await, "all a b");
    assert_eq!(running.next().await, "all a");
    let asked = server.asked();
    let look = asked.iter().find(|asked| asked.contains("limit=1&") || asked.ends_with("limit=1")).expect("a look");
    assert!(!look.contains("Selector"), "{look}");
}

/// Whoever answers next may have been restored meanwhile, though no request has failed.
#[tokio::test(start_paused = true)]
async fn after_a_watch_that_ended_before_its_time_the_history_is_looked_at() {
    let second = Duration::from_secs(1);
    let ends = [
        ("broken", Answer::SilentWatch(second, Err(io::ErrorKind::ConnectionReset.into()))),
        ("cut off", Answer::SilentWatch(second, Ok(r#"{"type":"#))),
        ("ended by the server", Answer::SilentWatch(second, Ok(""))),
    ];
    for (what, end) in ends {
        let server = Server::new([
            Answer::Json(200, list("700", "", [service("a", "1"), service("b", "600")])),
            end,
            Answer::OpenWatch(vec![]),
            Answer::Json(200, list("20", "", [service("a", "1")])),
            Answer::OpenWatch(vec![]),
        ]);
        server.versions_from(20);
        let mut running = server.run(Watch::new(Input::Service), &Health::default());
        assert_eq!(running.next().await, "all a b", "{what}");
        assert_eq!(running.next().await, "all a", "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_whose_time_is_over_is_not_looked_after() {
    let lasts = Duration::from_secs(290);
    let server = Server::new([
        Answer::Json(200, list("7", "", [])),
        Answer::SilentWatch(lasts, Ok("")),
        Answer::SilentWatch(lasts, Ok("")),
        Answer::OpenWatch(vec![json!({"type": "ADDED", "object": service("a", "8")})]),
    ]);
    let mut running = server.run(Watch::new(Input::Service), &Health::default());
    assert_eq!(running.next().await, "all");
    assert_eq!(running.next().await, "put a");
    sleep(Duration::from_secs(60)).await;
    assert_eq!(server.looks(), 0, "{:?}", server.asked());
}

/// It is tried again beside the watch, whose events count meanwhile.
#[tokio::test(start_paused = true)]
async fn a_look_that_is_refused_costs_no_watch() {
    let refusals = (0..5).map(|_| Answer::Json(429, failure(429)));
    let server = Server::new(
        [
            Answer::Json(200, list("700", "", [service("a", "1")])),
            Answer::Watch(vec![]),
            Answer::OpenWatch(vec![json!({"type": "ADDED", "object": service("b", "701")})]),
        ]
        .into_iter()
        .chain(refusals)
        .chain([Answer::Json(200, list("20", "", [service("a", "1")])), Answer::OpenWatch(vec![])]),
    );
    server.versions_from(20);
    let health = Health::default();
    let began = Instant::now();
    let mut running = server.run(Watch::new(Input::Service), &health);
    assert_eq!(running.next().await, "all a");
    assert_eq!(running.next().await, "put b");
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    assert_eq!(running.next().await, "all a");
    assert!(began.elapsed() > Duration::from_secs(4), "six looks in {:?}", began.elapsed());
    assert_eq!(server.looks(), 6, "{:?}", server.asked());
    assert!(health.problems().is_empty(), "{:?}", health.problems());
}

/// Each look is a list, though of one object.
#[tokio::test(start_paused = true)]
async fn watches_that_break_again_and_again_are_looked_after_ever_more_rarely() {
    let broken = || Answer::SilentWatch(Duration::from_millis(100), Err(io::ErrorKind::ConnectionReset.into()));
    let first = Answer::Json(200, list("7", "", []));
    let server = Server::new(std::iter::once(first).chain((0..10_000).map(|_| broken())));
    let mut running = server.run(Watch::new(Input::Service), &Health::default());
    assert_eq!(running.next().await, "all");
    assert!(timeout(Duration::from_secs(600), running.inputs.recv()).await.is_err());
    let (looks, asked) = (server.looks(), server.asked().len());
    assert!((20..=40).contains(&looks) && asked > 1000, "{looks} looks among {asked} requests in 10 minutes");
}
