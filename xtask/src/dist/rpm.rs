//! Builds the RPM package with cargo-generate-rpm, from the files of the Debian package.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::arch::Arch;
use crate::cargo_tool::cargo_tool;
use crate::step::quiet;

const CARGO_GENERATE_RPM_VERSION: &str = "0.21.1";

/// Writes the package with the staged files; `time` is in seconds since 1970, `metadata` is
/// cargo's.
pub(super) fn pack(package: &Path, arch: Arch, time: u64, metadata: &Value) -> Result<()> {
    let mut cargo = cargo_tool("generate-rpm", CARGO_GENERATE_RPM_VERSION)?;
    cargo
        .args(["--package", "proxy-agent", "--arch", arch.name()])
        .args(["--target", &arch.triple()])
        .args(["--set-metadata", &assets(metadata)?])
        .arg("--output")
        .arg(package)
        .env("SOURCE_DATE_EPOCH", time.to_string());
    quiet("pack for RPM", [cargo])
}

/// Returns the files of the Debian package as TOML of cargo-generate-rpm, with the unit.
fn assets(metadata: &Value) -> Result<String> {
    let packages = metadata["packages"].as_array().context("packages")?;
    let agent = packages
        .iter()
        .find(|one| one["name"] == "proxy-agent")
        .context("the package proxy-agent")?;
    let deb = &agent["metadata"]["deb"];
    let listed = deb["assets"].as_array().context("files of the package")?;
    let mut toml = String::from(
        "assets = [{ source = \"deploy/systemd/kpx.service\", dest = \"/usr/lib/systemd/system/\", mode = \"644\" }",
    );
    for asset in listed {
        let text = |nth: usize| asset[nth].as_str().context("a file of the package");
        let (source, dest) = (text(0)?.trim_start_matches("../"), format!("/{}", text(1)?));
        // The tool packs no links: a script of the package makes this one.
        if dest == "/usr/bin/kubectl-kpx" {
            continue;
        }
        let configured = deb["conf-files"].as_array().context("conf-files")?;
        let config = if configured.contains(&Value::from(dest.as_str())) {
            ", config = \"noreplace\""
        } else {
            ""
        };
        let mode = text(2)?;
        write!(
            toml,
            ", {{ source = {source:?}, dest = {dest:?}, mode = {mode:?}{config} }}"
        )?;
    }
    Ok(toml + "]")
}
