//! Builds kpx, and does to it under load what operators do.

use std::ffi::OsString;

use anyhow::Result;

use crate::setup::{self, Need};
use crate::{build, shell, workspace};

pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let toolchain = setup::ensure(Need::Lab)?;
    let kpx = build::with(&toolchain, &build::Options::default())?;
    let other = build::other_object(&toolchain)?;
    let mut cargo = workspace::cargo();
    cargo.args(["run", "--package", "lab-tools", "--bin", "kpx-soak", "--features", "soak", "--"]).args(args);
    cargo.env("KPX_BIN", kpx).env("KPX_OTHER_OBJECT", other);
    workspace::run_as_root(&mut cargo)?;
    shell::run(cargo)
}
