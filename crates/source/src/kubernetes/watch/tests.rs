mod history;
mod server;
mod slow;

use k8s_openapi::api::networking::v1::ServiceCIDR;
use serde_json::json;
use tokio::time::{sleep, timeout};

use self::server::{Answer, Server, failure, list, list_end, service};
use super::*;
use crate::health::Problem;

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_too_old_leads_to_a_new_list() {
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
        Answer::OpenWatch(vec![
            json!({"type": "MODIFIED", "object": service("d", "21")}),
        ]),
    ]);
    let health = Health::default();
    let watch = Watch::new(Input::Service)
        .labels("!unwanted")
        .fields("spec.clusterIP!=None");
    let mut running = server.run(watch, &health);
    for expected in ["all a b", "put c", "del default/a", "all d", "put d"] {
        assert_eq!(running.next().await, expected);
    }
    assert!(
        health.problems().is_empty(),
        "an old watch is no problem: {:?}",
        health.problems()
    );
    let asked = server.asked();
    let selectors = "&labelSelector=%21unwanted&fieldSelector=spec.clusterIP%21%3DNone";
    assert!(
        asked[0].starts_with("/api/v1/services?") && asked[0].contains("limit=1000"),
        "{asked:?}"
    );
    assert!(asked[1].contains("continue=more"), "{asked:?}");
    assert!(
        asked[2].contains("watch=true") && asked[2].contains("resourceVersion=7"),
        "{asked:?}"
    );
    assert!(
        asked[2].contains("timeoutSeconds=2") && asked[2].contains("allowWatchBookmarks=true"),
        "{asked:?}"
    );
    assert!(asked[3].contains("limit=1000"), "{asked:?}");
    assert!(
        asked[5].contains("watch=true") && asked[5].contains("resourceVersion=20"),
        "{asked:?}"
    );
    for selector in selectors.split('&') {
        assert!(
            asked[..6].iter().all(|asked| asked.contains(selector)),
            "{selector}: {asked:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_is_streamed_where_the_server_supports_it() {
    let added =
        |name: &str, version: &str| json!({"type": "ADDED", "object": service(name, version)});
    let end = list_end("9");
    let gone = json!({"type": "DELETED", "object": service("c", "8")});
    let server = Server::new([
        Answer::List(vec![added("a", "1")]),
        Answer::List(vec![
            added("a", "1"),
            added("c", "3"),
            added("b", "2"),
            gone,
            end,
        ]),
        Answer::OpenWatch(vec![
            json!({"type": "MODIFIED", "object": service("b", "10")}),
        ]),
    ]);
    let health = Health::default();
    let mut running = server.run(Watch::new(Input::Service), &health);
    assert_eq!(
        running.next().await,
        "all a b",
        "without objects that were cut off or are gone"
    );
    assert_eq!(running.next().await, "put b");
    let asked = server.asked();
    let streamed = "timeoutSeconds=1200&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
    assert!(
        asked[..2]
            .iter()
            .all(|asked| asked.contains(streamed) && !asked.contains("limit=")),
        "{asked:?}"
    );
    assert!(
        asked[2].contains("resourceVersion=9") && !asked[2].contains(streamed),
        "{asked:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_server_without_streams_is_soon_asked_only_for_pages() {
    let event = |name: &str, kind: &str, bytes: usize| {
        let mut object = service(name, "1");
        object["metadata"]["annotations"] = json!({"text": "x".repeat(bytes)});
        json!({"type": kind, "object": object})
    };
    let added = event("x", "ADDED", 0);
    // The events exceed a list's minimum for a minute, but bring no new objects.
    let busy = Answer::EndlessList(vec![], event("x", "MODIFIED", 30_000));
    let all = (0..40)
        .map(|n| event(&format!("x{n}"), "ADDED", 30_000))
        .collect();
    let large = Answer::EndlessList(all, event("x0", "MODIFIED", 30_000));
    let broken = json!({"type": "MODIFIED", "object": {"metadata": {"name": "x"}, "spec": "x".repeat(30_000)}});
    let few = Answer::SlowList(100, 500, Duration::ZERO, vec![]);
    let soon = Duration::from_secs(11);
    let late = Duration::from_secs(61);
    let refusals = [
        ("refuses", None, Duration::from_secs(1), 1),
        ("does not answer", Some(Answer::UnansweredList), late, 0),
        (
            "has nothing to say",
            Some(Answer::OpenList(vec![])),
            soon,
            0,
        ),
        (
            "takes it for a watch",
            Some(Answer::OpenList(vec![added])),
            soon,
            0,
        ),
        ("sends it byte by byte", Some(Answer::TrickledList), soon, 0),
        (
            "takes it for a watch that is never silent",
            Some(busy),
            late,
            0,
        ),
        (
            "takes it for a watch of what cannot be read",
            Some(Answer::EndlessList(vec![], broken)),
            late,
            0,
        ),
        (
            "takes it for a watch, and has many objects",
            Some(large),
            2 * late,
            0,
        ),
        (
            "takes it for a watch, and has new objects",
            Some(few),
            late,
            0,
        ),
    ];
    for (server_that, answer, within, refused) in refusals {
        let server = Server::new(answer.into_iter().chain([
            Answer::Json(200, list("7", "", [service("a", "1")])),
            Answer::Watch(vec![json!({"type": "ERROR", "object": failure(410)})]),
            Answer::Json(200, list("20", "", [service("b", "20")])),
            Answer::OpenWatch(vec![]),
        ]));
        let began = Instant::now();
        let mut running = server.run(Watch::new(Input::Service), &Health::default());
        assert_eq!(running.next().await, "all a", "{server_that}");
        assert!(
            began.elapsed() < within,
            "{server_that}: {:?}",
            began.elapsed()
        );
        assert_eq!(running.next().await, "all b", "{server_that}");
        assert_eq!(
            server.streams_refused(),
            refused,
            "{server_that}: {:?}",
            server.asked()
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_keeps_breaking_is_given_up() {
    let broken = || Answer::List(vec![json!({"type": "ADDED", "object": service("a", "1")})]);
    let too_old = Answer::List(vec![json!({"type": "ERROR", "object": failure(410)})]);
    let server = Server::new([
        broken(),
        too_old,
        broken(),
        Answer::Json(200, list("7", "", [service("a", "1"), service("b", "2")])),
        Answer::OpenWatch(vec![]),
    ]);
    let mut running = server.run(Watch::new(Input::Service), &Health::default());
    assert_eq!(running.next().await, "all a b", "nothing of half a list");
    assert_eq!(server.streams_refused(), 0, "{:?}", server.asked());
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
        [
            Answer::Json(200, list("7", "", [service("a", "1")])),
            Answer::Watch(vec![]),
        ]
        .into_iter()
        .chain(away)
        .chain([
            Answer::Json(410, failure(410)),
            Answer::Json(200, list("20", "", [service("b", "20")])),
        ]),
    );
    let health = Health::default();
    let mut running = server.run(Watch::new(Input::Service), &health);
    assert_eq!(running.next().await, "all a");
    let asked = async {
        while server.asked().len() < 11 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(600), asked)
        .await
        .expect("asked until it is back");
    let back = Instant::now();
    assert!(
        health.problems()[&Problem::Watch("Service".into())]
            .why
            .ends_with("no route"),
        "{:?}",
        health.problems()
    );
    assert_eq!(running.next().await, "all b");
    assert!(
        back.elapsed() < Duration::from_secs(1),
        "{:?}",
        back.elapsed()
    );
    assert!(health.problems().is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_object_costs_only_itself() {
    let broken = |version| {
        let mut broken = service("a", version);
        broken["spec"]["ports"] = json!("eighty");
        broken
    };
    let server = Server::new([
        Answer::Json(200, list("7", "", [service("a", "1"), service("b", "2")])),
        Answer::Watch(vec![
            json!({"type": "MODIFIED", "object": broken("8")}),
            json!({"type": "MODIFIED", "object": service("b", "9")}),
            json!({"type": "ERROR", "object": failure(410)}),
        ]),
        Answer::Json(200, list("9", "", [broken("8"), service("b", "9")])),
        Answer::OpenWatch(vec![
            json!({"type": "MODIFIED", "object": service("a", "10")}),
        ]),
    ]);
    let health = Health::default();
    let mut running = server.run(Watch::new(Input::Service), &health);
    assert_eq!(running.next().await, "all a b");
    assert_eq!(
        running.next().await,
        "put b",
        "a bad object is left out, and its last form stays"
    );
    assert_eq!(running.next().await, "all b, but default/a");
    let why = &health.problems()[&Problem::Objects("Service".into())].why;
    assert!(
        why.starts_with("1 cannot be read, such as default/a: ") && why.contains("eighty"),
        "{why}"
    );
    assert_eq!(running.next().await, "put a");
    tokio::task::yield_now().await;
    assert!(health.problems().is_empty(), "{:?}", health.problems());
}

#[tokio::test(start_paused = true)]
async fn a_gap_between_events_costs_a_new_list() {
    let server = Server::new([
        Answer::Json(200, list("7", "", [service("a", "1")])),
        Answer::OpenWatch(vec![
            json!({"type": "MODIFIED", "object": service("a", "9")}),
            json!({"type": "MODIFIED", "object": service("a", "9")}),
            json!({"type": "ADDED", "object": service("b", "8")}),
        ]),
        Answer::Json(200, list("9", "", [service("a", "9"), service("b", "8")])),
        Answer::OpenWatch(vec![]),
    ]);
    let mut running = server.run(Watch::new(Input::Service), &Health::default());
    for expected in ["all a", "put a", "put a", "all a b"] {
        assert_eq!(running.next().await, expected);
    }
}

#[tokio::test(start_paused = true)]
async fn an_outage_of_ten_minutes_ends_within_a_second_and_costs_little() {
    let server = Server::new([
        Answer::Json(200, list("7", "", [service("a", "1")])),
        Answer::Watch(vec![]),
        Answer::OpenWatch(vec![json!({"type": "ADDED", "object": service("b", "8")})]),
    ]);
    let health = Health::default();
    let mut running = server.run(Watch::new(Input::Service), &health);
    assert_eq!(running.next().await, "all a");
    server.set_away(true);
    sleep(Duration::from_secs(600)).await;
    assert!(
        health.problems()[&Problem::Watch("Service".into())]
            .why
            .ends_with("no route"),
        "{:?}",
        health.problems()
    );
    let asked = server.asked().len() - 1;
    let probed = server.probed();
    assert!((15..=40).contains(&asked), "{asked} requests in 10 minutes");
    assert!(
        (1_000..=2_000).contains(&probed),
        "{probed} probes in 10 minutes"
    );
    server.set_away(false);
    let back = Instant::now();
    assert_eq!(running.next().await, "put b");
    assert!(
        back.elapsed() < Duration::from_secs(1),
        "{:?}",
        back.elapsed()
    );
    sleep(Duration::from_secs(60)).await;
    assert!(health.problems().is_empty());
    assert!(
        server.probed() <= probed + 2,
        "a healthy server is not probed"
    );
}

/// A starting server's authorizer denies everything until it has loaded its rules.
#[tokio::test(start_paused = true)]
async fn a_server_that_warms_up_is_followed_within_a_second() {
    let denied = || (0..1_000).map(|_| Answer::Json(403, failure(403)));
    let server = Server::new([
        Answer::Json(200, list("7", "", [service("a", "1")])),
        Answer::Watch(vec![]),
    ]);
    let health = Health::default();
    let mut running = server.run(Watch::new(Input::Service), &health);
    assert_eq!(running.next().await, "all a");
    server.set_away(true);
    sleep(Duration::from_secs(60)).await;
    server.answers(denied());
    server.set_away(false);
    sleep(Duration::from_secs(8)).await;
    assert_eq!(
        health.problems()[&Problem::Watch("Service".into())].why,
        "403 Failed: no such luck"
    );
    server.answers([Answer::OpenWatch(vec![
        json!({"type": "ADDED", "object": service("b", "8")}),
    ])]);
    let warm = Instant::now();
    assert_eq!(running.next().await, "put b");
    assert!(
        warm.elapsed() <= Duration::from_secs(1),
        "{:?}",
        warm.elapsed()
    );

    let server = Server::new(denied());
    let _running = server.run(Watch::new(Input::Service), &health);
    sleep(Duration::from_secs(600)).await;
    assert!(
        (40..=80).contains(&server.asked().len()),
        "{} requests in 10 minutes",
        server.asked().len()
    );
}

#[tokio::test(start_paused = true)]
async fn a_refused_needed_kind_is_listed_once_it_is_allowed() {
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
    assert_eq!(
        health.problems()[&Problem::Watch("Service".into())].why,
        "403 Failed: no such luck"
    );
    assert_eq!(running.next().await, "all a");
    assert!(health.problems().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_refused_dispensable_kind_is_empty_once() {
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
    let mut running = server.run(
        Watch::<ServiceCIDR>::new(Input::ServiceCidr).dispensable(),
        &health,
    );
    assert_eq!(running.next().await, "refused");
    assert_eq!(
        health.problems()[&Problem::Watch("ServiceCIDR".into())].why,
        "403 Failed: no such luck"
    );
    assert_eq!(running.next().await, "all kubernetes");
    let mut problems = health.subscribe();
    problems
        .wait_for(|problems| !problems.is_empty())
        .await
        .unwrap();
    problems
        .wait_for(|problems| problems.is_empty())
        .await
        .unwrap();
    assert!(
        running.inputs.try_recv().is_err(),
        "listed objects stay when the watch is refused"
    );
}

#[tokio::test(start_paused = true)]
async fn an_unserved_kind_is_empty_without_a_problem_and_asked_for_again() {
    let server = Server::new([
        Answer::Json(404, failure(404)),
        Answer::Json(404, failure(404)),
    ]);
    let health = Health::default();
    let mut running = server.run(
        Watch::<ServiceCIDR>::new(Input::ServiceCidr).dispensable(),
        &health,
    );
    assert_eq!(running.next().await, "refused");
    assert!(
        timeout(UNSERVED_RETRY.mul_f32(2.3), running.inputs.recv())
            .await
            .is_err()
    );
    assert!(health.problems().is_empty());
    assert_eq!(server.asked().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_withheld_kind_is_empty_without_a_problem() {
    let server = Server::new([
        Answer::Json(403, failure(403)),
        Answer::Json(403, failure(403)),
    ]);
    let health = Health::default();
    let mut running = server.run(
        Watch::<ServiceCIDR>::new(Input::ServiceCidr).optional(),
        &health,
    );
    assert_eq!(running.next().await, "refused");
    assert!(
        timeout(UNSERVED_RETRY.mul_f32(2.3), running.inputs.recv())
            .await
            .is_err()
    );
    assert!(health.problems().is_empty());
    assert_eq!(server.asked().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_kind_that_is_withheld_after_a_list_is_a_problem() {
    let cidrs = json!({"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDRList", "metadata": {"resourceVersion": "3"},
        "items": [{"metadata": {"name": "kubernetes", "resourceVersion": "1"}}]});
    let server = Server::new([
        Answer::Json(200, cidrs),
        Answer::Json(403, failure(403)),
        Answer::OpenWatch(vec![]),
    ]);
    let health = Health::default();
    let mut running = server.run(
        Watch::<ServiceCIDR>::new(Input::ServiceCidr).optional(),
        &health,
    );
    assert_eq!(running.next().await, "all kubernetes");
    let mut problems = health.subscribe();
    // A kind that was never served is requested again after this time.
    timeout(UNSERVED_RETRY, async {
        problems
            .wait_for(|problems| !problems.is_empty())
            .await
            .unwrap();
        problems
            .wait_for(|problems| problems.is_empty())
            .await
            .unwrap();
    })
    .await
    .unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_cached_kind_is_listed_from_the_servers_cache() {
    let server = Server::new([
        Answer::Json(200, list("7", "", [service("a", "1")])),
        Answer::OpenWatch(vec![]),
    ]);
    let health = Health::default();
    let mut running = server.run(
        Watch::new(Input::Service)
            .fields("spec.nodeName=n1")
            .cached(),
        &health,
    );
    assert_eq!(running.next().await, "all a");
    let asked = server.asked();
    let list = asked
        .iter()
        .find(|asked| !asked.contains("watch=true"))
        .unwrap();
    assert!(
        list.contains("resourceVersion=0") && !list.contains("limit="),
        "{list}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_resumed_watch_ends_the_problem_without_an_event() {
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
    problems
        .wait_for(|problems| problems.contains_key(&Problem::Watch("Service".into())))
        .await
        .unwrap();
    let began = Instant::now();
    problems
        .wait_for(|problems| problems.is_empty())
        .await
        .unwrap();
    assert!(
        began.elapsed() < Duration::from_secs(10),
        "{:?}",
        began.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ends_every_watch_at_once_is_not_flooded() {
    let first = Answer::Json(200, list("7", "", []));
    let server =
        Server::new(std::iter::once(first).chain((0..10_000).map(|_| Answer::Watch(vec![]))));
    let health = Health::default();
    let mut running = server.run(Watch::new(Input::Service), &health);
    assert_eq!(running.next().await, "all");
    assert!(
        timeout(Duration::from_secs(10), running.inputs.recv())
            .await
            .is_err()
    );
    let asked = server.asked().len() - server.comparisons().len();
    assert!((20..=34).contains(&asked), "{asked} requests in 10 s");
    assert!(
        health.problems()[&Problem::Watch("Service".into())]
            .why
            .starts_with("no watch lasts"),
        "{:?}",
        health.problems()
    );
}

#[tokio::test(start_paused = true)]
async fn refused_credentials_are_read_again_after_a_while() {
    let server = Server::new((0..100).map(|_| Answer::Json(401, failure(401))));
    let health = Health::default();
    let began = Instant::now();
    let ended = server
        .run(Watch::new(Input::Service), &health)
        .ended
        .await
        .unwrap();
    assert_eq!(ended, WatchExit::Unauthorized);
    assert!(began.elapsed() > CREDENTIALS_AGE);
    assert_eq!(
        health.problems()[&Problem::Watch("Service".into())].why,
        "401 Failed: no such luck"
    );
}
