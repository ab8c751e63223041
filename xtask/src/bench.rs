//! Builds everything optimised and measures it.

use std::ffi::OsString;

use anyhow::Result;

use crate::setup::{self, Need};
use crate::{build, shell, workspace};

pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let toolchain = setup::ensure(Need::Lab)?;
    let kpx = build::with(&toolchain, &build::Options { release: true, ..Default::default() })?;
    let mut cargo = workspace::cargo();
    cargo.args(["run", "--release", "--package", "kpx-tests", "--bin", "kpx-bench", "--"]).args(args);
    cargo.env("KPX_BIN", kpx);
    workspace::run_as_root(&mut cargo)?;
    shell::run(cargo)
}
