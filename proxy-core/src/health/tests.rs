use proptest::prelude::*;
use proxy_common::connect::Voter;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn path(nth: u8) -> Path {
    Path { service: "10.96.0.1:80".parse().unwrap(), backend: format!("10.244.0.{nth}:8080").parse().unwrap() }
}

/// Returns failures of so many clients, in turn.
fn votes(failures: u32, clients: u32) -> Votes {
    (0..failures).fold(Votes::NONE, |votes, nth| votes.with(Voter((nth % clients) as u8)))
}

/// A reading of a backend that has answered no connection.
const fn reading(votes: Votes) -> Reading {
    Reading { votes, answered: 0, owed: None }
}

/// Reads one backend, at a number of tenths of seconds.
fn read(judge: &mut Judge, votes: Votes, tenths: u32) -> Vec<Change> {
    judge.read(&[(path(1), reading(votes))].into(), &BTreeSet::new(), SECOND / 10 * tenths, |_| true)
}

fn begun() -> Judge {
    let mut judge = Judge::default();
    assert_eq!(read(&mut judge, Votes::NONE, 0), []);
    judge
}

#[test]
fn three_failures_of_two_clients_make_a_backend_silent() {
    for (failures, clients, is_silent) in [(2, 2, false), (3, 1, false), (200, 1, false), (3, 2, true), (255, 24, true)]
    {
        let mut judge = begun();
        let changes = read(&mut judge, votes(failures, clients), 1);
        assert_eq!(changes, Vec::from_iter(is_silent.then_some(Change::Silent(path(1)))), "{failures} {clients}");
        assert_eq!(judge.silent().contains(&path(1)), is_silent);
    }
}

#[test]
fn failures_must_come_within_a_window_and_since_the_last_answer() {
    let mut judge = begun();
    for nth in 1..=8 {
        assert_eq!(read(&mut judge, votes(nth, 2), nth * 60), [], "one in six seconds");
    }
    let mut judge = begun();
    for nth in 0..20 {
        assert_eq!(read(&mut judge, votes(2, 2), nth), [], "two and an answer, again and again");
        assert_eq!(read(&mut judge, Votes::NONE, nth), []);
    }
}

#[test]
fn counts_of_before_the_start_and_of_other_pods_are_no_failures() {
    let mut judge = Judge::default();
    assert_eq!(read(&mut judge, votes(200, 9), 0), []);
    assert_eq!(read(&mut judge, votes(202, 9), 1), []);
    assert_eq!(read(&mut judge, votes(203, 9), 2), [Change::Silent(path(1))]);
    // The pod goes, and another one gets its address.
    assert_eq!(judge.read(&[(path(1), reading(votes(204, 9)))].into(), &BTreeSet::new(), SECOND, |_| false), []);
    assert_eq!(judge.silent(), BTreeSet::new());
    assert_eq!(read(&mut judge, votes(206, 9), 20), []);
    assert_eq!(read(&mut judge, votes(207, 9), 21), [Change::Silent(path(1))]);
}

#[test]
fn flapping_backend_waits_longer_each_time() {
    let mut judge = begun();
    let (mut failures, mut now) = (3, SECOND);
    let read = |judge: &mut Judge, votes, now| {
        judge.read(&[(path(1), reading(votes))].into(), &BTreeSet::new(), now, |_| true)
    };
    assert_eq!(read(&mut judge, votes(failures, 2), now), [Change::Silent(path(1))]);
    for secs in [5, 10, 20, 40, 80, 160, 300, 300] {
        now += SECOND * secs;
        judge.pass(now - SECOND / 100);
        assert_eq!(judge.silent(), [path(1)].into(), "{secs} s are not over");
        judge.pass(now);
        assert!(judge.silent().is_empty() && judge.waits(), "on trial after {secs} s");
        assert_eq!(read(&mut judge, votes(failures, 2), now + TRIAL), [], "nothing has come");
        assert_eq!(judge.silent(), [path(1)].into(), "a trial is short");
        failures += 1;
        now += SECOND;
        assert_eq!(read(&mut judge, votes(failures, 2), now), [], "operators know");
        judge.pass(now + VERDICT * 2);
        assert_eq!(judge.silent(), [path(1)].into(), "one failure in a trial");
    }
    now += BACK_OFF_MAX;
    judge.pass(now);
    assert_eq!(read(&mut judge, Votes::NONE, now), [Change::Answers(path(1))]);
    // What it did is not forgotten at once. Operators are not told each time.
    assert_eq!(read(&mut judge, votes(3, 2), now + SECOND), []);
    judge.pass(now + BACK_OFF_MAX);
    assert_eq!(judge.silent(), [path(1)].into());
    judge.pass(now + SECOND + BACK_OFF_MAX);
    assert!(judge.silent().is_empty());
    // An hour later it is.
    assert_eq!(read(&mut judge, Votes::NONE, now + BACK_OFF_MAX + SECOND), []);
    now += SECOND * 3_600;
    assert_eq!(read(&mut judge, Votes::NONE, now), []);
    assert!(judge.backends.is_empty(), "{judge:?}");
    assert_eq!(read(&mut judge, votes(3, 2), now), [Change::Silent(path(1))]);
    judge.pass(now + BACK_OFF);
    assert!(judge.silent().is_empty());
}

