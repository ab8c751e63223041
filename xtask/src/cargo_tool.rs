//! Installs programs of crates.io in fixed versions, below the target directory.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::step::quiet;
use crate::workspace;

/// Returns the command `cargo NAME`, without arguments.
pub(crate) fn cargo_tool(name: &str, version: &str) -> Result<Command> {
    let mut tool = Command::new(install(&format!("cargo-{name}"), version)?);
    tool.arg(name).current_dir(workspace::root());
    workspace::forget_xtask(&mut tool);
    Ok(tool)
}

/// Installs the program of a package, which has the package's name. Returns its path.
pub(crate) fn install(package: &str, version: &str) -> Result<PathBuf> {
    let tools = workspace::target_dir()?.join("tools");
    // cargo returns at once if this version is installed. To optimise the build would take longer
    // than it saves.
    let mut install = workspace::cargo();
    install
        .args(["install", "--locked", "--debug", "--version", version])
        .arg("--root")
        .arg(&tools)
        .arg(package)
        .env("CARGO_PROFILE_DEV_DEBUG", "0");
    quiet(&format!("install {package} {version}"), [install])?;
    Ok(tools.join("bin").join(package))
}
