//! Cases of a test that share a fixture, because a start of kpx costs more than most cases.

use std::env;
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use crate::agent::Agent;

/// A fixture, and the kpx that runs in it.
#[derive(Debug)]
pub struct Running<'a, F> {
    pub fixture: &'a F,
    pub agent: Agent<'a>,
}

/// A named function.
pub type Case<F> = (&'static str, fn(&F) -> Result<()>);

/// Runs functions with a shared fixture, each under its own name:
/// `cases!(&fixture; mod::one, two)`.
#[macro_export]
macro_rules! cases {
    ($fixture:expr; $($case:path),+ $(,)?) => {
        $crate::cases::run($fixture, vec![$((stringify!($case), $case as fn(&_) -> _)),+])
    };
}

/// Runs cases in an order that `KPX_SEED` repeats, or only the case in `KPX_CASE`. A failed case
/// does not stop the others.
pub fn run<F>(fixture: &F, cases: Vec<Case<F>>) -> Result<()> {
    run_as(
        fixture,
        cases,
        seed()?,
        env::var("KPX_CASE").ok().as_deref(),
    )
}

/// Returns the seed from the environment, or a new seed, and prints it.
pub fn seed() -> Result<u64> {
    let seed = match env::var("KPX_SEED") {
        Ok(seed) => seed.parse().with_context(|| format!("KPX_SEED={seed}"))?,
        Err(_) => rand::random_range(0..1_000_000_000),
    };
    println!("KPX_SEED={seed}");
    Ok(seed)
}

fn run_as<F>(fixture: &F, mut cases: Vec<Case<F>>, seed: u64, only: Option<&str>) -> Result<()> {
    cases.retain(|(name, _)| only.is_none_or(|only| only == *name));
    ensure!(!cases.is_empty(), "this test has no case {only:?}");
    cases.shuffle(&mut StdRng::seed_from_u64(seed));
    let mut failed = String::new();
    for (name, case) in cases {
        let started = Instant::now();
        // A panic may leave the fixture half changed, which fails later cases visibly.
        let outcome = catch_unwind(AssertUnwindSafe(|| case(fixture)))
            .unwrap_or_else(|_| bail!("it panicked: the message is above"));
        println!("case {name}: {:.1} s", started.elapsed().as_secs_f32());
        if let Err(error) = outcome {
            write!(failed, "\ncase {name}: {error:?}")?;
        }
    }
    ensure!(failed.is_empty(), "KPX_SEED={seed}{failed}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    type Log = RefCell<Vec<&'static str>>;

    fn good(log: &Log) -> Result<()> {
        log.borrow_mut().push("good");
        Ok(())
    }

    fn bad(log: &Log) -> Result<()> {
        log.borrow_mut().push("bad");
        bail!("the reason")
    }

    fn worse(log: &Log) -> Result<()> {
        log.borrow_mut().push("worse");
        panic!("at once")
    }

    fn ran(seed: u64, only: Option<&str>) -> (Vec<&'static str>, String) {
        let log = Log::default();
        let cases: Vec<Case<Log>> = vec![("good", good), ("m::bad", bad), ("worse", worse)];
        let outcome = run_as(&log, cases, seed, only);
        let error = outcome.err().map(|error| error.to_string());
        (log.into_inner(), error.unwrap_or_default())
    }

    #[test]
    fn failed_cases_are_named_and_the_others_run() {
        let (mut log, error) = ran(1, None);
        log.sort_unstable();
        assert_eq!(log, ["bad", "good", "worse"]);
        assert!(error.starts_with("KPX_SEED=1\ncase "), "{error}");
        assert!(error.contains("case m::bad: the reason"), "{error}");
        assert!(error.contains("case worse: it panicked"), "{error}");
        assert!(!error.contains("good"), "{error}");
    }

    #[test]
    fn seed_decides_the_order() {
        let orders: Vec<_> = (0..20).map(|seed| ran(seed, None).0).collect();
        assert_eq!(
            orders,
            (0..20).map(|seed| ran(seed, None).0).collect::<Vec<_>>()
        );
        assert!(orders.iter().any(|order| *order != orders[0]));
    }

    #[test]
    fn one_case_runs_alone_and_an_unknown_one_is_an_error() {
        assert_eq!(ran(1, Some("good")), (vec!["good"], String::new()));
        assert_eq!(ran(1, Some("bad")).1, "this test has no case Some(\"bad\")");
    }
}
