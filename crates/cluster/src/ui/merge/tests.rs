use serde_json::json;

use super::*;

fn shape(name: &str, ready: usize) -> Shape {
    Shape {
        namespace: "shop".to_owned(),
        name: name.to_owned(),
        r#type: "ClusterIP".to_owned(),
        addresses: vec!["10.96.0.1".parse().unwrap()],
        ports: Vec::new(),
        ready,
        total: 3,
        conflicts: 0,
        endpoints: "aGVsbG8h".to_owned(),
    }
}

fn status(programs: bool) -> Status {
    let programs = if programs {
        json!({"kpx_ingress": {"id": 1, "tag": "ab"}})
    } else {
        json!({})
    };
    let device = json!({"name": "eth0", "ifindex": 2, "attachedBy": "tcx", "role": "device"});
    serde_json::from_value(json!({
        "version": "0.1.0", "started": "2026-01-01T00:00:00Z", "mode": "node", "nodeName": "n", "nodeAddresses": [],
        "options": {"masquerade": "default", "masqueradeAll": false, "localPods": "none", "nodePortAddresses": "all",
            "clusterIpExternal": false},
        "healthy": true, "complete": true, "lastSync": null, "syncs": 1, "problems": [], "skipped": [],
        "devices": [device], "tables": {}, "flows": {}, "events": {}, "reasons": {}, "mapFill": {}, "programs": programs,
    }))
    .unwrap()
}

const EXACT: Skew = Skew {
    secs: 0.0,
    error: 0.001,
};

/// A cluster of nodes that answer, at a time that a test moves.
struct Cluster {
    merged: Merged,
    now: Instant,
}

impl Cluster {
    fn of(nodes: &[&str]) -> Self {
        let mut cluster = Self {
            merged: Merged::default(),
            now: Instant::now(),
        };
        let names: Vec<_> = nodes.iter().map(ToString::to_string).collect();
        cluster.merged.keep(&names);
        for node in nodes {
            cluster.answer(node, status(true));
        }
        cluster
    }

    fn answer(&mut self, node: &str, status: Status) {
        self.merged.begin(node);
        self.merged.take_status(node, status, EXACT, self.now);
    }

    /// Sends the shapes of a node, as its Services 1, 2, …
    fn shapes(&mut self, node: &str, shapes: &[Shape]) {
        let numbered = (1..).zip(shapes.iter().map(Digest::of)).collect();
        self.round(node, numbered, Vec::new(), shapes);
    }

    fn round(
        &mut self,
        node: &str,
        shapes: Vec<(u32, Digest)>,
        counts: Vec<(u32, RowCounts)>,
        known: &[Shape],
    ) {
        let round = Round {
            services: 1,
            shapes,
            counts,
            ..Round::default()
        };
        let asked = self.merged.take_round(node, round, self.now);
        let shaped = known.iter().map(|shape| Shaped {
            digest: Digest::of(shape),
            shape: shape.clone(),
        });
        let shaped = shaped
            .filter(|shaped| asked.contains(&shaped.digest))
            .collect();
        self.merged.take_shapes(node, &asked, shaped);
    }

    fn counts(&mut self, node: &str, opened: u64, unserved: f64) {
        let failures = RowFailures {
            unserved,
            failed: 0.0,
        };
        let counts = RowCounts(opened, opened, [opened, 0, 0, 0, 0], failures);
        self.round(node, Vec::new(), vec![(1, counts)], &[]);
    }

    fn wait(&mut self, secs: u64) {
        self.now += Duration::from_secs(secs);
    }

    fn rows(&mut self) -> Vec<ClusterRow> {
        self.merged.rows(self.now)
    }

    /// Returns the nodes that differ in the only row.
    fn differ(&mut self) -> String {
        let rows = self.rows();
        let texts = rows[0]
            .differ
            .iter()
            .map(|one| format!("{}: {}", one.node, one.what));
        texts.collect::<Vec<_>>().join("; ")
    }

    fn problems(&self) -> String {
        let status = self.merged.status("c".to_owned(), None);
        let texts = status.nodes.iter().flat_map(|node| {
            let problems = node.problems.iter();
            problems.map(|problem| format!("{}: {}", node.name, problem.what))
        });
        texts.collect::<Vec<_>>().join("; ")
    }
}

