use proptest::prelude::*;
use proxy_common::connect::Voter;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn path(nth: u8) -> Path {
    Path {
        service: "10.96.0.1:80".parse().unwrap(),
        backend: format!("10.244.0.{nth}:8080").parse().unwrap(),
    }
}

/// The first backend, by its own failures.
fn own() -> Silent {
    [(path(1), Evidence::Own)].into()
}

/// Returns failures of `clients` clients in turn.
fn votes(failures: u32, clients: u32) -> Votes {
    (0..failures).fold(Votes::NONE, |votes, nth| {
        votes.with(Voter((nth % clients) as u8))
    })
}

const fn reading(votes: Votes) -> Reading {
    Reading {
        votes,
        answered: 0,
        unanswered: None,
    }
}

/// Applies a reading of one backend, at a time in tenths of a second.
fn read(judge: &mut Judge, votes: Votes, tenths: u32) -> Vec<Change> {
    judge.read(
        &[(path(1), reading(votes))].into(),
        Vec::new(),
        SECOND / 10 * tenths,
        |_| true,
    )
}

fn begun() -> Judge {
    let mut judge = Judge::default();
    assert_eq!(read(&mut judge, Votes::NONE, 0), []);
    judge
}

#[test]
fn three_failures_of_two_clients_make_a_backend_silent() {
    for (failures, clients, is_silent) in [
        (2, 2, false),
        (3, 1, false),
        (200, 1, false),
        (3, 2, true),
        (255, 24, true),
    ] {
        let mut judge = begun();
        let changes = read(&mut judge, votes(failures, clients), 1);
        assert_eq!(
            changes,
            Vec::from_iter(is_silent.then_some(Change::Silent(path(1)))),
            "{failures} {clients}"
        );
        assert_eq!(judge.silent().contains_key(&path(1)), is_silent);
    }
}

#[test]
fn failures_must_come_within_a_window_and_since_the_last_answer() {
    let mut judge = begun();
    for nth in 1..=8 {
        assert_eq!(
            read(&mut judge, votes(nth, 2), nth * 60),
            [],
            "one in six seconds"
        );
    }
    let mut judge = begun();
    for nth in 0..20 {
        assert_eq!(
            read(&mut judge, votes(2, 2), nth),
            [],
            "two and an answer, again and again"
        );
        assert_eq!(read(&mut judge, Votes::NONE, nth), []);
    }
}

#[test]
fn counts_of_before_the_start_and_of_other_pods_are_no_failures() {
    let mut judge = Judge::default();
    assert_eq!(read(&mut judge, votes(200, 9), 0), []);
    assert_eq!(read(&mut judge, votes(202, 9), 1), []);
    assert_eq!(
        read(&mut judge, votes(203, 9), 2),
        [Change::Silent(path(1))]
    );
    // Another pod gets the address.
    assert_eq!(
        judge.read(
            &[(path(1), reading(votes(204, 9)))].into(),
            Vec::new(),
            SECOND,
            |_| false
        ),
        []
    );
    assert_eq!(judge.silent(), Silent::new());
    assert_eq!(read(&mut judge, votes(206, 9), 20), []);
    assert_eq!(
        read(&mut judge, votes(207, 9), 21),
        [Change::Silent(path(1))]
    );
}

#[test]
fn flapping_backend_waits_longer_each_time() {
    let mut judge = begun();
    let mut failures = 3;
    let mut now = SECOND;
    let read = |judge: &mut Judge, votes, now| {
        judge.read(&[(path(1), reading(votes))].into(), Vec::new(), now, |_| {
            true
        })
    };
    assert_eq!(
        read(&mut judge, votes(failures, 2), now),
        [Change::Silent(path(1))]
    );
    for secs in [5, 10, 20, 40, 80, 160, 300, 300] {
        now += SECOND * secs;
        judge.pass(now - SECOND / 100);
        assert_eq!(judge.silent(), own(), "{secs} s are not over");
        judge.pass(now);
        assert!(
            judge.silent().is_empty() && judge.waits(),
            "on trial after {secs} s"
        );
        assert_eq!(
            read(&mut judge, votes(failures, 2), now + TRIAL),
            [],
            "nothing has come"
        );
        assert_eq!(judge.silent(), own(), "a trial is short");
        failures += 1;
        now += SECOND;
        assert_eq!(
            read(&mut judge, votes(failures, 2), now),
            [],
            "operators know"
        );
        judge.pass(now + VERDICT * 2);
        assert_eq!(judge.silent(), own(), "one failure in a trial");
    }
    now += BACK_OFF_MAX;
    judge.pass(now);
    assert_eq!(
        read(&mut judge, Votes::NONE, now),
        [Change::Answers(path(1))]
    );
    // Its record is kept for a while, and flapping is not reported each time.
    assert_eq!(read(&mut judge, votes(3, 2), now + SECOND), []);
    judge.pass(now + BACK_OFF_MAX);
    assert_eq!(judge.silent(), own());
    judge.pass(now + SECOND + BACK_OFF_MAX);
    assert!(judge.silent().is_empty());
    // An hour later the record is gone.
    assert_eq!(
        read(&mut judge, Votes::NONE, now + BACK_OFF_MAX + SECOND),
        []
    );
    now += SECOND * 3_600;
    assert_eq!(read(&mut judge, Votes::NONE, now), []);
    assert!(judge.backends.is_empty(), "{judge:?}");
    assert_eq!(
        read(&mut judge, votes(3, 2), now),
        [Change::Silent(path(1))]
    );
    judge.pass(now + BACK_OFF);
    assert!(judge.silent().is_empty());
}

