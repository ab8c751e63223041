//! Parses the results of tests from a guest's console.
//!
//! The guest's own lines begin with [`OURS`]; the lines between them are the output of test
//! programs.

use std::fmt;
use std::fmt::Write as _;
use std::time::Duration;

use crate::step::seconds;

const OURS: &str = "kpx-guest: ";

#[derive(Default)]
pub(super) struct Guest {
    kernel: Option<String>,
    booted: Option<Duration>,
    suites: Vec<Suite>,
    /// The start of the last suite, while it runs.
    running: Option<Duration>,
    complaints: Vec<String>,
    ended: bool,
}

/// A run of a test program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Suite {
    pub(super) name: String,
    pub(super) passed: usize,
    pub(super) failed: Vec<String>,
    /// The skipped tests, with the reasons.
    pub(super) skipped: Vec<String>,
    /// The results of a measurement, a JSON line each.
    pub(super) results: Vec<String>,
    took: Duration,
    /// The exit code; `None` while the suite runs.
    code: Option<i32>,
    output: Vec<String>,
}

pub(super) struct Report {
    pub(super) kernel: String,
    pub(super) booted: Duration,
    pub(super) took: Duration,
    pub(super) suites: Vec<Suite>,
    /// The problems of the run other than failed tests.
    pub(super) trouble: Vec<String>,
}

impl Guest {
    /// Processes a console line that arrived at this time.
    pub(super) fn take(&mut self, line: &str, at: Duration) {
        let Some((_, ours)) = line.split_once(OURS) else {
            if let (Some(suite), Some(_)) = (self.suites.last_mut(), self.running) {
                suite.take(line);
            }
            return;
        };
        let (word, rest) = ours.split_once(' ').unwrap_or((ours, ""));
        match word {
            "kernel" => {
                self.kernel = Some(rest.to_owned());
                self.booted = Some(at);
            }
            "suite" => {
                self.suites.push(Suite {
                    name: rest.to_owned(),
                    ..Suite::default()
                });
                self.running = Some(at);
            }
            "skipped" => {
                let (name, reason) = rest.split_once(' ').unwrap_or((rest, ""));
                let skipped = vec![reason.to_owned()];
                self.suites.push(Suite {
                    name: name.to_owned(),
                    skipped,
                    code: Some(0),
                    ..Suite::default()
                });
            }
            "ended" => {
                if let (Some(suite), Some(since)) = (self.suites.last_mut(), self.running.take()) {
                    suite.took = at.saturating_sub(since);
                    suite.code = rest.parse().ok();
                }
            }
            "complaint" => self.complaints.push(rest.to_owned()),
            "end" => self.ended = true,
            _ => {}
        }
    }

    pub(super) fn finish(self, took: Duration, trouble: Option<String>, tail: &[String]) -> Report {
        let mut all = Vec::from_iter(trouble);
        if !self.ended {
            let console = tail.join("\n    ");
            all.push(format!(
                "the guest did not come to its end; the end of its console:\n    {console}"
            ));
        }
        all.extend(
            self.complaints
                .iter()
                .map(|complaint| format!("the kernel complains: {complaint}")),
        );
        all.extend(self.suites.iter().filter_map(Suite::trouble));
        let kernel = self.kernel.unwrap_or_default();
        Report {
            kernel,
            booted: self.booted.unwrap_or_default(),
            took,
            suites: self.suites,
            trouble: all,
        }
    }
}

impl Suite {
    /// Processes an output line of a test program, such as `test flows::open ... ok`.
    fn take(&mut self, line: &str) {
        self.output.push(line.to_owned());
        if line.starts_with('{') {
            self.results.push(line.to_owned());
        }
        let Some((name, outcome)) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.split_once(" ... "))
        else {
            return;
        };
        let name = name.split(" - should panic").next().unwrap_or_default();
        match outcome.split_once(", ").unwrap_or((outcome, "")) {
            ("ok", _) => self.passed += 1,
            ("ignored", reason) => self.skipped.push(format!("{name}: {reason}")),
            // Any other outcome is a failure.
            _ => self.failed.push(name.to_owned()),
        }
    }

    /// Returns the suite's problem with the program's output, if any.
    fn trouble(&self) -> Option<String> {
        let silent = self.passed + self.failed.len() + self.skipped.len() + self.results.len() == 0;
        let what = match self.code {
            None => "did not end".to_owned(),
            Some(0) if silent => "ran nothing".to_owned(),
            Some(0) if self.failed.is_empty() => return None,
            Some(code) => format!("ended with {code}"),
        };
        Some(format!(
            "{} {what}:\n    {}",
            self.name,
            self.output.join("\n    ")
        ))
    }
}

