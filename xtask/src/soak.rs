//! Builds kpx, and runs scenarios of operation against it under load.

use std::ffi::OsString;

use anyhow::Result;

use crate::setup::{self, Need};
use crate::{build, shell, workspace};

/// The argument that builds kpx and the load generator optimised.
const RELEASE: &str = "--release";

pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let toolchain = setup::ensure(Need::Lab)?;
    // The build takes this argument; the scenarios take the rest.
    let release = args.iter().any(|arg| arg == RELEASE);
    let mut args = args.to_vec();
    args.retain(|arg| arg != RELEASE);
    let kpx = build::with(
        &toolchain,
        &build::Options {
            release,
            ..Default::default()
        },
    )?;
    let other = build::other_object(&toolchain)?;
    let mut cargo = workspace::cargo();
    cargo.arg("run").args(release.then_some(RELEASE));
    cargo
        .args([
            "--package",
            "tools",
            "--bin",
            "kpx-soak",
            "--features",
            "soak",
            "--",
        ])
        .args(args);
    cargo.env("KPX_BIN", kpx).env("KPX_OTHER_OBJECT", other);
    workspace::run_as_root(&mut cargo)?;
    shell::run(cargo)
}