#[test]
fn node_with_other_endpoints_differs_though_as_many_are_ready() {
    let mut cluster = Cluster::of(&["n1", "n2", "n3"]);
    for node in ["n1", "n2"] {
        cluster.shapes(node, &[shape("web", 3)]);
    }
    let other = Shape {
        endpoints: "b3RoZXIh".to_owned(),
        ..shape("web", 3)
    };
    cluster.shapes("n3", &[other]);
    cluster.wait(60);
    assert_eq!(cluster.differ(), "n3: other endpoints");
}

#[test]
fn node_that_lags_behind_a_change_differs_after_a_grace() {
    let mut cluster = Cluster::of(&["n1", "n2", "n3"]);
    for node in ["n1", "n2", "n3"] {
        cluster.shapes(node, &[shape("web", 3)]);
    }
    cluster.wait(60);
    assert_eq!(cluster.differ(), "");
    cluster.shapes("n1", &[shape("web", 2)]);
    cluster.wait(1);
    assert_eq!(cluster.differ(), "", "n1 is ahead");
    cluster.shapes("n3", &[shape("web", 2)]);
    cluster.wait(1);
    assert_eq!(cluster.differ(), "", "the change is on its way");
    cluster.wait(9);
    assert_eq!(cluster.differ(), "n2: 3/3 ready");
    let row = &cluster.rows()[0];
    assert_eq!((row.row.shape.ready, row.serving, row.differing), (2, 2, 1));
    cluster.shapes("n2", &[shape("web", 2)]);
    assert_eq!(cluster.differ(), "");
}

#[test]
fn page_has_begun_when_each_node_has_sent_or_failed() {
    let mut empty = Cluster::of(&[]);
    assert!(!empty.merged.has_begun(), "the nodes are unknown");
    let mut cluster = Cluster::of(&["n1", "n2"]);
    assert!(!cluster.merged.has_begun());
    cluster.shapes("n1", &[shape("web", 3)]);
    assert!(!cluster.merged.has_begun());
    cluster
        .merged
        .end("n2", "no answer".to_owned(), Timestamp::now());
    assert!(cluster.merged.has_begun());
    let names = ["n1", "n2", "n3"].map(str::to_owned);
    cluster.merged.keep(&names);
    assert!(cluster.merged.has_begun(), "a node joins");
}

fn deaf() -> Status {
    let unheard = json!({"since": "2026-01-01T00:00:00Z", "kinds": ["Service"]});
    Status {
        unheard: serde_json::from_value(unheard).unwrap(),
        ..status(true)
    }
}

#[test]
fn nodes_that_hear_nothing_lose_to_one_that_hears() {
    let mut cluster = Cluster::of(&["n1", "n2", "n3"]);
    for node in ["n1", "n3"] {
        cluster.answer(node, deaf());
        cluster.shapes(node, &[shape("web", 3)]);
    }
    cluster.shapes("n2", &[shape("web", 2)]);
    cluster.wait(10);
    assert_eq!(cluster.differ(), "n1: 3/3 ready; n3: 3/3 ready");
}

#[test]
fn node_that_keeps_a_removed_service_differs() {
    let mut cluster = Cluster::of(&["n1", "n2", "n3"]);
    for node in ["n1", "n2", "n3"] {
        cluster.shapes(node, &[shape("web", 3)]);
    }
    cluster.wait(10);
    for node in ["n1", "n2"] {
        let gone = Round {
            gone: vec![1],
            ..Round::default()
        };
        let now = cluster.now;
        cluster.merged.take_round(node, gone, now);
    }
    assert_eq!(cluster.differ(), "", "the removal is on its way");
    cluster.wait(10);
    assert_eq!(cluster.differ(), "n3: still has this Service");
    // Of two nodes, the one that hears counts.
    cluster.merged.keep(&["n2".to_owned(), "n3".to_owned()]);
    assert_eq!(cluster.differ(), "n2: does not have this Service");
    let now = cluster.now;
    cluster.merged.take_status("n3", deaf(), EXACT, now);
    assert_eq!(cluster.differ(), "n3: still has this Service");
}

#[test]
fn node_that_hears_nothing_loses_a_tie() {
    let mut cluster = Cluster::of(&["n1", "n2"]);
    cluster.answer("n1", deaf());
    cluster.shapes("n2", &[shape("web", 2)]);
    cluster.wait(1);
    cluster.shapes("n1", &[shape("web", 3)]);
    cluster.wait(10);
    assert_eq!(cluster.differ(), "n1: 3/3 ready");
    assert_eq!(cluster.problems(), "n1: lagging");
}

