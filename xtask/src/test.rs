//! Runs all tests, and counts them.
//!
//! ```text
//!   lab ║ cluster, cli, lab's sockets ║ reachability, tools,   mostly wait for timers and the kernel
//!                                       packet rows
//!   ║ unit tests ║ random packets                              run at low priority
//! ```

use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::thread;

use anyhow::{Result, anyhow};

use crate::step::step;
use crate::{axe, build, helm, resolved, shell, workspace};

mod counts;

pub(crate) use counts::TestCounts;

pub(crate) fn run(filter: Option<&str>) -> Result<()> {
    let kpx = build::everything()?;
    let tally = all(&kpx, filter)?;
    tally.end(tally.check())
}

/// The fuzzer, and the seconds that it takes in each run of all tests.
const FUZZ: Target = Target::new("fuzz", 1);
const FUZZ_SECS: &str = "30";
/// The test programs that use labs. Lanes run in parallel, the programs of a lane in sequence.
const LANES: [&[Target]; 3] = [
    &[Target {
        without: &SOCKETS,
        ..Target::new("lab", 4)
    }],
    &[
        Target::new("cluster", 2),
        Target::new("cli", 2),
        Target {
            only: &SOCKETS,
            ..Target::new("lab", 1)
        },
    ],
    &[
        Target::new("reachability", 2),
        Target::new("tools", 2),
        Target::new("kernel", 2),
    ],
];
/// The modules of `lab` whose kpx translates the sockets of all pods in the cgroup of the test's
/// process. Beside them, other tests of the process would reach the wrong lab's backends.
const SOCKETS: [&str; 2] = ["socket::", "redirect::"];

/// A test program, and the number of its parallel tests. A program may have two places: one runs
/// only these modules, and the other one all without them.
#[derive(Clone, Copy)]
struct Target {
    name: &'static str,
    threads: u8,
    only: &'static [&'static str],
    without: &'static [&'static str],
}

impl Target {
    const fn new(name: &'static str, threads: u8) -> Self {
        Self {
            name,
            threads,
            only: &[],
            without: &[],
        }
    }
}

/// Runs all levels, even after a failure.
pub(crate) fn all(kpx: &Path, filter: Option<&str>) -> Result<TestCounts> {
    let helm = helm::ensure();
    let axe = axe::ensure();
    let resolved = resolved::ensure();
    let plan = Plan {
        kpx,
        helm,
        axe,
        resolved,
        filters: filter.into_iter().collect(),
    };
    let (labs, (units, random)) = step("test", || {
        thread::scope(|scope| {
            let labs = scope.spawn(|| plan.waiting_ones());
            let busy = plan.busy_ones();
            Ok((joined(labs)?, busy?))
        })
    })?;
    let mut tally = TestCounts::default();
    for counts in labs.into_iter().chain(random).chain([units]) {
        tally.add(counts);
    }
    Ok(tally)
}

/// The settings of all cargo calls.
struct Plan<'a> {
    kpx: &'a Path,
    helm: Option<PathBuf>,
    axe: Option<PathBuf>,
    resolved: Option<PathBuf>,
    filters: Vec<&'a str>,
}

impl Plan<'_> {
    /// Runs the unit tests and the fuzzer, at a lower priority than all other tests. A filter
    /// excludes the fuzzer.
    fn busy_ones(&self) -> Result<(TestCounts, Option<TestCounts>)> {
        let nice = |cargo| kept(&mut shell::nice(&cargo));
        thread::scope(|scope| {
            let random = self.filters.is_empty().then(|| {
                scope.spawn(move || {
                    let mut fuzz = self.program(&FUZZ, ["--", "--nocapture"])?;
                    fuzz.env("KPX_FUZZ_SECS", FUZZ_SECS);
                    nice(fuzz)
                })
            });
            let mut units = self.cargo(&["--lib", "--bins"])?;
            units.args(&self.filters);
            Ok((nice(units)?, random.map(joined).transpose()?))
        })
    }

    /// Runs all lanes, and returns the counts of their programs.
    fn waiting_ones(&self) -> Result<Vec<TestCounts>> {
        let lane = |targets: &'static [Target]| {
            let run = |target| kept(&mut self.modules(target)?);
            let targets = targets.iter().filter(|target| self.has(target));
            targets.map(run).collect::<Result<Vec<_>>>()
        };
        let lanes = thread::scope(|scope| {
            LANES
                .map(|targets| scope.spawn(move || lane(targets)))
                .map(joined)
                .into_iter()
                .collect::<Result<Vec<_>>>()
        })?;
        Ok(lanes.concat())
    }

    /// Returns true if a target has tests of its own. With a filter, a program runs once.
    fn has(&self, target: &Target) -> bool {
        self.filters.is_empty() || target.only.is_empty()
    }

    /// Returns the command that runs a target's modules.
    fn modules(&self, target: &Target) -> Result<Command> {
        if !self.filters.is_empty() {
            return self.program(target, self.filters.iter().copied());
        }
        let without = target.without.iter().flat_map(|module| ["--skip", module]);
        let only = target.only.iter().copied();
        self.program(target, ["--"].into_iter().chain(only).chain(without))
    }

    fn program<'a>(
        &self,
        target: &Target,
        arguments: impl IntoIterator<Item = &'a str>,
    ) -> Result<Command> {
        let mut cargo = self.cargo(&["--test", target.name])?;
        cargo.args(arguments);
        if std::env::var_os("RUST_TEST_THREADS").is_none() {
            cargo.env("RUST_TEST_THREADS", target.threads.to_string());
        }
        Ok(cargo)
    }

    fn cargo(&self, targets: &[&str]) -> Result<Command> {
        let mut cargo = build::workspace_cargo("test");
        cargo.arg("--no-fail-fast").args(targets);
        cargo
            .env("KPX_BIN", self.kpx)
            .envs(self.helm.as_ref().map(|helm| ("HELM", helm)));
        cargo.envs(self.axe.as_ref().map(|axe| ("AXE", axe)));
        cargo.envs(
            self.resolved
                .as_ref()
                .map(|resolved| ("RESOLVED", resolved)),
        );
        workspace::run_as_root(&mut cargo)?;
        Ok(cargo)
    }
}

/// Runs a `cargo test`, and prints its whole output at its end.
fn kept(cargo: &mut Command) -> Result<TestCounts> {
    static SHOWING: Mutex<()> = Mutex::new(());
    let mut output = Vec::new();
    let counts = TestCounts::of(cargo, &mut output)?;
    let _alone = SHOWING
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    stdout().write_all(&output)?;
    Ok(counts)
}

fn joined<T>(thread: thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread
        .join()
        .map_err(|_| anyhow!("the thread that waits for them panicked"))?
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn programs() -> Vec<String> {
        let mut cargo = workspace::cargo();
        let output = cargo
            .args(["metadata", "--no-deps", "--format-version=1"])
            .output()
            .unwrap();
        let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
        let packages = metadata["packages"].as_array().into_iter().flatten();
        let targets =
            packages.flat_map(|package| package["targets"].as_array().into_iter().flatten());
        // Programs that are only for other kernels have `test = false`.
        let programs =
            targets.filter(|target| target["kind"][0] == "test" && target["test"] == true);
        programs
            .filter_map(|target| target["name"].as_str())
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn every_test_program_has_its_place() {
        let mut placed: Vec<_> = LANES
            .iter()
            .copied()
            .flatten()
            .chain([&FUZZ])
            .map(|target| target.name)
            .collect();
        let mut programs = programs();
        placed.sort_unstable();
        placed.dedup();
        programs.sort_unstable();
        assert_eq!(placed, programs);
    }
}
