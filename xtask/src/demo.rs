//! Builds kpx and shows it at work.

use std::ffi::OsString;
use std::path::Path;
use std::process::Stdio;

use anyhow::Result;

use crate::setup::{self, Need};
use crate::{build, shell, workspace};

pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let toolchain = setup::ensure(Need::Lab)?;
    let kpx = build::with(&toolchain, &build::Options::default())?;
    show(&kpx, args, Stdio::inherit())
}

/// Without a terminal as its input, the demo asks nothing.
pub(crate) fn show(kpx: &Path, args: &[OsString], input: Stdio) -> Result<()> {
    let mut cargo = workspace::cargo();
    cargo.args(["run", "--package", "kpx-tests", "--bin", "kpx-demo", "--"]).args(args);
    cargo.env("KPX_BIN", kpx).stdin(input);
    workspace::run_as_root(&mut cargo)?;
    shell::run(cargo)
}