#[test]
fn backend_that_flips_all_the_time_is_told_of_rarely() {
    let mut judge = begun();
    let mut reported = Vec::new();
    for secs in 1..=3_600 {
        reported.extend(read(
            &mut judge,
            if secs % 2 == 1 {
                votes(3, 2)
            } else {
                Votes::NONE
            },
            secs * 10,
        ));
        assert_eq!(
            judge.silent().is_empty(),
            secs % 2 == 0,
            "it is judged as ever"
        );
    }
    assert!(
        reported
            .chunks(2)
            .all(|pair| pair == [Change::Silent(path(1)), Change::Answers(path(1))]),
        "{reported:?}"
    );
    assert!(
        (20..50).contains(&reported.len()),
        "two each five minutes in the end: {}",
        reported.len()
    );
    // Continued silence is reported once the time has come.
    let changes = (0..=300).flat_map(|secs| read(&mut judge, votes(3, 2), 36_010 + secs * 10));
    assert_eq!(changes.collect::<Vec<_>>(), [Change::Silent(path(1))]);
}

#[test]
fn trial_without_verdict_comes_again_and_lasts_twice_as_long() {
    let mut judge = begun();
    read(&mut judge, votes(3, 2), 10);
    let mut now = SECOND + BACK_OFF;
    for nth in 0..5 {
        judge.pass(now);
        assert!(judge.silent().is_empty(), "{nth}");
        now += TRIAL * (1 << nth);
        judge.pass(now - SECOND / 100);
        assert!(judge.silent().is_empty(), "{nth}");
        judge.pass(now);
        assert_eq!(judge.silent(), own(), "{nth}");
        now += VERDICT;
    }
    // A late failure of a connection from before the probation does not count.
    let mut judge = begun();
    read(&mut judge, votes(3, 2), 10);
    read(&mut judge, votes(4, 2), 20);
    judge.pass(SECOND + BACK_OFF);
    assert!(judge.silent().is_empty());
}

#[test]
fn silent_backend_that_answers_serves_at_once() {
    let mut judge = begun();
    read(&mut judge, votes(3, 2), 1);
    let answered = [(
        path(1),
        Reading {
            votes: votes(200, 2),
            answered: 1,
            unanswered: None,
        },
    )]
    .into();
    assert_eq!(
        judge.read(&answered, Vec::new(), SECOND / 5, |_| true),
        [Change::Answers(path(1))],
        "though much has failed since"
    );
    assert!(judge.silent().is_empty() && !judge.waits());
}

#[test]
fn backend_that_gets_no_connections_is_forgotten() {
    let mut judge = begun();
    read(&mut judge, votes(3, 2), 1);
    for tenths in 10..6_000 {
        read(&mut judge, votes(3, 2), tenths);
        assert!(judge.waits());
    }
    read(&mut judge, votes(3, 2), 7_000);
    assert!(!judge.waits(), "{judge:?}");
}

/// A backend's history: failures, clients, an optional answer first, and the time since the last
/// step in tenths of a second.
fn history() -> impl Strategy<Value = Vec<(u32, u8, bool, u32)>> {
    prop::collection::vec(
        (0..4_u32, 0..24_u8, prop::bool::weighted(0.2), 0..100_u32),
        1..200,
    )
}

