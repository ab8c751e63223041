//! Runs all tests, from those without needs to those that need root and a kernel, and counts them.

use std::fmt;
use std::io::{BufRead, BufReader, Write, stdout};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;

use crate::setup::{self, Need};
use crate::step::step;
use crate::{build, helm, shell, workspace};

pub(crate) fn run(filter: Option<&str>) -> Result<()> {
    let toolchain = setup::ensure(Need::Tests)?;
    let kpx = build::with(&toolchain, &build::Options::default())?;
    build::bench_object(&toolchain)?;
    let tally = all(&kpx, filter)?;
    tally.end(tally.check())
}

/// The packages whose tests need root and a kernel.
const PACKAGES: [&str; 3] = ["testbed", "kpx-tests", "lab-tools"];
/// The test programs whose tests have kernel programs of their own, and measure no time.
const SIDE_BY_SIDE: [&str; 1] = ["kernel"];
/// The fuzzer, which runs beside them for so many seconds: a slice of `cargo xtask fuzz` in each run of all tests.
const FUZZ: &str = "fuzz";
const FUZZ_SECS: &str = "300";

/// Runs all levels, even after a failure.
pub(crate) fn all(kpx: &Path, filter: Option<&str>) -> Result<TestCounts> {
    let mut tally = TestCounts::default();
    let helm = helm::ensure();
    let fuzzes = filter.is_none();
    let programs = programs()?;
    let of =
        |names: &[&str]| programs.iter().filter(|name| names.contains(&name.as_str())).cloned().collect::<Vec<_>>();
    let side_by_side = of(&SIDE_BY_SIDE);
    let mut alone = programs.clone();
    alone.retain(|name| !(side_by_side.contains(name) || fuzzes && name == FUZZ));
    let in_labs = |targets: &[String]| {
        let mut cargo = workspace::cargo();
        cargo.args(["test", "--no-fail-fast"]).args(PACKAGES.iter().flat_map(|package| ["--package", package]));
        cargo.args(targets.iter().flat_map(|target| ["--test", target])).args(filter);
        cargo.env("KPX_BIN", kpx).envs(helm.as_ref().map(|helm| ("HELM", helm)));
        workspace::run_as_root(&mut cargo)?;
        anyhow::Ok(cargo)
    };
    // Labs run one at a time, because all share one kernel.
    let one_by_one = |targets: &[String]| {
        let mut cargo = in_labs(targets)?;
        if std::env::var_os("RUST_TEST_THREADS").is_none() {
            cargo.env("RUST_TEST_THREADS", "1");
        }
        anyhow::Ok(cargo)
    };
    thread::scope(|scope| {
        let mut cargo = in_labs(&[FUZZ.to_owned()])?;
        cargo.args(["--", "--nocapture"]).env("KPX_FUZZ_SECS", FUZZ_SECS);
        let slice = fuzzes.then(|| scope.spawn(|| TestCounts::of(cargo)));
        step("test without root", || {
            let mut cargo = workspace::cargo();
            cargo.args(["test", "--no-fail-fast"]).args(filter);
            tally.add(cargo, &mut stdout())
        })?;
        step("test kernel programs", || tally.add(in_labs(&side_by_side)?, &mut stdout()))?;
        step("build all other tests", || {
            let mut cargo = in_labs(&alone)?;
            cargo.args(["--lib", "--bins", "--no-run"]);
            // A program that does not compile counts as a failure where it is run.
            let _built = shell::run(cargo);
            Ok(())
        })?;
        let Some(slice) = slice else { return Ok(()) };
        step("test kernel programs on random packets", || {
            let (slice, output) = slice.join().map_err(|_| anyhow!("the thread that waits for them panicked"))??;
            stdout().write_all(&output)?;
            tally.passed += slice.passed;
            tally.failed += slice.failed;
            Ok(())
        })
    })?;
    step("test all else in network namespaces", || {
        // Most of these tests measure time. A fuzzer beside them also delays single fragments, and kpx does not translate
        // one that overtakes its first.
        let mut cargo = one_by_one(&alone)?;
        cargo.args(["--lib", "--bins"]);
        tally.add(cargo, &mut stdout())
    })?;
    Ok(tally)
}

