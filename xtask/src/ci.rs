//! Runs all checks of a change, the same on a laptop and on a bare machine.

use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};

use crate::step::{seconds, step};
use crate::test::TestCounts;
use crate::{build, demo, shell, test, tidy, workspace};

/// Runs all steps, even after a failure, so that one run reports everything. The last line is the
/// tally of tests.
pub(crate) fn run() -> Result<()> {
    let mut report = Report::default();
    let mut tally = TestCounts::default();
    report.step("fmt", || cargo(&["fmt", "--all", "--check"]));
    report.step("tidy", tidy::run);
    if let Some(kpx) = report.step("build", build::everything) {
        thread::scope(|scope| {
            let lints = scope.spawn(clippy);
            report.step("test", || {
                tally = test::all(&kpx, None)?;
                tally.check()
            });
            report.step("demo", || demo::show(&kpx, &[], Stdio::null()));
            report.step("clippy", || {
                lints
                    .join()
                    .map_err(|_| anyhow!("the thread that runs clippy panicked"))?
            });
        });
    } else {
        report.step("clippy", clippy);
        report.failed.push("test and demo, which were not run");
    }
    report.print();
    tally.end(report.result())
}

/// Runs clippy at low priority during the tests. Its own target directory avoids waiting for
/// cargo's lock.
fn clippy() -> Result<()> {
    // The build of the tests has no kernel programs with logging.
    for what in [
        &["--workspace", "--all-targets", "--test", "vm"][..],
        &["-p", "proxy-datapath", "--features", "log"],
    ] {
        let mut cargo = workspace::cargo();
        cargo
            .args(["clippy", "--quiet"])
            .args(what)
            .arg("--target-dir");
        cargo
            .arg(workspace::target_dir()?.join("clippy"))
            .args(["--", "--deny", "warnings"]);
        shell::run(shell::nice(&cargo))?;
    }
    Ok(())
}

fn cargo(args: &[&str]) -> Result<()> {
    let mut cargo = workspace::cargo();
    cargo.args(args);
    shell::run(cargo)
}

#[derive(Default)]
struct Report {
    durations: Vec<(&'static str, Duration, bool)>,
    failed: Vec<&'static str>,
}

impl Report {
    fn step<T>(&mut self, name: &'static str, work: impl FnOnce() -> Result<T>) -> Option<T> {
        let started = Instant::now();
        let result = step(name, work);
        self.durations
            .push((name, started.elapsed(), result.is_ok()));
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                eprintln!("{error:#}");
                self.failed.push(name);
                None
            }
        }
    }

    fn result(&self) -> Result<()> {
        ensure!(self.failed.is_empty(), "failed: {}", self.failed.join(", "));
        Ok(())
    }

    fn print(&self) {
        let total = self
            .durations
            .iter()
            .map(|(_, duration, _)| *duration)
            .sum();
        for &(name, duration, good) in &self.durations {
            println!(
                "{name:<8} {:>9}  {}",
                seconds(duration),
                if good { "ok" } else { "FAILED" }
            );
        }
        println!("{:<8} {:>9}", "total", seconds(total));
    }
}
