//! Runs a `cargo test`, and counts its tests.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::shell;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TestCounts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// Tests that failed in parallel and passed alone. They count neither as passed nor as failed:
    /// each has a cause to find.
    pub(crate) alone: u64,
}

/// The result of a `cargo test`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) counts: TestCounts,
    /// The names of failed tests.
    pub(super) failed: Vec<String>,
    /// The names of failed tests that passed alone.
    pub(super) alone: Vec<String>,
}

impl TestCounts {
    /// Fails if a test failed, or if no test ran.
    pub(crate) fn check(self) -> Result<()> {
        ensure!(self.failed == 0, "tests failed");
        ensure!(self.passed + self.alone > 0, "no test ran");
        Ok(())
    }

    /// Prints the error, then the tally as the last line.
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

    pub(super) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.alone += other.alone;
    }
}

impl fmt::Display for TestCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.alone > 0 {
            write!(f, "{} failed beside others and passed alone; ", self.alone)?;
        }
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

impl Outcome {
    /// Runs a `cargo test`, and prints its output as it arrives.
    pub(super) fn of(cargo: &mut Command, out: &mut impl Write) -> Result<Self> {
        let name = shell::show(cargo);
        let mut child = cargo
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("run `{name}`"))?;
        let mut outcome = Self::default();
        for line in BufReader::new(child.stdout.take().expect("it is piped")).split(b'\n') {
            let line = line?;
            out.write_all(&[&line, b"\n".as_slice()].concat())?;
            out.flush()?;
            outcome.count(&String::from_utf8_lossy(&line));
        }
        let status = child.wait()?;
        if !status.success() && outcome.counts.failed == 0 {
            eprintln!(
                "`{name}` failed ({status}) without a failed test: it did not compile, or it crashed"
            );
            outcome.counts.failed += 1;
        }
        Ok(outcome)
    }

    /// Counts a line such as `test result: FAILED. 3 passed; 1 failed; 0 ignored; …`, and records
    /// the name in `test pins::renamed ... FAILED`.
    fn count(&mut self, line: &str) {
        if let Some(name) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.strip_suffix(" ... FAILED"))
        {
            self.failed.push(name.to_owned());
        }
        let Some((_, result)) = line
            .strip_prefix("test result: ")
            .and_then(|result| result.split_once(". "))
        else {
            return;
        };
        for part in result.split("; ") {
            match part.split_once(' ') {
                Some((number, "passed")) => self.counts.passed += number.parse().unwrap_or(0),
                Some((number, "failed")) => self.counts.failed += number.parse().unwrap_or(0),
                _ => {}
            }
        }
    }

    /// Applies the result of the second run, in which the failed tests ran alone.
    pub(super) fn settle(&mut self, again: &Self) {
        let alone = again.counts.passed.min(self.counts.failed);
        self.counts.failed -= alone;
        self.counts.alone += alone;
        self.alone = self
            .failed
            .iter()
            .filter(|name| !again.failed.contains(name))
            .cloned()
            .collect();
        self.failed.clone_from(&again.failed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the outcome of a `cargo test` whose output and exit status come from `script`.
    fn outcome(script: &str) -> Outcome {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]);
        let mut shown = Vec::new();
        let outcome = Outcome::of(&mut shell, &mut shown).unwrap();
        assert_eq!(
            shown.iter().filter(|&&byte| byte == b'\n').count(),
            script.matches("echo").count()
        );
        outcome
    }

    fn counts(passed: u64, failed: u64) -> TestCounts {
        TestCounts {
            passed,
            failed,
            alone: 0,
        }
    }

    const GOOD: &str = "echo 'test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out; finished in 0.1s'";
    const BAD: &str = "echo 'test a::b ... FAILED'; echo 'test c ... FAILED'; \
                       echo 'test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out'";

    #[test]
    fn results_add_up() {
        assert_eq!(
            outcome(&format!("echo 'test a ... ok'; {GOOD}; {GOOD}")).counts,
            counts(24, 0)
        );
        let bad = outcome(&format!("{GOOD}; {BAD}; exit 101"));
        assert_eq!(
            (bad.counts, bad.failed),
            (counts(15, 2), vec!["a::b".to_owned(), "c".to_owned()])
        );
        assert_eq!(
            outcome("echo 'a test result: ok. 12 passed; 1 failed'"),
            Outcome::default()
        );
    }

    #[test]
    fn crash_counts_as_failure() {
        assert_eq!(outcome("exit 101").counts, counts(0, 1));
    }

    #[test]
    fn second_try_alone_counts_and_is_reported() {
        let mut first = outcome(&format!("{GOOD}; {BAD}; exit 101"));
        first.settle(&outcome(
            "echo 'test c ... FAILED'; echo 'test result: FAILED. 1 passed; 1 failed; 0 ignored'",
        ));
        assert_eq!(
            first.counts,
            TestCounts {
                passed: 15,
                failed: 1,
                alone: 1
            }
        );
        assert_eq!(
            first.counts.to_string(),
            "1 failed beside others and passed alone; 15 passed, 1 failed"
        );
        assert_eq!(
            (first.alone, first.failed),
            (vec!["a::b".to_owned()], vec!["c".to_owned()])
        );
        let mut first = outcome(&format!("{BAD}; exit 101"));
        first.settle(&outcome("exit 101"));
        assert_eq!(first.counts, counts(3, 2));
    }

    #[test]
    fn empty_run_is_a_failure() {
        assert!(TestCounts::default().check().is_err());
        assert!(counts(9, 1).check().is_err());
        assert!(counts(1, 0).check().is_ok());
        assert_eq!(counts(9, 1).to_string(), "9 passed, 1 failed");
    }
}