#[test]
fn node_without_the_service_differs() {
    let mut cluster = Cluster::of(&["n1", "n2", "n3"]);
    for node in ["n1", "n2"] {
        cluster.shapes(node, &[shape("web", 3)]);
    }
    cluster.shapes("n3", &[]);
    cluster.wait(10);
    assert_eq!(cluster.differ(), "n3: does not have this Service");
    // A Service that is being deleted leaves the nodes one after the other.
    let gone = Round {
        gone: vec![1],
        ..Round::default()
    };
    cluster.shapes("n3", &[shape("web", 3)]);
    cluster.wait(10);
    let now = cluster.now;
    cluster.merged.take_round("n1", gone, now);
    assert_eq!(cluster.differ(), "");
    cluster.wait(10);
    assert_eq!(cluster.differ(), "n1: does not have this Service");
}

#[test]
fn node_without_programs_serves_nothing_and_is_named() {
    let mut cluster = Cluster::of(&["n1", "n2"]);
    cluster.answer("n2", status(false));
    for node in ["n1", "n2"] {
        cluster.shapes(node, &[shape("web", 3)]);
    }
    assert_eq!(cluster.rows()[0].serving, 1);
    assert_eq!(cluster.problems(), "n2: no programs");
}

#[test]
fn node_that_rejects_is_named_with_its_rate() {
    let mut cluster = Cluster::of(&["n1", "n2", "n3"]);
    for (node, unserved) in [("n1", 0.0), ("n2", 4.0), ("n3", 9.5)] {
        cluster.shapes(node, &[shape("web", 3)]);
        cluster.counts(node, 0, unserved);
    }
    let row = &cluster.rows()[0];
    let failing: Vec<_> = row.failing.iter().map(|one| one.node.as_str()).collect();
    assert_eq!(failing, ["n3", "n2"]);
    assert!((row.row.failures.unwrap().unserved - 13.5).abs() < 1e-9);
}

#[test]
fn node_that_does_not_answer_is_named_and_leaves_the_rows() {
    let mut cluster = Cluster::of(&["n1", "n2"]);
    for node in ["n1", "n2"] {
        cluster.shapes(node, &[shape("web", 3)]);
    }
    cluster.shapes("n2", &[shape("web", 3), shape("lone", 1)]);
    let at = Timestamp::UNIX_EPOCH;
    cluster
        .merged
        .end("n2", "no answer within 10 s".to_owned(), at);
    cluster
        .merged
        .end("n2", "connection refused".to_owned(), Timestamp::now());
    let rows = cluster.rows();
    assert_eq!((rows.len(), rows[0].serving), (1, 1));
    let status = cluster.merged.status("c".to_owned(), None);
    let problem = &status.nodes[1].problems[0];
    assert_eq!(
        (status.nodes[1].state, problem.why.as_str(), problem.since),
        ("silent", "connection refused", at)
    );
    assert!(!status.healthy);
}

#[test]
fn counters_hold_what_was_seen_and_never_fall() {
    let mut cluster = Cluster::of(&["n1", "n2"]);
    let opened = |cluster: &mut Cluster| cluster.rows()[0].row.counts[0];
    for (node, before) in [("n1", 1_000), ("n2", 50)] {
        let web = shape("web", 3);
        let counts = RowCounts(0, 0, [before, 0, 0, 0, 0], RowFailures::default());
        cluster.round(node, vec![(1, Digest::of(&web))], vec![(1, counts)], &[web]);
    }
    assert_eq!(
        opened(&mut cluster),
        0,
        "what was before is no traffic of now"
    );
    cluster.counts("n1", 1_010, 0.0);
    cluster.counts("n2", 55, 0.0);
    assert_eq!(opened(&mut cluster), 15);
    // The agent restarts without an end of the stream, and counts from 0.
    cluster.counts("n2", 3, 0.0);
    assert_eq!(opened(&mut cluster), 18);
    cluster.merged.end("n1", String::new(), Timestamp::now());
    assert_eq!(opened(&mut cluster), 18);
    cluster.answer("n1", status(true));
    let web = shape("web", 3);
    let counts = RowCounts(0, 0, [1_900, 0, 0, 0, 0], RowFailures::default());
    cluster.round("n1", vec![(1, Digest::of(&web))], vec![(1, counts)], &[web]);
    assert_eq!(opened(&mut cluster), 18, "unseen traffic is no burst");
}

