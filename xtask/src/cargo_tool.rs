//! Installs programs of crates.io in fixed versions, below the target directory.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::step::quiet;
use crate::workspace;

/// Returns the command `cargo NAME`, without arguments.
pub(crate) fn cargo_tool(name: &str, version: &str) -> Result<Command> {
    let mut tool = Command::new(install(&format!("cargo-{name}"), version, &[])?);
    tool.arg(name).current_dir(workspace::root());
    workspace::forget_xtask(&mut tool);
    Ok(tool)
}

/// The packages that compress and compute sums, and the C code in them. Unoptimised, they take
/// minutes for an RPM package of kpx.
const HOT: [&str; 8] = [
    "liblzma-sys",
    "lzma-sys",
    "md-5",
    "sha1",
    "sha1-checked",
    "sha2",
    "sha3",
    "zstd-sys",
];

/// Installs the program of a package, which has the package's name. Returns its path.
pub(crate) fn install(package: &str, version: &str, more: &[&str]) -> Result<PathBuf> {
    let tools = workspace::target_dir()?.join("tools");
    // cargo returns at once if this version is installed. To optimise the whole build would take
    // longer than it saves.
    let mut install = workspace::cargo();
    install
        .args(["install", "--locked", "--debug", "--version", version])
        .arg("--root")
        .arg(&tools)
        .arg(package)
        .args(more)
        .env("CARGO_PROFILE_DEV_DEBUG", "0");
    for hot in HOT {
        install.arg(format!("--config=profile.dev.package.{hot}.opt-level=3"));
    }
    quiet(&format!("install {package} {version}"), [install])?;
    Ok(tools.join("bin").join(package))
}
