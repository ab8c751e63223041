//! Lists the crates of kpx and of its kernel programs (a software bill of materials), with
//! cargo-cyclonedx.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::arch::Arch;
use crate::cargo_tool::cargo_tool;
use crate::step::quiet;
use crate::workspace;

const CARGO_CYCLONEDX_VERSION: &str = "0.5.9";
/// The file name of each package's bill, in the package's directory.
const NAME: &str = "kpx-bill";

/// Returns the bill of kpx with its kernel programs. `metadata` is cargo's, `time` is in seconds
/// since 1970.
pub(super) fn bill(metadata: &Value, arch: Arch, time: u64) -> Result<Value> {
    let mut cargo = cargo_tool("cyclonedx", CARGO_CYCLONEDX_VERSION)?;
    cargo
        .args(["--format", "json", "--spec-version", "1.5"])
        .args(["--no-build-deps", "--override-filename", NAME])
        .args(["--target", &arch.triple()])
        .env("SOURCE_DATE_EPOCH", time.to_string());
    quiet("list the crates", [cargo])?;
    let mut bill = read(&workspace::root().join("proxy-agent"))?;
    add(&mut bill, &read(&workspace::root().join("proxy-ebpf"))?)?;
    // cargo-cyclonedx writes a bill for every package of the workspace.
    for package in list(&metadata["packages"]).filter(|package| package["source"].is_null()) {
        let folder = Path::new(package["manifest_path"].as_str().unwrap_or_default())
            .parent()
            .context("a manifest is in a folder")?;
        let _other = fs::remove_file(folder.join(NAME).with_extension("json"));
    }
    let has = |name: &str| list(&bill["components"]).any(|one| one["name"] == name);
    ensure!(
        has("tokio") && has("aya-ebpf"),
        "the bill lacks crates that are linked"
    );
    ensure!(!has("proptest"), "the bill has crates of the tests");
    Ok(bill)
}

/// Adds the kernel programs and their crates to the bill of kpx.
fn add(bill: &mut Value, programs: &Value) -> Result<()> {
    let main = &programs["metadata"]["component"];
    let kpx = bill["metadata"]["component"]["bom-ref"].clone();
    let all = list(&programs["components"]).chain([main]);
    for (field, key, entries) in [
        ("components", "bom-ref", all.collect::<Vec<_>>()),
        (
            "dependencies",
            "ref",
            list(&programs["dependencies"]).collect(),
        ),
    ] {
        let there = bill[field].as_array_mut().context(field)?;
        for entry in entries {
            if !there.iter().any(|one| one[key] == entry[key]) {
                there.push(entry.clone());
            }
        }
    }
    let edges = bill["dependencies"]
        .as_array_mut()
        .context("dependencies")?;
    let edge = edges.iter_mut().find(|edge| edge["ref"] == kpx);
    let on = edge.and_then(|edge| edge["dependsOn"].as_array_mut());
    on.context("kpx depends on crates")?
        .push(main["bom-ref"].clone());
    Ok(())
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Reads the bill of the package in a directory, and makes its paths relative to the workspace.
fn read(folder: &Path) -> Result<Value> {
    let path = folder.join(NAME).with_extension("json");
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let root = workspace::root().to_string_lossy();
    Ok(serde_json::from_str(&text.replace(&*root, ""))?)
}