impl Report {
    pub(super) fn is_good(&self) -> bool {
        self.trouble.is_empty()
            && self
                .suites
                .iter()
                .any(|suite| suite.passed + suite.results.len() > 0)
    }

    pub(super) fn passed(&self) -> usize {
        self.suites.iter().map(|suite| suite.passed).sum()
    }

    pub(super) fn failed(&self) -> usize {
        self.suites.iter().map(|suite| suite.failed.len()).sum()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let booted = seconds(self.booted);
        let took = seconds(self.took);
        writeln!(
            f,
            "{}: first process after {booted}, power off after {took}",
            self.kernel
        )?;
        for Suite {
            name,
            passed,
            failed,
            skipped,
            took,
            ..
        } in &self.suites
        {
            let mut line = format!("  {name:<22} {passed:>3} passed, {} failed", failed.len());
            if passed + failed.len() > 0 {
                let _written = write!(line, ", {}", seconds(*took));
            }
            for reason in skipped {
                let _written = write!(line, "; skipped: {reason}");
            }
            writeln!(f, "{line}")?;
        }
        for trouble in &self.trouble {
            writeln!(f, "  FAILED: {trouble}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(console: &str) -> Report {
        let lines: Vec<String> = console.lines().map(str::to_owned).collect();
        let mut guest = Guest::default();
        for (line, at) in lines.iter().zip(1..) {
            guest.take(line, Duration::from_secs(at));
        }
        guest.finish(Duration::from_secs(60), None, &lines)
    }

    const GOOD: &str = "booting\nkpx-guest: kernel 6.1.0-56-cloud-amd64\nkpx-guest: suite datapath\n\
                        test flows::a ... ok\ntest flows::b ... ignored, takes long\nkpx-guest: ended 0\n\
                        kpx-guest: skipped ipvs no module ip_vs\nkpx-guest: end";

    #[test]
    fn report_is_read_from_the_console() {
        let report = report(GOOD);
        assert!(report.is_good());
        assert_eq!((report.passed(), report.failed()), (1, 0));
        assert_eq!(
            report.to_string(),
            "6.1.0-56-cloud-amd64: first process after 2.0 s, power off after 60.0 s\n  \
             datapath                 1 passed, 0 failed, 3.0 s; skipped: flows::b: takes long\n  \
             ipvs                     0 passed, 0 failed; skipped: no module ip_vs\n"
        );
    }

    #[test]
    fn results_are_kept_unchanged() {
        let console = "kpx-guest: suite icount\n6 lines of progress\n{\"sample\":1}\nkpx-guest: ended 0\nkpx-guest: end";
        let good = report(console);
        assert!(good.is_good(), "{good}");
        assert_eq!(good.suites[0].results, [r#"{"sample":1}"#]);
        let silent = report(&console.replace("{", ""));
        assert!(
            !silent.is_good() && silent.to_string().contains("icount ran nothing"),
            "{silent}"
        );
    }

    #[test]
    fn missing_line_is_a_failure() {
        for (from, to, why) in [
            (
                "kpx-guest: end\n",
                "Kernel panic - not syncing\n",
                "Kernel panic - not syncing",
            ),
            (
                "flows::a ... ok",
                "flows::a ... FAILED",
                "datapath ended with 101",
            ),
            ("ended 0", "ended 101", "datapath ended with 101"),
            (
                "kpx-guest: end\n",
                "kpx-guest: complaint WARNING: at net\nkpx-guest: end\n",
                "complains: WARNING",
            ),
            (
                "test flows::a ... ok\ntest flows::b ... ignored, takes long\n",
                "",
                "datapath ran nothing",
            ),
            ("kpx-guest: ended 0\n", "", "datapath did not end"),
        ] {
            let mut console = format!("{GOOD}\n").replace(from, to);
            if why.contains("101") {
                console = console.replace("ended 0", "ended 101");
            }
            let report = report(&console);
            assert!(
                !report.is_good() && report.to_string().contains(why),
                "{why}: {report}"
            );
        }
        assert!(!report("kpx-guest: end").is_good(), "nothing ran");
    }
}