#[test]
fn backend_that_flips_all_the_time_is_told_of_rarely() {
    let mut judge = begun();
    let mut told = Vec::new();
    for secs in 1..=3_600 {
        told.extend(read(&mut judge, if secs % 2 == 1 { votes(3, 2) } else { Votes::NONE }, secs * 10));
        assert_eq!(judge.silent().is_empty(), secs % 2 == 0, "it is judged as ever");
    }
    assert!(told.chunks(2).all(|pair| pair == [Change::Silent(path(1)), Change::Answers(path(1))]), "{told:?}");
    assert!((20..50).contains(&told.len()), "two each five minutes in the end: {}", told.len());
    // One that stays silent is told of when its time has come.
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
        assert_eq!(judge.silent(), [path(1)].into(), "{nth}");
        now += VERDICT;
    }
    // A connection of before the trials fails late: that is no verdict.
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
    let answered = [(path(1), Reading { votes: votes(200, 2), answered: 1, owed: None })].into();
    assert_eq!(
        judge.read(&answered, &BTreeSet::new(), SECOND / 5, |_| true),
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

/// What happens to one backend: so many failures of so many clients and perhaps an answer first, tenths of seconds later.
fn history() -> impl Strategy<Value = Vec<(u32, u8, bool, u32)>> {
    prop::collection::vec((0..4_u32, 0..24_u8, prop::bool::weighted(0.2), 0..100_u32), 1..200)
}

proptest! {
    #[test]
    fn no_history_sets_an_answering_backend_aside(history in history()) {
        let mut judge = begun();
        let (mut votes, mut now) = (Votes::NONE, Duration::ZERO);
        let (mut silent, mut aside_for, mut answered) = (false, Duration::ZERO, 0);
        for (failures, client, answers, tenths) in history {
            let was_aside = judge.silent().contains(&path(1));
            now += SECOND / 10 * tenths;
            if was_aside { aside_for += SECOND / 10 * tenths } else { aside_for = Duration::ZERO }
            if answers { (votes, answered) = (Votes::NONE, answered + 1) }
            for nth in 0..failures { votes = votes.with(Voter((client + nth as u8) % 24)) }
            for change in judge.read(&[(path(1), Reading { votes, answered, owed: None })].into(), &BTreeSet::new(), now, |_| true) {
                // Operators hear each change once, and in turn.
                prop_assert_eq!(matches!(change, Change::Silent(_)), !silent);
                silent = !silent;
            }
            let is_aside = judge.silent().contains(&path(1));
            prop_assert!(!is_aside || votes.failures() >= 1, "its last word was an answer");
            prop_assert!(!is_aside || was_aside || votes.clients() >= 1);
            prop_assert!(aside_for <= BACK_OFF_MAX + SECOND * 10, "{:?}", aside_for);
        }
    }

    #[test]
    fn a_single_client_sets_nobody_aside(failures in prop::collection::vec((1..60_u32, 0..200_u32), 1..60), client in 0..24_u8) {
        let mut judge = begun();
        let (mut votes, mut now) = (Votes::NONE, Duration::ZERO);
        for (more, tenths) in failures {
            for _ in 0..more { votes = votes.with(Voter(client)) }
            now += SECOND / 10 * tenths;
            prop_assert_eq!(judge.read(&[(path(1), reading(votes))].into(), &BTreeSet::new(), now, |_| true), vec![]);
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
        judge.read(&[(path(1), reading(votes(400, 2)))].into(), &BTreeSet::new(), now - SECOND / 100, |_| true);
        assert!(judge.silent().is_empty(), "{nth}: nothing has failed");
        judge.read(&[(path(1), reading(votes(400, 2)))].into(), &BTreeSet::new(), now, |_| true);
        assert_eq!(judge.silent(), [path(1)].into(), "{nth}");
        now += VERDICT;
    }
}

#[test]
fn clients_who_fail_fast_do_not_outvote_those_who_are_answered() {
    let mut judge = begun();
    for nth in 0..100_u32 {
        let reading = Reading { votes: votes(200, 2), answered: nth.into(), owed: None };
        // The first reading knows of no answer before.
        let changes = judge.read(&[(path(1), reading)].into(), &BTreeSet::new(), SECOND / 5 * (nth + 1), |_| true);
        assert!(nth == 0 || !changes.contains(&Change::Silent(path(1))), "{nth}: {changes:?}");
    }
    assert!(judge.silent().is_empty());
}

/// Reads so many backends of unresponsive nodes, beside what is counted of the first one.
fn read_unresponsive(judge: &mut Judge, unresponsive: &[u8], reading: Option<Reading>, now: Duration) -> Vec<Change> {
    let readings = reading.into_iter().map(|reading| (path(1), reading)).collect();
    judge.read(&readings, &unresponsive.iter().map(|nth| path(*nth)).collect(), now, |_| true)
}

#[test]
fn unresponsive_backends_are_silent_without_failures_until_they_answer() {
    let mut judge = begun();
    let counted = Reading { votes: Votes::NONE, answered: 7, owed: None };
    let changes = read_unresponsive(&mut judge, &[1, 2], Some(counted), SECOND);
    assert_eq!(changes, [Change::Silent(path(1)), Change::Silent(path(2))]);
    assert_eq!(read_unresponsive(&mut judge, &[], Some(counted), SECOND * 2), [], "no SYN is late any more");
    assert_eq!(judge.silent(), [path(1), path(2)].into());
    assert!(judge.knows(&path(1)) && judge.knows(&path(2)) && judge.waits());
    let answered = Reading { answered: 8, ..counted };
    assert_eq!(read_unresponsive(&mut judge, &[], Some(answered), SECOND * 3), [Change::Answers(path(1))]);
    assert_eq!(judge.silent(), [path(2)].into(), "one that was never dialled waits for its trial");
    judge.pass(SECOND + BACK_OFF);
    assert_eq!(judge.silent(), BTreeSet::new());
}

#[test]
fn unresponsive_backend_that_is_silent_already_keeps_its_back_off() {
    let mut judge = begun();
    read(&mut judge, votes(3, 2), 10);
    for tenths in 11..59 {
        let counted = Reading { votes: votes(3, 2), answered: 0, owed: None };
        assert_eq!(read_unresponsive(&mut judge, &[1], Some(counted), SECOND / 10 * tenths), []);
    }
    judge.pass(SECOND + BACK_OFF);
    assert_eq!(judge.silent(), BTreeSet::new());
}

#[test]
fn first_reading_and_pods_of_no_service_are_not_unresponsive() {
    let mut judge = Judge::default();
    assert_eq!(read_unresponsive(&mut judge, &[1, 2], None, SECOND), []);
    let unresponsive = [path(1), path(2)].into();
    assert_eq!(judge.read(&Readings::new(), &unresponsive, SECOND * 2, |at| *at == path(2)), [Change::Silent(path(2))]);
}

#[test]
fn unresponsive_backend_whose_row_goes_is_silent_no_more() {
    let mut judge = begun();
    let counted = Reading { votes: Votes::NONE, answered: 7, owed: None };
    read_unresponsive(&mut judge, &[1], Some(counted), SECOND);
    assert_eq!(read_unresponsive(&mut judge, &[], None, SECOND * 2), [Change::Answers(path(1))]);
}
