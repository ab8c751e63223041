//! Installs axe-core, with which tests check the web page's accessibility. kpx does not contain it.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{shell, step, workspace};

/// The npm package, by Deque Systems under the MPL-2.0.
const PACKAGE: &str = "axe-core@4.14.1";
/// The script that a page runs.
const FILE: &str = "package/axe.min.js";

/// Installs axe-core if it is missing. On failure, only the tests of the web page fail.
pub(crate) fn ensure() -> Option<PathBuf> {
    own()
        .inspect_err(|error| {
            eprintln!("warning: no axe-core here, a test of the page will fail: {error:#}")
        })
        .ok()
}

fn own() -> Result<PathBuf> {
    let folder = workspace::target_dir()?.join("tools").join(PACKAGE);
    let file = folder.join(FILE);
    if !file.is_file() {
        ensure!(shell::which("npm").is_some(), "npm would bring it");
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        let mut pack = Command::new("npm");
        pack.args(["pack", "--silent", PACKAGE])
            .current_dir(&folder);
        let mut unpack = Command::new("sh");
        unpack
            .args(["-c", &format!("tar -xzf *.tgz {FILE}")])
            .current_dir(&folder);
        step::quiet("install axe-core", [pack, unpack])?;
        ensure!(file.is_file(), "{PACKAGE} has no {FILE} in it");
    }
    Ok(file)
}
