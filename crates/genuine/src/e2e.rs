//! Kubernetes' own network tests against the running cluster, and the comparison of two runs.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::process::{ExitCode, Stdio};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::outcomes;
use crate::state::{State, admin_inside, dir};

#[derive(Args)]
pub(crate) struct Options {
    /// Run the tests whose names match this
    #[arg(long, default_value = r"\[sig-network\]")]
    focus: String,
    /// Leave out the tests whose names match this
    #[arg(long, default_value = "Slow|Serial|Disruptive|Feature")]
    skip: String,
    /// The number of tests at a time
    #[arg(long, default_value_t = 4)]
    parallel: u8,
}

/// The outcomes of a run, by the tests' names.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Outcomes(BTreeMap<String, Outcome>);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Outcome {
    Passed,
    /// With the first line of the failure.
    Failed(String),
    /// With the reason.
    Skipped(String),
}

/// Runs the tests, keeps their outcomes, and compares them with those of other proxies in clusters
/// of the same shape.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let state = State::running()?;
    let report = dir().join("e2e");
    let _absent = fs::remove_dir_all(&report);
    fs::create_dir_all(&report).with_context(|| format!("make {}", report.display()))?;
    let program = |name: &str| state.parts.join(name).display().to_string();
    let kubeconfig = format!("--kubeconfig={}", admin_inside().display());
    let log = report.join("log");
    let output = fs::File::create(&log).with_context(|| format!("make {}", log.display()))?;
    eprintln!(
        "==> run Kubernetes' tests; their output is in {}",
        log.display()
    );
    let mut ginkgo = state.enter("control", program("ginkgo"))?;
    ginkgo
        .arg(format!("--nodes={}", options.parallel))
        .args(["--no-color", "--timeout=3h", "--json-report=report.json"])
        .arg(format!("--output-dir={}", report.display()))
        .arg(format!("--focus={}", options.focus))
        .arg(format!("--skip={}", options.skip))
        .arg(program("e2e.test"))
        .args(["--", "--provider=skeleton", &kubeconfig])
        .arg(format!("--kubectl-path={}", program("kubectl")))
        .arg(format!("--num-nodes={}", state.nodes.len()))
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output);
    let status = ginkgo.status().context("run ginkgo")?;
    let path = report.join("report.json");
    let text = fs::read(&path)
        .with_context(|| format!("ginkgo ended ({status}): see {}", log.display()))?;
    let report = serde_json::from_slice(&text).context("read ginkgo's report")?;
    let outcomes = Outcomes::of_report(&report);
    ensure!(
        !outcomes.0.is_empty(),
        "no test ran ({status}): see {}",
        log.display()
    );
    // A run of some tests leaves the outcomes of the others.
    let mut all: Outcomes = outcomes::own(&state, "e2e")?;
    all.0.extend(outcomes.0.clone());
    outcomes::write(&state, "e2e", &all)?;
    print!("{}", outcomes.text());
    for (proxy, others) in outcomes::of_others::<Outcomes>(&state, "e2e")? {
        print!("{}", outcomes.against(&proxy, &others));
    }
    Ok(if status.success() && outcomes.failed().count() == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

impl Outcomes {
    /// Reads ginkgo's report.
    fn of_report(report: &Value) -> Self {
        let suites = report.as_array().into_iter().flatten();
        let specs = suites.flat_map(|suite| suite["SpecReports"].as_array().into_iter().flatten());
        Self(specs.filter_map(outcome).collect())
    }

    fn failed(&self) -> impl Iterator<Item = (&String, &String)> {
        self.0.iter().filter_map(|(name, outcome)| match outcome {
            Outcome::Failed(why) => Some((name, why)),
            _ => None,
        })
    }

    fn count(&self, wanted: impl Fn(&Outcome) -> bool) -> usize {
        self.0.values().filter(|outcome| wanted(outcome)).count()
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (name, outcome) in &self.0 {
            let _ = match outcome {
                Outcome::Passed => continue,
                Outcome::Failed(why) => writeln!(text, "failed   {name}\n         {why}"),
                Outcome::Skipped(why) => writeln!(text, "skipped  {name}\n         {why}"),
            };
        }
        let _ = writeln!(
            text,
            "{} passed, {} failed, {} skipped",
            self.count(|outcome| *outcome == Outcome::Passed),
            self.failed().count(),
            self.count(|outcome| matches!(outcome, Outcome::Skipped(_))),
        );
        text
    }

    /// Lists the tests of this run with different outcomes.
    fn against(&self, proxy: &str, others: &Self) -> String {
        let short = |outcomes: &Self, name: &str| match outcomes.0.get(name) {
            Some(Outcome::Passed) => "passed",
            Some(Outcome::Failed(_)) => "failed",
            Some(Outcome::Skipped(_)) => "skipped",
            None => "not run",
        };
        let different: Vec<_> = self
            .0
            .keys()
            .filter(|name| short(self, name) != short(others, name))
            .collect();
        let mut text = format!("different with {proxy}: {}\n", different.len());
        for name in different {
            let _ = writeln!(
                text,
                "  {} here, {} there: {name}",
                short(self, name),
                short(others, name)
            );
        }
        text
    }
}

/// Returns a test's name and outcome; `None` for tests that the filters leave out, and for the steps
/// around all tests.
fn outcome(spec: &Value) -> Option<(String, Outcome)> {
    if spec["LeafNodeType"] != "It" {
        return None;
    }
    let texts = spec["ContainerHierarchyTexts"]
        .as_array()
        .into_iter()
        .flatten();
    let name: Vec<_> = texts
        .chain([&spec["LeafNodeText"]])
        .filter_map(Value::as_str)
        .collect();
    let why = || {
        let message = spec["Failure"]["Message"].as_str().unwrap_or_default();
        message.lines().next().unwrap_or_default().to_owned()
    };
    let outcome = match spec["State"].as_str()? {
        "passed" => Outcome::Passed,
        // A test that skips itself gives a reason.
        "skipped" if why().is_empty() => return None,
        "skipped" => Outcome::Skipped(why()),
        "pending" => return None,
        _ => Outcome::Failed(why()),
    };
    Some((name.join(" "), outcome))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(name: &str, state: &str, message: &str) -> Value {
        json!({
            "ContainerHierarchyTexts": ["[sig-network] Services"], "LeafNodeType": "It",
            "LeafNodeText": name, "State": state, "Failure": { "Message": message },
        })
    }

    #[test]
    fn report_yields_the_outcomes_of_selected_tests() {
        let report = json!([{ "SpecReports": [
            spec("should serve", "passed", ""),
            spec("should fail", "failed", "first line\nsecond line"),
            spec("needs a cloud", "skipped", "no cloud here"),
            spec("left out by a filter", "skipped", ""),
            { "LeafNodeType": "SynchronizedBeforeSuite", "State": "passed" },
        ] }]);
        let outcomes = Outcomes::of_report(&report);
        assert_eq!(
            outcomes.text(),
            "skipped  [sig-network] Services needs a cloud\n         no cloud here\n\
             failed   [sig-network] Services should fail\n         first line\n\
             1 passed, 1 failed, 1 skipped\n"
        );
        assert_eq!(
            outcomes.against(
                "kube-proxy",
                &Outcomes::of_report(&json!([{ "SpecReports": [
                spec("should serve", "passed", ""),
                spec("should fail", "passed", ""),
                spec("only there", "passed", ""),
                spec("needs a cloud", "skipped", "no cloud there"),
            ] }]))
            ),
            "different with kube-proxy: 1\n  \
             failed here, passed there: [sig-network] Services should fail\n"
        );
    }
}