proptest! {
    #[test]
    fn no_history_sets_an_answering_backend_aside(history in history()) {
        let mut judge = begun();
        let mut votes = Votes::NONE;
        let mut now = Duration::ZERO;
        let mut silent = false;
        let mut aside_for = Duration::ZERO;
        let mut answered = 0;
        for (failures, client, answers, tenths) in history {
            let was_silent = judge.silent().contains_key(&path(1));
            now += SECOND / 10 * tenths;
            if was_silent { aside_for += SECOND / 10 * tenths } else { aside_for = Duration::ZERO }
            if answers { (votes, answered) = (Votes::NONE, answered + 1) }
            for nth in 0..failures { votes = votes.with(Voter((client + nth as u8) % 24)) }
            for change in judge.read(&[(path(1), Reading { votes, answered, unanswered: None })].into(), Vec::new(), now, |_| true) {
                // Each change is reported once, alternately.
                prop_assert_eq!(matches!(change, Change::Silent(_)), !silent);
                silent = !silent;
            }
            let is_silent = judge.silent().contains_key(&path(1));
            prop_assert!(!is_silent || votes.failures() >= 1, "its last word was an answer");
            prop_assert!(!is_silent || was_silent || votes.clients() >= 1);
            prop_assert!(aside_for <= BACK_OFF_MAX + SECOND * 10, "{:?}", aside_for);
        }
    }

    #[test]
    fn a_single_client_sets_nobody_aside(failures in prop::collection::vec((1..60_u32, 0..200_u32), 1..60), client in 0..24_u8) {
        let mut judge = begun();
        let mut votes = Votes::NONE;
        let mut now = Duration::ZERO;
        for (more, tenths) in failures {
            for _ in 0..more { votes = votes.with(Voter(client)) }
            now += SECOND / 10 * tenths;
            prop_assert_eq!(judge.read(&[(path(1), reading(votes))].into(), Vec::new(), now, |_| true), vec![]);
            prop_assert!(judge.silent().is_empty());
        }
    }
}

#[test]
fn backend_with_very_many_failures_gets_longer_trials() {
    let mut judge = begun();
    read(&mut judge, votes(400, 2), 10);
    let mut now = SECOND + BACK_OFF;
    for nth in 0..5 {
        judge.pass(now);
        assert!(judge.silent().is_empty(), "{nth}");
        now += TRIAL * (1 << nth);
        judge.read(
            &[(path(1), reading(votes(400, 2)))].into(),
            Vec::new(),
            now - SECOND / 100,
            |_| true,
        );
        assert!(judge.silent().is_empty(), "{nth}: nothing has failed");
        judge.read(
            &[(path(1), reading(votes(400, 2)))].into(),
            Vec::new(),
            now,
            |_| true,
        );
        assert_eq!(judge.silent(), own(), "{nth}");
        now += VERDICT;
    }
}

#[test]
fn clients_who_fail_fast_do_not_outvote_those_who_are_answered() {
    let mut judge = begun();
    for nth in 0..100_u32 {
        let reading = Reading {
            votes: votes(200, 2),
            answered: nth.into(),
            unanswered: None,
        };
        // The first reading has no earlier count to compare with.
        let changes = judge.read(
            &[(path(1), reading)].into(),
            Vec::new(),
            SECOND / 5 * (nth + 1),
            |_| true,
        );
        assert!(
            nth == 0 || !changes.contains(&Change::Silent(path(1))),
            "{nth}: {changes:?}"
        );
    }
    assert!(judge.silent().is_empty());
}

/// The backends of an unresponsive node.
fn node(backends: &[u8]) -> Vec<BTreeSet<Path>> {
    vec![backends.iter().map(|nth| path(*nth)).collect()]
}

/// Applies a reading of two backends, each with its answers and failures.
fn read_two(
    judge: &mut Judge,
    counted: [(u64, u32); 2],
    unresponsive: Vec<BTreeSet<Path>>,
    now: Duration,
) -> Vec<Change> {
    let reading = |(answered, failures)| Reading {
        votes: votes(failures, 2),
        answered,
        unanswered: None,
    };
    let readings = [1, 2]
        .map(path)
        .into_iter()
        .zip(counted.map(reading))
        .collect();
    judge.read(&readings, unresponsive, now, |_| true)
}

