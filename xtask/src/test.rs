//! Runs all tests, and counts them.
//!
//! ```text
//!   unit tests, packet rows  ║ random packets      both take all the time that a core has
//!   lab ║ cluster, cli, tools ║ reachability       all mostly wait: for timers, and for the kernel
//!   what failed, alone                             tests of time and of single packets suffer beside others
//! ```

use std::io::{Write, stdout};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::thread;

use anyhow::{Result, anyhow};

use crate::setup::{self, Need};
use crate::step::step;
use crate::{build, helm, workspace};

mod counts;

use counts::Outcome;
pub(crate) use counts::TestCounts;

pub(crate) fn run(filter: Option<&str>) -> Result<()> {
    let toolchain = setup::ensure(Need::Tests)?;
    build::objects(&toolchain)?;
    let kpx = build::everything()?;
    let tally = all(&kpx, filter)?;
    tally.end(tally.check())
}

/// The fuzzer, and for how many seconds it runs: a slice of `cargo xtask fuzz` in each run of all tests.
const FUZZ: Target = Target { name: "fuzz", threads: 1 };
const FUZZ_SECS: &str = "90";
/// The packet rows. They have kernel programs of their own, and measure no time.
const KERNEL: Target = Target { name: "kernel", threads: 2 };
/// The programs whose tests run in labs, in lanes that run side by side, each from left to right.
const LANES: [&[Target]; 3] = [
    &[Target { name: "lab", threads: 1 }],
    &[Target { name: "cluster", threads: 1 }, Target { name: "cli", threads: 1 }, Target { name: "tools", threads: 1 }],
    &[Target { name: "reachability", threads: 2 }],
];

/// A test program, and how many of its tests run at once.
#[derive(Clone, Copy)]
struct Target {
    name: &'static str,
    threads: u8,
}

/// Runs all levels, even after a failure.
pub(crate) fn all(kpx: &Path, filter: Option<&str>) -> Result<TestCounts> {
    let helm = helm::ensure();
    let cargo = |targets: &[&str]| {
        let mut cargo = build::workspace_cargo("test");
        cargo.arg("--no-fail-fast").args(targets);
        cargo.env("KPX_BIN", kpx).envs(helm.as_ref().map(|helm| ("HELM", helm)));
        workspace::run_as_root(&mut cargo)?;
        anyhow::Ok(cargo)
    };
    let program = |target: &Target, filters: &[&str]| {
        let mut cargo = cargo(&["--test", target.name])?;
        cargo.args(filters);
        if std::env::var_os("RUST_TEST_THREADS").is_none() {
            cargo.env("RUST_TEST_THREADS", target.threads.to_string());
        }
        anyhow::Ok(cargo)
    };
    let filters: Vec<_> = filter.into_iter().collect();
    let mut tally = TestCounts::default();
    step("test units, and kernel programs on rows and on random packets", || {
        let quick = || {
            let mut units = cargo(&["--lib", "--bins"])?;
            units.args(&filters);
            anyhow::Ok(vec![
                Outcome::of(units, &mut stdout())?,
                Outcome::of(program(&KERNEL, &filters)?, &mut stdout())?,
            ])
        };
        let random = || {
            let mut fuzz = program(&FUZZ, &["--", "--nocapture"])?;
            fuzz.env("KPX_FUZZ_SECS", FUZZ_SECS);
            kept(fuzz)
        };
        let random = filter.is_none().then_some(random);
        let (quick, random) = thread::scope(|scope| {
            let random = random.map(|random| scope.spawn(random));
            (quick(), random.map(joined))
        });
        for outcome in quick?.into_iter().chain(random.transpose()?) {
            tally.add(outcome.counts);
        }
        anyhow::Ok(())
    })?;
    let mut outcomes = step("test all else in network namespaces", || {
        let lane = |lane: &'static [Target]| {
            lane.iter().map(|target| Ok((target, kept(program(target, &filters)?)?))).collect::<Result<Vec<_>>>()
        };
        let lanes: Vec<_> = thread::scope(|scope| {
            let lanes = LANES.map(|targets| scope.spawn(move || lane(targets)));
            lanes.map(joined).into_iter().collect()
        });
        lanes.into_iter().collect::<Result<Vec<_>>>()
    })?;
    for (target, outcome) in outcomes.iter_mut().flatten() {
        if !outcome.failed.is_empty() {
            step(&format!("test alone what failed in {}", target.name), || {
                let mut names = vec!["--", "--exact"];
                names.extend(outcome.failed.iter().map(String::as_str));
                let mut again = program(target, &names)?;
                again.env("RUST_TEST_THREADS", "1");
                outcome.settle(&Outcome::of(again, &mut stdout())?);
                Ok(())
            })?;
        }
        tally.add(outcome.counts);
    }
    Ok(tally)
}

/// Runs a `cargo test` beside others, and shows its output when it has ended.
fn kept(cargo: Command) -> Result<Outcome> {
    static SHOWING: Mutex<()> = Mutex::new(());
    let mut output = Vec::new();
    let outcome = Outcome::of(cargo, &mut output)?;
    let _alone = SHOWING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    stdout().write_all(&output)?;
    Ok(outcome)
}

fn joined<T>(thread: thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().map_err(|_| anyhow!("the thread that waits for them panicked"))?
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// Returns the names of the test programs.
    fn programs() -> Vec<String> {
        let mut cargo = workspace::cargo();
        let output = cargo.args(["metadata", "--no-deps", "--format-version=1"]).output().unwrap();
        let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
        let packages = metadata["packages"].as_array().into_iter().flatten();
        let targets = packages.flat_map(|package| package["targets"].as_array().into_iter().flatten());
        // Programs for other kernels only have `test = false`.
        let programs = targets.filter(|target| target["kind"][0] == "test" && target["test"] == true);
        programs.filter_map(|target| target["name"].as_str()).map(str::to_owned).collect()
    }

    #[test]
    fn every_test_program_has_its_place() {
        let mut placed: Vec<_> =
            LANES.iter().copied().flatten().chain([&FUZZ, &KERNEL]).map(|target| target.name).collect();
        let mut programs = programs();
        placed.sort_unstable();
        programs.sort_unstable();
        assert_eq!(placed, programs);
    }
}
