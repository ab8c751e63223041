//! The documents of a release: how krew installs `kubectl kpx`, and from what the files were made.

use std::fs;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::arch::Arch;
use crate::dist::{Release, sums};
use crate::home::Home;
use crate::{shell, workspace};

/// Writes the manifest of krew's plugin, and returns its name.
pub(super) fn krew(release: &Release, home: &Home, made: &[String]) -> Result<String> {
    let mut platforms = Vec::new();
    for arch in [Arch::Amd64, Arch::Arm64] {
        let archive = release.plugin_file(arch);
        if made.contains(&archive) {
            let bytes = fs::read(release.folder.join(&archive))?;
            platforms.push(json!({
                "selector": { "matchLabels": { "os": "linux", "arch": arch.go_name() } },
                "uri": home.download(release.version, &archive),
                "sha256": sums::sha256(&bytes),
                "files": [{ "from": "*", "to": "." }],
                "bin": "kubectl-kpx",
            }));
        }
    }
    let manifest = json!({
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": { "name": "kpx" },
        "spec": {
            "version": format!("v{}", release.version),
            "homepage": home.page(release.version, "docs/kubectl.md"),
            "shortDescription": "Ask kpx, a kube-proxy replacement, on all nodes",
            "description": "Shows state, Services, events and traffic of kpx on every node of a cluster, and tests its \
                connectivity. The cluster's nodes run kpx.",
            "platforms": platforms,
        },
    });
    let name = "kpx.yaml".to_owned();
    // JSON is YAML.
    let text = serde_json::to_string_pretty(&manifest)? + "\n";
    fs::write(release.folder.join(&name), text)?;
    Ok(name)
}

/// Writes the provenance of the files (in-toto Statement, SLSA provenance v1), and returns its name.
pub(super) fn provenance(release: &Release, home: &Home, made: &[String]) -> Result<String> {
    let subjects = made.iter().map(|name| {
        let bytes = fs::read(release.folder.join(name)).with_context(|| format!("read {name}"))?;
        Ok(json!({ "name": name, "digest": { "sha256": sums::sha256(&bytes) } }))
    });
    let subjects = subjects.collect::<Result<Vec<Value>>>()?;
    let commit =
        shell::git(workspace::root(), &["rev-parse", "HEAD"]).context("ask git for the commit")?;
    let lock = fs::read(workspace::root().join("Cargo.lock")).context("read Cargo.lock")?;
    let rustc = shell::output("rustc", &["-vV"]).context("ask rustc for its version")?;
    let repository = &home.repository;
    let statement = json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": format!("{repository}/xtask/release"),
                "externalParameters": { "version": release.version },
                "internalParameters": { "SOURCE_DATE_EPOCH": release.time, "rustc": rustc.trim() },
                "resolvedDependencies": [
                    { "uri": format!("git+{repository}"), "digest": { "gitCommit": commit.trim() } },
                    { "name": "Cargo.lock", "digest": { "sha256": sums::sha256(&lock) } },
                ],
            },
            "runDetails": { "builder": { "id": format!("{repository}/xtask") } },
        },
    });
    let name = format!("kpx-{}.intoto.json", release.version);
    let text = serde_json::to_string_pretty(&statement)? + "\n";
    fs::write(release.folder.join(&name), text)?;
    Ok(name)
}
