//! All tests of a cell: a plugin, a proxy and a version of Kubernetes.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::command::output;
use crate::parts;
use crate::up::{self, Proxy, name_of};

#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    cell: up::Options,
    /// Run these tests only
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Test>,
    /// Run the tests again that this commit has run
    #[arg(long)]
    again: bool,
}

/// The tests in their order. The last ones disturb the cluster most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Test {
    Matrix,
    Dns,
    Tools,
    E2e,
    Migration,
    Reboot,
    Faults,
}

/// How a test ended.
#[derive(Debug, Serialize, Deserialize)]
struct Ended {
    test: String,
    passed: bool,
    seconds: u64,
    /// The last line of its output, which counts.
    line: String,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let cell = &options.cell;
    let commit = commit()?;
    let name = format!(
        "Kubernetes {}, {}, {}, {} nodes",
        cell.kubernetes,
        name_of(cell.cni),
        name_of(cell.proxy),
        cell.nodes
    );
    let folder = parts::cache()?.join("cells").join(&commit).join(format!(
        "{}-{}-{}-{}",
        cell.kubernetes,
        name_of(cell.cni),
        name_of(cell.proxy),
        cell.nodes
    ));
    // Without a commit nothing says what ran.
    if options.again || commit.ends_with("-dirty") {
        let _absent = fs::remove_dir_all(&folder);
    }
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    let tests: Vec<_> = Test::value_variants()
        .iter()
        .copied()
        .filter(|test| test.runs_with(cell.proxy))
        .filter(|test| options.only.is_empty() || options.only.contains(test))
        .collect();
    let ended = |test: &Test| read(&folder.join(format!("{}.json", name_of(*test))));
    if tests.iter().any(|test| ended(test).is_none()) {
        up::up(cell)?;
        let mut remaining = tests.iter().filter(|test| ended(test).is_none());
        let ran = remaining.try_for_each(|test| test.run(&folder, cell.image.as_deref()));
        up::down()?;
        ran?;
    }
    let all: Vec<_> = tests.iter().filter_map(ended).collect();
    let junit = folder.join("junit.xml");
    fs::write(&junit, junit_of(&name, &all, &folder)).context("write the JUnit file")?;
    println!("{name}, commit {commit}");
    for ended in &all {
        println!("{}", ended.text());
    }
    println!("{}", junit.display());
    Ok(if all.iter().all(|ended| ended.passed) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Returns the commit of the checkout, with `-dirty` if files are changed.
fn commit() -> Result<String> {
    let mut git = Command::new("git");
    // sudo may run this as another user than the owner.
    git.args(["-c", "safe.directory=*", "-C", env!("CARGO_MANIFEST_DIR")])
        .args([
            "describe",
            "--always",
            "--exclude=*",
            "--abbrev=12",
            "--dirty",
        ]);
    Ok(output(&mut git)?.trim().to_owned())
}

impl Test {
    fn runs_with(self, proxy: Proxy) -> bool {
        match self {
            Self::Tools => proxy == Proxy::Kpx,
            // It begins with kube-proxy, and ends with it.
            Self::Migration => proxy != Proxy::Kpx,
            Self::Matrix | Self::Dns | Self::E2e | Self::Reboot | Self::Faults => true,
        }
    }

    /// Runs the test as a process of its own, and keeps its output and end.
    fn run(self, folder: &Path, image: Option<&Path>) -> Result<()> {
        let name = name_of(self);
        let log = folder.join(format!("{name}.log"));
        eprintln!("==> {name}: output in {}", log.display());
        let file = File::create(&log).with_context(|| format!("make {}", log.display()))?;
        let mut command = Command::new(std::env::current_exe().context("find this program")?);
        command.arg(&name).stdout(file.try_clone()?).stderr(file);
        if let (Self::Migration, Some(image)) = (self, image) {
            command.arg("--image").arg(image);
        }
        let started = Instant::now();
        let status = command.status().with_context(|| format!("run {name}"))?;
        let text = fs::read_to_string(&log).with_context(|| format!("read {}", log.display()))?;
        let ended = Ended {
            test: name.clone(),
            passed: status.success(),
            seconds: started.elapsed().as_secs(),
            line: text.lines().last().unwrap_or_default().to_owned(),
        };
        eprintln!("    {}", ended.text());
        let path = folder.join(format!("{name}.json"));
        fs::write(&path, serde_json::to_vec_pretty(&ended)?)
            .with_context(|| format!("write {}", path.display()))
    }
}

/// Returns the end of a test that ran.
fn read(path: &Path) -> Option<Ended> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

impl Ended {
    fn text(&self) -> String {
        let outcome = if self.passed { "passed" } else { "failed" };
        format!(
            "{outcome}  {:9} {:5} s  {}",
            self.test, self.seconds, self.line
        )
    }
}

/// Returns the ends as a JUnit file, with the outputs of tests that failed.
fn junit_of(name: &str, all: &[Ended], folder: &Path) -> String {
    let escape = |text: &str| {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        text.replace('"', "&quot;")
    };
    let name = escape(name);
    let failures = all.iter().filter(|ended| !ended.passed).count();
    let mut xml = format!(
        "<?xml version=\"1.0\"?>\n<testsuite name=\"{name}\" tests=\"{}\" failures=\"{failures}\">\n",
        all.len()
    );
    for Ended {
        test,
        passed,
        seconds,
        line,
    } in all
    {
        let _ = write!(
            xml,
            "<testcase classname=\"{name}\" name=\"{test}\" time=\"{seconds}\">"
        );
        if !passed {
            let text = fs::read_to_string(folder.join(format!("{test}.log"))).unwrap_or_default();
            let (line, text) = (escape(line), escape(&text));
            let _ = write!(xml, "<failure message=\"{line}\">{text}</failure>");
        }
        xml += "</testcase>\n";
    }
    xml + "</testsuite>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn junit_has_a_case_for_each_test() {
        let ended = |test: &str, passed| Ended {
            test: test.to_owned(),
            passed,
            seconds: 7,
            line: "1 < 2 & \"3\"".to_owned(),
        };
        let all = [ended("matrix", true), ended("dns", false)];
        assert_eq!(
            junit_of("cell", &all, Path::new("/nonexistent")),
            "<?xml version=\"1.0\"?>\n<testsuite name=\"cell\" tests=\"2\" failures=\"1\">\n\
             <testcase classname=\"cell\" name=\"matrix\" time=\"7\"></testcase>\n\
             <testcase classname=\"cell\" name=\"dns\" time=\"7\">\
             <failure message=\"1 &lt; 2 &amp; &quot;3&quot;\"></failure></testcase>\n</testsuite>\n"
        );
    }
}
