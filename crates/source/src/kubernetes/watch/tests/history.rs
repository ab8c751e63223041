//! Tests comparisons with lists of metadata, which detect a restored backup.

use std::io;

use k8s_openapi::api::core::v1::Node;
use serde_json::json;
use tokio::time::{sleep, timeout};

use super::super::*;
use super::server::{Answer, Server, failure, list, service};
use crate::health::Problem;

#[tokio::test(start_paused = true)]
async fn a_server_with_restored_data_is_listed_again() {
    let server = Server::new([
        Answer::Json(
            200,
            list("700", "", [service("a", "1"), service("b", "600")]),
        ),
        Answer::Watch(vec![]),
        Answer::Unreachable,
        Answer::OpenWatch(vec![]),
        Answer::Json(200, list("20", "", [service("a", "1")])),
        Answer::OpenWatch(vec![]),
    ]);
    server.versions_from(20);
    let mut running = server.run(
        Watch::new(Input::Service).labels("!unwanted"),
        &Health::default(),
    );
    assert_eq!(running.next().await, "all a b");
    assert_eq!(running.next().await, "all a");
    let comparisons = server.comparisons();
    assert!(
        comparisons[0].contains("labelSelector=%21unwanted"),
        "{comparisons:?}"
    );
}

/// The next server to answer may have been restored, although no request has failed.
#[tokio::test(start_paused = true)]
async fn a_watch_that_ended_early_leads_to_a_comparison() {
    let second = Duration::from_secs(1);
    let ends = [
        (
            "broken",
            Answer::SilentWatch(second, Err(io::ErrorKind::ConnectionReset.into())),
        ),
        ("cut off", Answer::SilentWatch(second, Ok(r#"{"type":"#))),
        ("ended by the server", Answer::SilentWatch(second, Ok(""))),
    ];
    for (what, end) in ends {
        let server = Server::new([
            Answer::Json(
                200,
                list("700", "", [service("a", "1"), service("b", "600")]),
            ),
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
async fn a_watch_that_ended_in_time_leads_to_no_comparison() {
    let server = Server::new([
        Answer::Json(200, list("7", "", [])),
        Answer::QuietWatch("7"),
        Answer::QuietWatch("7"),
        Answer::OpenWatch(vec![json!({"type": "ADDED", "object": service("a", "8")})]),
    ]);
    let mut running = server.run(Watch::new(Input::Service), &Health::default());
    assert_eq!(running.next().await, "all");
    assert_eq!(running.next().await, "put a");
    sleep(Duration::from_secs(60)).await;
    assert_eq!(server.comparisons().len(), 0, "{:?}", server.asked());
}

/// The comparison is retried while the watch continues.
#[tokio::test(start_paused = true)]
async fn a_refused_comparison_costs_no_watch() {
    let refusals = (0..5).map(|_| Answer::Json(429, failure(429)));
    let server = Server::new(
        [
            Answer::Json(200, list("700", "", [service("a", "1")])),
            Answer::Watch(vec![]),
            Answer::OpenWatch(vec![
                json!({"type": "ADDED", "object": service("b", "701")}),
            ]),
        ]
        .into_iter()
        .chain(refusals)
        .chain([
            Answer::Json(200, list("20", "", [service("a", "1")])),
            Answer::OpenWatch(vec![]),
        ]),
    );
    server.versions_from(20);
    let health = Health::default();
    let began = Instant::now();
    let mut running = server.run(Watch::new(Input::Service), &health);
    assert_eq!(running.next().await, "all a");
    assert_eq!(running.next().await, "put b");
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    let mut problems = health.subscribe();
    let error =
        problems.wait_for(|problems| problems.contains_key(&Problem::History("Service".into())));
    let error = timeout(Duration::from_secs(60), error)
        .await
        .expect("it is reported")
        .unwrap();
    assert!(
        error[&Problem::History("Service".into())]
            .why
            .ends_with("429 Failed: no such luck"),
        "{error:?}"
    );
    drop(error);
    let refused = Instant::now();
    assert_eq!(running.next().await, "all a");
    assert!(
        refused.elapsed() > Duration::from_secs(4),
        "five more in {:?}",
        refused.elapsed()
    );
    assert_eq!(server.comparisons().len(), 6, "{:?}", server.asked());
    timeout(
        Duration::from_secs(1),
        problems.wait_for(|problems| problems.is_empty()),
    )
    .await
    .unwrap()
    .unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_kind_that_is_served_again_is_compared_by_its_name() {
    let node = |version: &str| json!({"metadata": {"name": "n1", "resourceVersion": version}});
    let nodes = |version: &str| json!({"apiVersion": "v1", "kind": "NodeList", "metadata": {"resourceVersion": version}, "items": [node("7")]});
    let server = Server::new([
        Answer::Json(200, nodes("700")),
        Answer::QuietWatch("700"),
        Answer::Json(404, failure(404)),
        Answer::OpenWatch(vec![]),
        Answer::Json(200, nodes("20")),
        Answer::OpenWatch(vec![]),
    ]);
    server.versions_from(20);
    let watch = Watch::<Node>::new(Input::Node).named("n1").dispensable();
    let mut running = server.run(watch, &Health::default());
    for _ in 0..2 {
        assert_eq!(running.next().await, "all n1");
    }
    let asked = server.asked();
    assert!(
        asked
            .iter()
            .all(|asked| asked.contains("fieldSelector=metadata.name%3Dn1")),
        "{asked:?}"
    );
    assert_eq!(server.comparisons().len(), 1, "{asked:?}");
}

/// Each comparison costs a list of metadata.
#[tokio::test(start_paused = true)]
async fn watches_that_keep_breaking_lead_to_few_comparisons() {
    let broken = || {
        Answer::SilentWatch(
            Duration::from_millis(500),
            Err(io::ErrorKind::ConnectionReset.into()),
        )
    };
    let first = Answer::Json(200, list("7", "", []));
    let server = Server::new(std::iter::once(first).chain((0..10_000).map(|_| broken())));
    let mut running = server.run(Watch::new(Input::Service), &Health::default());
    assert_eq!(running.next().await, "all");
    assert!(
        timeout(Duration::from_secs(600), running.inputs.recv())
            .await
            .is_err()
    );
    let comparisons = server.comparisons().len();
    let asked = server.asked().len();
    assert!(
        (3..=8).contains(&comparisons) && asked > 500,
        "{comparisons} among {asked} requests in 10 minutes"
    );
}

/// Other writes have passed the version of the watch before its next request, so no version goes
/// back.
#[tokio::test(start_paused = true)]
async fn restored_data_whose_versions_passed_on_are_listed_again() {
    let restored = || [service("a", "1"), service("c", "650")];
    let server = Server::new([
        Answer::Json(
            200,
            list("700", "", [service("a", "1"), service("b", "600")]),
        ),
        Answer::Watch(vec![]),
        Answer::OpenWatch(vec![
            json!({"type": "ADDED", "object": service("d", "800")}),
        ]),
        Answer::Json(200, list("900", "", restored())),
        Answer::OpenWatch(vec![]),
    ]);
    let health = Health::default();
    let mut running = server.run(Watch::new(Input::Service), &health);
    assert_eq!(running.next().await, "all a b");
    server.has(restored());
    let ended = Instant::now();
    assert_eq!(running.next().await, "put d");
    server.has(restored());
    assert_eq!(
        running.next().await,
        "all a c",
        "c is there again, b and d are gone"
    );
    assert!(
        ended.elapsed() < Duration::from_secs(5),
        "{:?}",
        ended.elapsed()
    );
    sleep(Duration::from_secs(60)).await;
    assert!(health.problems().is_empty());
}

#[tokio::test(start_paused = true)]
async fn event_on_its_way_is_no_difference() {
    let (events, fed) = mpsc::unbounded_channel();
    let server = Server::new([
        Answer::Json(200, list("700", "", [service("a", "1")])),
        Answer::Watch(vec![]),
        Answer::FedWatch(fed),
    ]);
    let mut running = server.run(Watch::new(Input::Service), &Health::default());
    assert_eq!(running.next().await, "all a");
    server.has([service("a", "1"), service("b", "701")]);
    while server.comparisons().is_empty() {
        sleep(Duration::from_millis(10)).await;
    }
    events
        .send(json!({"type": "ADDED", "object": service("b", "701")}))
        .unwrap();
    assert_eq!(running.next().await, "put b");
    sleep(Duration::from_secs(60)).await;
    assert!(
        running.inputs.try_recv().is_err(),
        "nothing is listed again: {:?}",
        server.asked()
    );
}

#[tokio::test(start_paused = true)]
async fn all_is_compared_once_in_hours() {
    let quiet = (0..200).map(|_| Answer::QuietWatch("700"));
    let first = Answer::Json(200, list("700", "", [service("a", "1")]));
    let server = Server::new(std::iter::once(first).chain(quiet));
    let mut running = server.run(Watch::new(Input::Service), &Health::default());
    assert_eq!(running.next().await, "all a");
    sleep(Duration::from_secs(12 * 3_600)).await;
    assert!(
        (2..=4).contains(&server.comparisons().len()),
        "{:?}",
        server.comparisons()
    );
    assert!(running.inputs.try_recv().is_err());
}
