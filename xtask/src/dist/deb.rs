//! Builds the Debian package with cargo-deb, and checks its content.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tar::Archive;

use crate::arch::Arch;
use crate::cargo_tool::cargo_tool;
use crate::step::quiet;
use crate::{shell, workspace};

const CARGO_DEB_VERSION: &str = "3.8.0";

/// Writes the package with the staged files; `time` is in seconds since 1970.
pub(super) fn pack(package: &Path, arch: Arch, time: u64) -> Result<()> {
    let mut cargo = cargo_tool("deb", CARGO_DEB_VERSION)?;
    cargo.args([
        "--package",
        "proxy-agent",
        "--no-build",
        "--no-strip",
        "--output",
    ]);
    cargo
        .arg(package)
        .env("SOURCE_DATE_EPOCH", time.to_string());
    if !arch.is_native() {
        cargo.args(["--target", &arch.triple()]);
    }
    quiet("pack for Debian", [cargo])
}

/// Checks that a package has the architecture, and the staged files at the paths that systemd and
/// shells use.
pub(super) fn look_into(package: &Path, arch: Arch, version: &str, stage: &Path) -> Result<()> {
    if shell::which("dpkg-deb").is_none() {
        eprintln!(
            "warning: no dpkg-deb here, so nothing has looked into {}",
            package.display()
        );
        return Ok(());
    }
    let name = package.to_string_lossy();
    let ask = |arguments: &[&str]| -> Result<Vec<u8>> {
        let output = Command::new("dpkg-deb")
            .args(arguments)
            .output()
            .context("run dpkg-deb")?;
        let reported = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "dpkg-deb {}: {reported}",
            arguments.join(" ")
        );
        Ok(output.stdout)
    };
    let field = |field: &str| {
        Ok::<_, anyhow::Error>(
            String::from_utf8(ask(&["--field", &name, field])?)?
                .trim()
                .to_owned(),
        )
    };
    let found = field("Architecture")?;
    let wanted = arch.go_name();
    ensure!(found == wanted, "{name} is for {found} instead of {wanted}");
    let found = field("Version")?;
    ensure!(
        found.split('-').next() == Some(version),
        "{name} has the version {found} instead of {version}"
    );
    let entries = read(&ask(&["--fsys-tarfile", &name])?)?;
    let entry = |path: &str| {
        entries
            .get(path)
            .with_context(|| format!("{name} has no {path}"))
    };
    ensure!(
        *entry("usr/bin/kpx")? == fs::read(stage.join("bin/kpx"))?,
        "{name} holds another kpx"
    );
    ensure!(
        entry("usr/bin/kubectl-kpx")? == b"kpx",
        "kubectl-kpx of {name} is no link to kpx"
    );
    let unit = entry("usr/lib/systemd/system/kpx.service")
        .or_else(|_| entry("lib/systemd/system/kpx.service"))?;
    ensure!(
        *unit == fs::read(workspace::root().join("deploy/systemd/kpx.service"))?,
        "{name} holds another unit"
    );
    [
        "etc/kpx/config.yaml",
        "etc/kpx/kpx.env",
        "usr/share/bash-completion/completions/kpx",
    ]
    .iter()
    .try_for_each(|path| entry(path).map(drop))
}

/// Reads files with their content, and links with their target, from a tar archive.
fn read(tar: &[u8]) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut archive = Archive::new(tar);
    let mut entries = BTreeMap::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry
            .path()?
            .to_string_lossy()
            .trim_start_matches("./")
            .to_owned();
        let mut content = Vec::new();
        match entry.link_name_bytes() {
            Some(target) => content.extend_from_slice(&target),
            None => drop(entry.read_to_end(&mut content)?),
        }
        entries.insert(path, content);
    }
    Ok(entries)
}