#[test]
fn shape_is_asked_for_once_and_a_lie_stays_its_nodes_own() {
    let mut cluster = Cluster::of(&["n1", "n2", "n3"]);
    let (web, lie) = (shape("web", 3), shape("web", 0));
    let round = || Round {
        services: 1,
        shapes: vec![(1, Digest::of(&web))],
        ..Round::default()
    };
    let now = cluster.now;
    let asked = cluster.merged.take_round("n1", round(), now);
    assert_eq!(asked, [Digest::of(&web)]);
    assert!(cluster.merged.take_round("n2", round(), now).is_empty());
    // n1 answers with another Service's shape.
    let shaped = Shaped {
        digest: Digest::of(&web),
        shape: lie,
    };
    cluster.merged.take_shapes("n1", &asked, vec![shaped]);
    let asked = cluster.merged.missing("n2", now);
    assert_eq!(asked, [Digest::of(&web)], "n2 is asked for its own");
    let shaped = Shaped {
        digest: Digest::of(&web),
        shape: web.clone(),
    };
    cluster.merged.take_shapes("n2", &asked, vec![shaped]);
    assert!(cluster.merged.take_round("n3", round(), now).is_empty());
    cluster.wait(10);
    assert_eq!(cluster.rows()[0].row.shape, web);
    assert_eq!(cluster.differ(), "n1: 0/3 ready");
}

#[test]
fn clock_of_a_node_is_a_problem_when_it_is_seconds_off() {
    let mut cluster = Cluster::of(&["n1"]);
    let off = Skew {
        secs: -4.0,
        error: 0.2,
    };
    let now = cluster.now;
    cluster.merged.take_status("n1", status(true), off, now);
    assert_eq!(cluster.problems(), "n1: clock");
    let since = |cluster: &Cluster| {
        let status = cluster.merged.status("c".to_owned(), None);
        status.nodes[0].problems[0].since
    };
    let begun = since(&cluster);
    cluster.merged.take_status("n1", status(true), off, now);
    assert_eq!(since(&cluster), begun);
}

#[test]
fn node_that_breaks_off_or_is_slow_leaves_its_shapes_to_another() {
    let web = Digest::of(&shape("web", 3));
    let round = || Round {
        services: 1,
        shapes: vec![(1, web)],
        ..Round::default()
    };
    // n1 is asked, and its stream ends, begins anew or is given up before the answer.
    let ends: [fn(&mut Merged); 3] = [
        |merged| merged.end("n1", String::new(), Timestamp::now()),
        |merged| merged.begin("n1"),
        |merged| merged.keep(&["n2".to_owned()]),
    ];
    for end in ends {
        let mut cluster = Cluster::of(&["n1", "n2"]);
        let now = cluster.now;
        assert_eq!(cluster.merged.take_round("n1", round(), now), [web]);
        assert!(cluster.merged.take_round("n2", round(), now).is_empty());
        end(&mut cluster.merged);
        assert_eq!(cluster.merged.missing("n2", now), [web]);
    }
    let mut cluster = Cluster::of(&["n1", "n2"]);
    let now = cluster.now;
    assert_eq!(cluster.merged.take_round("n1", round(), now), [web]);
    assert!(cluster.merged.take_round("n2", round(), now).is_empty());
    assert_eq!(cluster.merged.missing("n2", now + PATIENCE), [web]);
}

#[test]
fn cluster_is_healthy_once_every_node_has_answered() {
    let mut cluster = Cluster::of(&["n1"]);
    let healthy = |cluster: &Cluster| cluster.merged.status("c".to_owned(), None).healthy;
    assert!(healthy(&cluster));
    cluster.merged.keep(&["n1".to_owned(), "n2".to_owned()]);
    assert!(!healthy(&cluster), "n2 is unknown");
    cluster.answer("n2", status(true));
    assert!(healthy(&cluster));
}

#[test]
fn node_that_comes_back_adds_no_burst_of_reasons() {
    let counted = |count: u64| Status {
        reasons: BTreeMap::from([("no_endpoints".to_owned(), count)]),
        events: BTreeMap::from([("resync".to_owned(), count)]),
        ..status(true)
    };
    let sums = |cluster: &Cluster| {
        let status = cluster.merged.status("c".to_owned(), None);
        let sum = |of: &BTreeMap<String, u64>| of.values().sum::<u64>();
        (sum(&status.reasons), sum(&status.events))
    };
    let mut cluster = Cluster::of(&[]);
    cluster.answer("n1", counted(100));
    let now = cluster.now;
    cluster.merged.take_status("n1", counted(107), EXACT, now);
    assert_eq!(sums(&cluster), (7, 7));
    cluster.merged.end("n1", String::new(), Timestamp::now());
    cluster.answer("n1", counted(5_000));
    assert_eq!(sums(&cluster), (7, 7));
    cluster.merged.take_status("n1", counted(5_001), EXACT, now);
    assert_eq!(sums(&cluster), (8, 8));
}

