//! Builds kpx, and runs the demo.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Stdio, exit};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use signal_hook::consts::SIGINT;

use crate::{build, shell};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Arguments for the demo: `--keep` leaves everything up until Ctrl-C
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) args: Vec<OsString>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    // Fails before the build, which takes minutes.
    shell::root_prefix()?;
    let kpx = build::with_demo()?;
    // Ctrl-C reaches the demo too, which removes its lab. xtask waits for it, so that the prompt
    // returns afterwards.
    let interrupted = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGINT, Arc::clone(&interrupted)).context("wait for Ctrl-C")?;
    let shown = show(&kpx, &options.args, Stdio::inherit());
    match shown {
        Err(_) if interrupted.load(Ordering::Relaxed) => exit(128 + SIGINT),
        shown => shown,
    }
}

/// Runs the demo that was built with kpx. Without a terminal as input, the demo asks no questions.
pub(crate) fn show(kpx: &Path, args: &[OsString], input: Stdio) -> Result<()> {
    let mut demo = shell::as_root(&kpx.with_file_name("kpx-demo"))?;
    demo.args(args).env("KPX_BIN", kpx).stdin(input);
    shell::run(demo)
}
