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
    [path(1)].into()
}

/// Returns failures of `clients` clients in turn.
fn votes(failures: u32, clients: u32) -> Votes {
    (0..failures).fold(Votes::NONE, |votes, nth| {
        votes.with(Voter((nth % clients) as u8))
    })
}

const fn reading(votes: Votes) -> Reading {
    Reading { votes, answered: 0 }
}

/// Applies a reading of one backend, at a time in tenths of a second.
fn read(judge: &mut Judge, votes: Votes, tenths: u32) -> Vec<Change> {
    judge.read(
        &[(path(1), reading(votes))].into(),
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
        assert_eq!(judge.silent().contains(&path(1)), is_silent);
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
        judge.read(&[(path(1), reading(votes(204, 9)))].into(), SECOND, |_| {
            false
        }),
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
        judge.read(&[(path(1), reading(votes))].into(), now, |_| true)
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
        },
    )]
    .into();
    assert_eq!(
        judge.read(&answered, SECOND / 5, |_| true),
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
            let was_silent = judge.silent().contains(&path(1));
            now += SECOND / 10 * tenths;
            if was_silent { aside_for += SECOND / 10 * tenths } else { aside_for = Duration::ZERO }
            if answers { (votes, answered) = (Votes::NONE, answered + 1) }
            for nth in 0..failures { votes = votes.with(Voter((client + nth as u8) % 24)) }
            for change in judge.read(&[(path(1), Reading { votes, answered })].into(), now, |_| true) {
                // Each change is reported once, alternately.
                prop_assert_eq!(matches!(change, Change::Silent(_)), !silent);
                silent = !silent;
            }
            let is_silent = judge.silent().contains(&path(1));
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
            prop_assert_eq!(judge.read(&[(path(1), reading(votes))].into(), now, |_| true), vec![]);
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
            now - SECOND / 100,
            |_| true,
        );
        assert!(judge.silent().is_empty(), "{nth}: nothing has failed");
        judge.read(&[(path(1), reading(votes(400, 2)))].into(), now, |_| true);
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
        };
        // The first reading has no earlier count to compare with.
        let changes = judge.read(&[(path(1), reading)].into(), SECOND / 5 * (nth + 1), |_| {
            true
        });
        assert!(
            nth == 0 || !changes.contains(&Change::Silent(path(1))),
            "{nth}: {changes:?}"
        );
    }
    assert!(judge.silent().is_empty());
}