#[test]
fn answer_of_one_backend_speaks_for_all_of_a_node() {
    let mut judge = begun();
    assert_eq!(
        read_two(&mut judge, [(7, 0), (9, 0)], node(&[1, 2, 3]), SECOND).len(),
        3
    );
    assert_eq!(
        judge.silent(),
        [1, 2, 3].map(|nth| (path(nth), Evidence::Node)).into()
    );
    assert!(judge.waits() && judge.asks_for(&path(3)));
    assert_eq!(
        read_two(&mut judge, [(7, 0), (9, 0)], Vec::new(), SECOND * 2),
        [],
        "no SYN is late any more"
    );
    let mut other = begun();
    read_two(&mut other, [(7, 0), (9, 0)], node(&[1, 2]), SECOND);
    assert_eq!(
        read_two(&mut other, [(7, 0), (10, 0)], Vec::new(), SECOND * 2).len(),
        2,
        "at the next reading"
    );
    let changes = read_two(&mut judge, [(7, 0), (10, 0)], Vec::new(), SECOND * 3);
    assert_eq!(changes, [1, 2, 3].map(|nth| Change::Answers(path(nth))));
    assert!(judge.silent().is_empty());
    assert_eq!(
        read_two(&mut judge, [(7, 0), (10, 0)], node(&[1, 2]), SECOND * 4),
        [],
        "not at once again"
    );
    assert!(!judge.waits());
    assert_eq!(
        read_two(&mut judge, [(7, 0), (10, 0)], node(&[1, 2]), SECOND * 8).len(),
        2
    );
    judge.pass(SECOND * 8 + BACK_OFF);
    assert_eq!(judge.silent().len(), 2, "the second time lasts longer");
    // The agent deletes the row of old counts.
    assert_eq!(
        read_two(
            &mut judge,
            [(0, 0), (10, 0)],
            Vec::new(),
            SECOND * 8 + BACK_OFF
        ),
        []
    );
}

#[test]
fn backends_of_a_node_are_on_trial_together() {
    let mut judge = begun();
    read_two(&mut judge, [(7, 0), (9, 0)], node(&[1, 2]), SECOND);
    read_two(&mut judge, [(7, 2), (9, 0)], Vec::new(), SECOND * 2);
    let mut now = SECOND + BACK_OFF;
    judge.pass(now);
    assert!(judge.silent().is_empty(), "on trial");
    now += TRIAL;
    assert_eq!(read_two(&mut judge, [(7, 2), (9, 0)], Vec::new(), now), []);
    assert_eq!(judge.silent().len(), 2, "a trial is short");
    now += SECOND;
    assert_eq!(
        read_two(&mut judge, [(7, 2), (9, 1)], Vec::new(), now),
        [],
        "operators know"
    );
    judge.pass(now + BACK_OFF * 2 - SECOND / 100);
    assert_eq!(
        judge.silent().len(),
        2,
        "one failure of any of them doubles the wait"
    );
    judge.pass(now + BACK_OFF * 2);
    assert!(judge.silent().is_empty());
    for secs in 1..3 {
        assert_eq!(
            read_two(
                &mut judge,
                [(7, 2), (9, 1)],
                Vec::new(),
                now + FORGET + SECOND * secs
            ),
            [],
            "nothing is said"
        );
    }
    assert!(judge.silent().is_empty() && !judge.waits(), "{judge:?}");
}

#[test]
fn backend_with_failures_of_its_own_stays_silent_when_its_node_answers() {
    let mut judge = begun();
    assert_eq!(
        read_two(&mut judge, [(7, 0), (9, 0)], node(&[1, 2]), SECOND),
        [1, 2].map(|nth| Change::Silent(path(nth)))
    );
    assert_eq!(
        read_two(&mut judge, [(7, 3), (9, 0)], Vec::new(), SECOND * 2),
        [],
        "operators know"
    );
    assert_eq!(
        judge.silent(),
        [(path(1), Evidence::Own), (path(2), Evidence::Node)].into()
    );
    assert_eq!(
        read_two(&mut judge, [(7, 3), (10, 0)], Vec::new(), SECOND * 3),
        [Change::Answers(path(2))]
    );
    assert_eq!(judge.silent(), [(path(1), Evidence::Own)].into());
    assert_eq!(
        read_two(&mut judge, [(8, 0), (10, 0)], Vec::new(), SECOND * 4),
        [Change::Answers(path(1))]
    );
}

#[test]
fn presumptions_have_a_limit_and_need_backends() {
    let mut judge = Judge::default();
    let many = (1..=5_000)
        .map(|port| Path {
            backend: ([10, 244, 0, 9], port).into(),
            ..path(1)
        })
        .collect();
    let read = |judge: &mut Judge, unresponsive| {
        judge.read(&Readings::new(), unresponsive, SECOND, |at| *at == path(2))
    };
    assert_eq!(read(&mut judge, vec![many]), []);
    assert!(!judge.waits());
    assert_eq!(read(&mut judge, node(&[1, 2])), [Change::Silent(path(2))]);
    assert_eq!(read(&mut judge, Vec::new()), []);
    assert_eq!(
        judge.silent().into_keys().collect::<Vec<_>>(),
        [path(2)],
        "the pod of the other one is gone"
    );
    judge.read(&Readings::new(), Vec::new(), SECOND * 2, |_| false);
    assert!(!judge.waits(), "so is that of the last one");
}
