//! Runs one `cargo test`, and counts its tests.

use std::collections::HashSet;
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::shell;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TestCounts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
}

/// One `cargo test`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) counts: TestCounts,
    /// The names of the tests that failed.
    pub(super) failed: Vec<String>,
    /// The names of the tests that passed.
    passed: HashSet<String>,
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

    pub(super) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
    }
}

impl fmt::Display for TestCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

impl Outcome {
    /// Runs a `cargo test`, and shows its output as it comes.
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

    /// Counts a line such as `test result: FAILED. 3 passed; 1 failed; 0 ignored; …`, and notes the
    /// test of one such as `test pins::renamed ... FAILED`.
    fn count(&mut self, line: &str) {
        match line
            .strip_prefix("test ")
            .and_then(|rest| rest.split_once(" ... "))
        {
            Some((name, "FAILED")) => self.failed.push(name.to_owned()),
            Some((name, "ok")) => drop(self.passed.insert(name.to_owned())),
            _ => {}
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

    pub(super) fn passed(&self, test: &str) -> bool {
        self.passed.contains(test)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the outcome of a `cargo test` with the output and exit of `script`.
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
        TestCounts { passed, failed }
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
            outcome("echo 'a test result: ok. 12 passed; 1 failed'").counts,
            counts(0, 0)
        );
    }

    #[test]
    fn crash_counts_as_failure() {
        assert_eq!(outcome("exit 101").counts, counts(0, 1));
    }

    #[test]
    fn tests_are_known_by_name() {
        let run = outcome("echo 'test a::b ... ok'; echo 'test c ... FAILED'; exit 101");
        assert!(run.passed("a::b") && !run.passed("c") && !run.passed("b"));
        assert_eq!(run.failed, ["c"]);
    }

    #[test]
    fn empty_run_is_a_failure() {
        assert!(TestCounts::default().check().is_err());
        assert!(counts(9, 1).check().is_err());
        assert!(counts(1, 0).check().is_ok());
        assert_eq!(counts(9, 1).to_string(), "9 passed, 1 failed");
    }
}
