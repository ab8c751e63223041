//! Builds kpx, and shows it at work.

mod picture;

use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Stdio, exit};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use signal_hook::consts::SIGINT;

use crate::{build, shell};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Draw the output as a moving picture in this file, in SVG: docs/demo.svg is made so
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
    /// Arguments for the demo: `--keep` leaves everything up until Ctrl-C
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    // A build of minutes should not end with this.
    shell::root_prefix()?;
    let kpx = build::with_demo()?;
    // Ctrl-C reaches the demo as well, which then removes its lab. xtask waits for that, so that
    // the prompt returns after it.
    let interrupted = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGINT, Arc::clone(&interrupted)).context("wait for Ctrl-C")?;
    let shown = match &options.picture {
        Some(file) => draw(&kpx, &options.args, file),
        None => show(&kpx, &options.args, Stdio::inherit()),
    };
    match shown {
        Err(_) if interrupted.load(Ordering::Relaxed) => exit(128 + SIGINT),
        shown => shown,
    }
}

/// Runs the demo that was built beside kpx. Without a terminal as its input, the demo asks no
/// questions.
pub(crate) fn show(kpx: &Path, args: &[OsString], input: Stdio) -> Result<()> {
    let mut demo = shell::as_root(&kpx.with_file_name("kpx-demo"))?;
    demo.args(args).env("KPX_BIN", kpx).stdin(input);
    shell::run(demo)
}

/// Runs the demo, and draws what it prints and when.
fn draw(kpx: &Path, args: &[OsString], file: &Path) -> Result<()> {
    let mut demo = shell::as_root(&kpx.with_file_name("kpx-demo"))?;
    let started = Instant::now();
    let mut demo = demo
        .args(args)
        .env("KPX_BIN", kpx)
        .stdout(Stdio::piped())
        .spawn()
        .context("run the demo")?;
    let mut lines = Vec::new();
    for line in BufReader::new(demo.stdout.take().context("an output")?).lines() {
        let line = line.context("the demo prints text")?;
        println!("{line}");
        lines.push((started.elapsed(), line));
    }
    let status = demo.wait().context("wait for the demo")?;
    ensure!(status.success(), "the demo failed ({status})");
    fs::write(file, picture::svg("cargo xtask demo", &lines))
        .with_context(|| format!("write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn arguments_of_the_demo_follow_those_of_xtask() {
        let read = |words: &[&str]| Line::parse_from([&["demo"], words].concat()).options;
        assert_eq!(
            read(&["--keep", "--pods", "ptp"]).args,
            ["--keep", "--pods", "ptp"]
        );
        let both = read(&["--picture", "a.svg", "--manifests"]);
        assert_eq!(
            (both.picture, both.args),
            (Some("a.svg".into()), vec!["--manifests".into()])
        );
    }
}
