//! Runs other programs.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Runs a command to its end, and returns its standard output. Returns an error with both outputs
/// if it fails.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let name = format!("{command:?}");
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("run {name}"))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("{name} failed ({}): {stdout}{stderr}", output.status);
    }
    Ok(stdout)
}