/// Returns the names of the test programs.
fn programs() -> Result<Vec<String>> {
    let mut cargo = workspace::cargo();
    let output = cargo.args(["metadata", "--no-deps", "--format-version=1"]).output().context("run cargo metadata")?;
    let metadata: Value = serde_json::from_slice(&output.stdout).context("read cargo's metadata")?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let tests = packages.filter(|package| PACKAGES.iter().any(|name| package["name"] == *name));
    let targets = tests.flat_map(|package| package["targets"].as_array().into_iter().flatten());
    // Programs for other kernels only have `test = false`.
    let programs = targets
        .filter(|target| target["kind"][0] == "test" && target["test"] == true)
        .filter_map(|target| target["name"].as_str());
    let programs: Vec<_> = programs.map(str::to_owned).collect();
    ensure!(!programs.is_empty(), "cargo's metadata name no test program that needs a kernel");
    Ok(programs)
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TestCounts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
}

impl TestCounts {
    /// Fails if a test failed, or if no test ran.
    pub(crate) fn check(self) -> Result<()> {
        ensure!(self.failed == 0, "tests failed");
        ensure!(self.passed > 0, "no test ran");
        Ok(())
    }

    /// Prints the tally as the last line, after the error.
    pub(crate) fn end(self, result: Result<()>) -> Result<()> {
        if let Err(error) = &result {
            eprintln!("{error:#}");
        }
        println!("{self}");
        if result.is_err() {
            std::process::exit(1);
        }
        Ok(())
    }

    /// Runs a `cargo test`, and keeps its output.
    fn of(cargo: Command) -> Result<(Self, Vec<u8>)> {
        let (mut tally, mut output) = (Self::default(), Vec::new());
        tally.add(cargo, &mut output)?;
        Ok((tally, output))
    }

    /// Runs a `cargo test`, and shows its output as it comes.
    fn add(&mut self, mut cargo: Command, out: &mut impl Write) -> Result<()> {
        let name = shell::show(&cargo);
        let mut child = cargo.stdout(Stdio::piped()).spawn().with_context(|| format!("run `{name}`"))?;
        let failed_before = self.failed;
        for line in BufReader::new(child.stdout.take().expect("it is piped")).split(b'\n') {
            let line = line?;
            out.write_all(&[&line, b"\n".as_slice()].concat())?;
            out.flush()?;
            self.count(&String::from_utf8_lossy(&line));
        }
        let status = child.wait()?;
        if !status.success() && self.failed == failed_before {
            eprintln!("`{name}` failed ({status}) without a failed test: it did not compile, or it crashed");
            self.failed += 1;
        }
        Ok(())
    }

    /// Counts a line such as `test result: FAILED. 3 passed; 1 failed; 0 ignored; …`, and no other.
    fn count(&mut self, line: &str) {
        let Some((_, result)) = line.strip_prefix("test result: ").and_then(|result| result.split_once(". ")) else {
            return;
        };
        for part in result.split("; ") {
            match part.split_once(' ') {
                Some((number, "passed")) => self.passed += number.parse().unwrap_or(0),
                Some((number, "failed")) => self.failed += number.parse().unwrap_or(0),
                _ => {}
            }
        }
    }
}

impl fmt::Display for TestCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the tally of a `cargo test` with the output and exit of `script`.
    fn tally(script: &str) -> TestCounts {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]);
        let (mut tally, mut shown) = (TestCounts::default(), Vec::new());
        tally.add(shell, &mut shown).unwrap();
        assert_eq!(shown.iter().filter(|&&byte| byte == b'\n').count(), script.matches("echo").count());
        tally
    }

    #[test]
    fn results_add_up() {
        let good =
            "echo 'test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out; finished in 0.1s'";
        let bad = "echo 'test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out'";
        assert_eq!(tally(&format!("echo 'test a ... ok'; {good}; {good}")), TestCounts { passed: 24, failed: 0 });
        assert_eq!(tally(&format!("{good}; {bad}; exit 101")), TestCounts { passed: 15, failed: 2 });
        assert_eq!(tally("echo 'a test result: ok. 12 passed; 1 failed'"), TestCounts::default());
    }

    #[test]
    fn named_test_programs_exist() {
        let programs = programs().unwrap();
        assert!(
            SIDE_BY_SIDE.iter().chain([&FUZZ]).all(|name| programs.iter().any(|program| program == name)),
            "{programs:?}"
        );
    }

    #[test]
    fn crash_counts_as_failure() {
        assert_eq!(tally("exit 101"), TestCounts { passed: 0, failed: 1 });
    }

    #[test]
    fn empty_run_is_a_failure() {
        assert!(TestCounts::default().check().is_err());
        assert!(TestCounts { passed: 9, failed: 1 }.check().is_err());
        assert!(TestCounts { passed: 1, failed: 0 }.check().is_ok());
        assert_eq!(TestCounts { passed: 9, failed: 1 }.to_string(), "9 passed, 1 failed");
    }
}
