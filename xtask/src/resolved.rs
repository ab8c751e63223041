//! Provides systemd-resolved for a test that resolves names through kpx. kpx does not contain it.
//!
//! Debian's package is unpacked instead of installed: an installed package becomes the machine's
//! resolver.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{shell, step, workspace};

const PACKAGE: &str = "systemd-resolved";
/// The program that a test starts.
const FILE: &str = "lib/systemd/systemd-resolved";

/// Unpacks systemd-resolved if it is missing. On failure, only one test fails.
pub(crate) fn ensure() -> Option<PathBuf> {
    own()
        .inspect_err(|error| {
            eprintln!("warning: no {PACKAGE} here, a test of names will fail: {error:#}")
        })
        .ok()
}

fn own() -> Result<PathBuf> {
    let folder = workspace::target_dir()?.join("tools").join(PACKAGE);
    if !folder.join(FILE).is_file() {
        ensure!(shell::which("apt-get").is_some(), "apt-get would bring it");
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        let mut download = Command::new("apt-get");
        download.args(["download", PACKAGE]).current_dir(&folder);
        let mut unpack = Command::new("sh");
        unpack
            .args(["-c", "dpkg-deb --extract *.deb . && rm *.deb"])
            .current_dir(&folder);
        step::quiet(&format!("unpack {PACKAGE}"), [download, unpack])?;
        ensure!(
            folder.join(FILE).is_file(),
            "the package {PACKAGE} has no {FILE} in it"
        );
    }
    Ok(folder)
}
