//! Builds everything optimised, and runs the benchmark.

use std::ffi::{OsStr, OsString};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::iter::once;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use clap::Parser;
use serde_json::json;

use crate::setup::{self, Need};
use crate::vmtest::icount::{self, Outcome};
use crate::vmtest::scale::{self, Measured};
use crate::{build, shell, workspace};

/// The section that runs in a virtual machine instead of on this machine.
const ICOUNT: &str = "icount";
/// The section that runs in virtual machines if other kernels are selected.
const SCALE: &str = "scale";

pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let results = workspace::target_dir()?.join("bench");
    // The benchmark runs as root; the directory stays the user's.
    fs::create_dir_all(&results).with_context(|| format!("create {}", results.display()))?;
    match args.split_first() {
        Some((section, args)) if section == ICOUNT => count(args, &results),
        Some((section, args)) if section == SCALE && asks_for_kernels(args) => {
            on_kernels(args, &results)
        }
        Some(_) => measure(args, &results),
        None => {
            measure(&[], &results)?;
            count(&[], &results)
        }
    }
}

fn asks_for_kernels(args: &[OsString]) -> bool {
    args.iter()
        .any(|arg| arg == "--kernel" || arg.to_string_lossy().starts_with("--kernel="))
}

/// Measures large clusters on other kernels, with a file of results per kernel.
fn on_kernels(args: &[OsString], results: &Path) -> Result<()> {
    let words = once(OsStr::new(SCALE)).chain(args.iter().map(OsString::as_os_str));
    scale::run(
        &scale::Options::parse_from(words),
        |Measured { series, lines }| {
            let name = format!("{SCALE}-{series}");
            add(&results.join(format!("{name}.jsonl")), &lines)?;
            show(&name, true, results)
        },
    )
}

/// Appends a run to a file of results.
fn add(path: &Path, lines: &[String]) -> Result<()> {
    let text = lines.join("\n") + "\n";
    let open = OpenOptions::new().create(true).append(true).open(path);
    open.and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("write {}", path.display()))
}

fn measure(args: &[OsString], results: &Path) -> Result<()> {
    let toolchain = setup::ensure(Need::Bench)?;
    let kpx = build::with(
        &toolchain,
        &build::Options {
            release: true,
            ..Default::default()
        },
    )?;
    let mut cargo = benchmark(true, results);
    cargo.args(args).env("KPX_BIN", kpx);
    workspace::run_as_root(&mut cargo)?;
    shell::run(cargo)
}

/// Prints the table of the last run in a file of results.
fn show(name: &str, release: bool, results: &Path) -> Result<()> {
    let mut cargo = benchmark(release, results);
    cargo.args(["show", name]);
    shell::run(cargo)
}

fn benchmark(release: bool, results: &Path) -> Command {
    let mut cargo = workspace::cargo();
    cargo.arg("run").args(release.then_some("--release"));
    cargo.args([
        "--package",
        "tools",
        "--bin",
        "kpx-bench",
        "--features",
        "bench",
        "--",
    ]);
    cargo.env("KPX_BENCH_RESULTS", results);
    cargo
}

fn count(args: &[OsString], results: &Path) -> Result<()> {
    let words = once(OsStr::new(ICOUNT)).chain(args.iter().map(OsString::as_os_str));
    let options = icount::Options::parse_from(words);
    let path = results.join(format!("{ICOUNT}.jsonl"));
    let mut lines = match icount::run(&options)? {
        Outcome::Counted(lines) => lines,
        Outcome::NotRun(why) => {
            eprintln!("not run: {why}");
            return Ok(()); // Earlier counts still hold.
        }
    };
    if options.is_trial() {
        lines.iter().for_each(|line| println!("{line}"));
        return Ok(());
    }
    if !options.release() {
        let note = "Clients and servers were not optimised in this run (`--debug`), and count more for it.";
        lines.push(json!({ "note": note }).to_string());
    }
    fs::write(&path, lines.join("\n") + "\n")
        .with_context(|| format!("write {}", path.display()))?;
    show(ICOUNT, options.release(), results)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn added_run_keeps_the_lines_of_earlier_ones() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("scale-6.1.jsonl");
        for run in [["a", "b"], ["c", "d"]] {
            add(&path, &run.map(str::to_owned)).unwrap();
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "a\nb\nc\nd\n");
    }
}
