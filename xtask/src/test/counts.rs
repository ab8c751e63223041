//! Runs a `cargo test`, and counts its tests.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::shell;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TestCounts {
    passed: u64,
    failed: u64,
    /// What the failed tests printed.
    failures: Vec<Vec<String>>,
    /// Set in the part of the output that shows the failures.
    shows_failures: bool,
}

/// The lines of a failure that the end of the run repeats, from its beginning and from its end,
/// where the causes of an error are; and the characters of a line.
const FIRST_LINES: usize = 4;
const LAST_LINES: usize = 16;
const WIDTH: usize = 300;

impl TestCounts {
    /// Runs a `cargo test`, and prints its output as it arrives.
    pub(super) fn of(cargo: &mut Command, out: &mut impl Write) -> Result<Self> {
        let name = shell::show(cargo);
        let mut child = cargo
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("run `{name}`"))?;
        let mut counts = Self::default();
        for line in BufReader::new(child.stdout.take().expect("it is piped")).split(b'\n') {
            let line = line?;
            out.write_all(&[&line, b"\n".as_slice()].concat())?;
            out.flush()?;
            let line = String::from_utf8_lossy(&line);
            counts.count(&line);
            counts.collect(&line);
        }
        let status = child.wait()?;
        if !status.success() && counts.failed == 0 {
            eprintln!(
                "`{name}` failed ({status}) without a failed test: it did not compile, or it crashed"
            );
            counts.failed += 1;
        }
        Ok(counts)
    }

    /// Adds the counts of a line such as `test result: FAILED. 3 passed; 1 failed; 0 ignored; …`.
    fn count(&mut self, line: &str) {
        let Some((_, result)) = line
            .strip_prefix("test result: ")
            .and_then(|result| result.split_once(". "))
        else {
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

    /// Keeps the parts of the output such as `---- a::b stdout ----` and the lines after it.
    fn collect(&mut self, line: &str) {
        if line.starts_with("---- ") && line.ends_with(" ----") {
            self.failures.push(Vec::new());
            self.shows_failures = true;
        } else if line == "failures:" {
            self.shows_failures = false;
        }
        if let Some(failure) = self.failures.last_mut().filter(|_| self.shows_failures) {
            failure.push(line.chars().take(WIDTH).collect());
            if failure.len() > FIRST_LINES + LAST_LINES {
                failure.remove(FIRST_LINES);
            }
        }
    }

    /// Fails if a test failed, or if no test ran.
    pub(crate) fn check(&self) -> Result<()> {
        ensure!(self.failed == 0, "tests failed");
        ensure!(self.passed > 0, "no test ran");
        Ok(())
    }

    /// Prints the failures and the error, then the tally as the last line.
    pub(crate) fn end(&self, result: Result<()>) -> Result<()> {
        for line in self.failures.iter().flatten() {
            println!("{line}");
        }
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
        self.failures.extend(other.failures);
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

    /// Returns the counts of a `cargo test` whose output and exit status come from `script`.
    fn of(script: &str) -> TestCounts {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]);
        let mut shown = Vec::new();
        let counts = TestCounts::of(&mut shell, &mut shown).unwrap();
        assert_eq!(
            shown.iter().filter(|&&byte| byte == b'\n').count(),
            script.matches("echo").count()
        );
        counts
    }

    fn counts(passed: u64, failed: u64) -> TestCounts {
        TestCounts {
            passed,
            failed,
            ..TestCounts::default()
        }
    }

    #[test]
    fn failures_are_kept_with_their_first_and_last_lines() {
        let long: String = (0..50).map(|n| format!("echo line {n}; ")).collect();
        let counts = of(&format!(
            "echo 'failures:'; echo; echo '---- a::b stdout ----'; echo 'Error: x'; echo; \
             echo '---- c stdout ----'; {long} echo; echo 'failures:'; echo '    a::b'; echo '    c'; {BAD}"
        ));
        let [short, long] = counts.failures.as_slice() else {
            panic!("{counts:?}")
        };
        assert_eq!(*short, ["---- a::b stdout ----", "Error: x", ""]);
        assert_eq!(
            long[..4],
            ["---- c stdout ----", "line 0", "line 1", "line 2"]
        );
        assert_eq!(long[4..].first().unwrap(), "line 35");
        assert_eq!(long.len(), FIRST_LINES + LAST_LINES);
    }

    const GOOD: &str = "echo 'test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out; finished in 0.1s'";
    const BAD: &str = "echo 'test a::b ... FAILED'; echo 'test c ... FAILED'; \
                       echo 'test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out'";

    #[test]
    fn results_add_up() {
        assert_eq!(
            of(&format!("echo 'test a ... ok'; {GOOD}; {GOOD}")),
            counts(24, 0)
        );
        assert_eq!(of(&format!("{GOOD}; {BAD}; exit 101")), counts(15, 2));
        assert_eq!(
            of("echo 'a test result: ok. 12 passed; 1 failed'"),
            TestCounts::default()
        );
    }

    #[test]
    fn crash_counts_as_failure() {
        assert_eq!(of("exit 101"), counts(0, 1));
    }

    #[test]
    fn empty_run_is_a_failure() {
        assert!(TestCounts::default().check().is_err());
        assert!(counts(9, 1).check().is_err());
        assert!(counts(1, 0).check().is_ok());
        assert_eq!(counts(9, 1).to_string(), "9 passed, 1 failed");
    }
}
