//! Locates the workspace's directories and its cargo.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::shell;

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is a directory of the workspace")
}

/// Returns the target directory: this program runs from `<target
/// directory>[/<triple>]/<profile>/xtask`.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let exe = std::env::current_exe().context("find the target directory")?;
    let dir = exe
        .ancestors()
        .nth(2)
        .context("find the target directory")?;
    let triple = format!("{}-", std::env::consts::ARCH);
    let in_triple = dir
        .file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with(&triple));
    Ok(if in_triple {
        dir.parent().unwrap_or(dir)
    } else {
        dir
    }
    .to_owned())
}

/// Returns the kpx of a plain `cargo build` or `cargo build --release`, in a sibling of this
/// program's directory.
pub(crate) fn kpx(release: bool) -> Result<PathBuf> {
    let exe = std::env::current_exe().context("find the target directory")?;
    let dir = exe
        .ancestors()
        .nth(2)
        .context("find the target directory")?;
    Ok(dir
        .join(if release { "release" } else { "debug" })
        .join("kpx"))
}

/// Returns the cargo that runs xtask, at the top of the workspace.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    forget_xtask(&mut command);
    command
}

/// Makes cargo run the built program as root. cargo itself runs as the current user.
pub(crate) fn run_as_root(cargo: &mut Command) -> Result<()> {
    let prefix = shell::root_prefix()?;
    if !prefix.is_empty() {
        let triple = host_triple()?.to_uppercase().replace('-', "_");
        cargo.env(format!("CARGO_TARGET_{triple}_RUNNER"), prefix.join(" "));
    }
    Ok(())
}

/// Removes the variables that describe xtask. Build scripts that watch them would run again
/// whenever `cargo build` and `cargo xtask build` alternate, and rebuild half of the tree.
pub(crate) fn forget_xtask(command: &mut Command) {
    let of_a_package = |name: &OsStr| {
        let name = name.to_string_lossy();
        name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
    };
    for (name, _) in std::env::vars_os().filter(|(name, _)| of_a_package(name)) {
        command.env_remove(name);
    }
}

fn host_triple() -> Result<String> {
    let about = shell::output("rustc", &["-vV"]).context("ask rustc for its host")?;
    let host = about.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("ask rustc for its host")?.to_owned())
}