#[test]
fn every_node_that_fails_or_differs_is_counted_and_found() {
    let names: Vec<_> = (10..60).map(|n| format!("n{n}")).collect();
    let nodes: Vec<_> = names.iter().map(String::as_str).collect();
    let mut cluster = Cluster::of(&nodes);
    for (node, ready) in nodes.iter().zip([2; 20].into_iter().chain([3; 30])) {
        cluster.shapes(node, &[shape("web", ready)]);
        cluster.counts(node, 0, 1.0);
    }
    cluster.wait(10);
    let row = &cluster.rows()[0];
    assert_eq!((row.failing.len(), row.differ.len()), (NAMED, NAMED));
    assert_eq!(
        (row.failing_nodes.unserved, row.failing_nodes.failed),
        (50, 0)
    );
    assert_eq!(row.differing, 20);
    let now = cluster.now;
    let apart = cluster.merged.apart("shop", "web", now);
    assert_eq!(apart.len(), 50);
    assert_eq!(apart["n29"].differs.as_deref(), Some("2/3 ready"));
    assert_eq!(apart["n59"].differs, None);
    assert!(apart.values().all(|one| one.failures.unserved > 0.9));
    assert!(cluster.merged.apart("shop", "other", now).is_empty());
}

#[test]
fn removal_of_a_service_hides_no_absence_of_another() {
    let mut cluster = Cluster::of(&["n1", "n2"]);
    cluster.shapes("n1", &[shape("web", 3), shape("job", 3)]);
    cluster.shapes("n2", &[shape("job", 3)]);
    cluster.wait(10);
    let gone = Round {
        gone: vec![1],
        ..Round::default()
    };
    let now = cluster.now;
    cluster.merged.take_round("n2", gone, now);
    let differ: Vec<_> = cluster.rows().iter().map(|row| row.differing).collect();
    assert_eq!(differ, [0, 1], "job is on its way, web is missing");
    cluster.wait(10);
    let differ: Vec<_> = cluster.rows().iter().map(|row| row.differing).collect();
    assert_eq!(differ, [1, 1]);
}

#[test]
fn many_nodes_with_longer_rounds_have_more_time() {
    let names: Vec<_> = (0..400).map(|n| format!("n{n}")).collect();
    let nodes: Vec<_> = names.iter().map(String::as_str).collect();
    let mut cluster = Cluster::of(&nodes);
    for node in &nodes {
        cluster.shapes(node, &[shape("web", 3)]);
    }
    cluster.wait(60);
    for node in &nodes[1..] {
        cluster.shapes(node, &[shape("web", 2)]);
    }
    cluster.wait(24);
    assert_eq!(cluster.differ(), "", "a round takes 10 s");
    cluster.wait(1);
    assert_eq!(cluster.differ(), "n0: 3/3 ready");
}

#[test]
fn node_sends_only_shapes_that_it_was_asked_for() {
    let mut cluster = Cluster::of(&["n1"]);
    let (web, more) = (shape("web", 3), shape("more", 1));
    let shaped = |shape: &Shape| Shaped {
        digest: Digest::of(shape),
        shape: shape.clone(),
    };
    let asked = [Digest::of(&web)];
    let shapes = vec![shaped(&web), shaped(&more)];
    cluster.merged.take_shapes("n1", &asked, shapes);
    let known: Vec<_> = cluster.merged.shapes.keys().collect();
    assert_eq!(known, [&Digest::of(&web)]);
    assert_eq!(cluster.merged.keys.len(), 1);
}

#[test]
fn node_with_endless_services_fills_no_memory_and_is_named() {
    let mut cluster = Cluster::of(&["n1"]);
    let digest = Digest::of(&shape("web", 3));
    let numbers = 0..=u32::try_from(MOST_SERVICES).unwrap();
    let shapes = numbers.map(|number| (number, digest)).collect();
    cluster.round("n1", shapes, Vec::new(), &[]);
    assert_eq!(cluster.merged.nodes["n1"].services.len(), MOST_SERVICES);
    assert_eq!(cluster.problems(), "n1: too many Services");
}
