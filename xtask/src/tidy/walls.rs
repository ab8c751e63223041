//! The walls between crates: their permitted dependencies. Each crate's manifest must match this
//! list.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::Violation;
use crate::workspace;

/// kpx's crates, with their dependencies in the workspace and on crates that do I/O.
const USES: &[(&str, &[&str])] = &[
    ("proxy-common", &["aya"]),
    (
        "proxy-ebpf",
        &["aya-ebpf", "aya-log-ebpf", "proxy-common", "proxy-macros"],
    ),
    ("proxy-macros", &[]),
    ("proxy-core", &["proxy-common"]),
    ("proxy-net", &["proxy-common", "rtnetlink", "tokio"]),
    (
        "proxy-datapath",
        &[
            "aya",
            "aya-log",
            "aya-obj",
            "proxy-common",
            "proxy-core",
            "proxy-net",
            "tokio",
        ],
    ),
    ("proxy-source", &["kube", "proxy-core", "tokio"]),
    (
        "proxy-metrics",
        &["proxy-common", "proxy-core", "proxy-source"],
    ),
    ("proxy-dns", &["proxy-core", "tokio"]),
    // The crates that query an agent, and do not depend on it.
    (
        "proxy-view",
        &[
            "proxy-common",
            "proxy-core",
            "proxy-datapath",
            "proxy-metrics",
            "tokio",
        ],
    ),
    (
        "proxy-trace",
        &[
            "aya",
            "proxy-common",
            "proxy-core",
            "proxy-datapath",
            "proxy-net",
            "proxy-source",
            "proxy-view",
            "rtnetlink",
            "tokio",
        ],
    ),
    (
        "proxy-cluster",
        &[
            "kube",
            "proxy-common",
            "proxy-net",
            "proxy-source",
            "proxy-view",
            "tokio",
        ],
    ),
    (
        "proxy-check",
        &[
            "aya",
            "proxy-common",
            "proxy-datapath",
            "proxy-net",
            "proxy-source",
            "proxy-view",
            "tokio",
        ],
    ),
    // The agent's crate.
    (
        "proxy-agent",
        &[
            "aya",
            "axum",
            "proxy-check",
            "proxy-cluster",
            "proxy-common",
            "proxy-core",
            "proxy-datapath",
            "proxy-dns",
            "proxy-metrics",
            "proxy-net",
            "proxy-source",
            "proxy-trace",
            "proxy-view",
            "rtnetlink",
            "tokio",
        ],
    ),
];

/// The third-party crates that do I/O.
const OUTSIDE: &[&str] = &["aya", "axum", "kube", "rtnetlink", "tokio"];

/// The prefixes of packages that the pure core must not have.
const IMPURE: [&str; 4] = ["aya", "kube", "tokio", "hyper"];

/// Returns the dependencies that are missing in the list or in the manifest.
pub(super) fn check(root: &Path) -> Result<Vec<Violation>> {
    let mut violations = Vec::new();
    for (name, uses) in USES {
        let path = manifest(root, name);
        let manifest =
            fs::read_to_string(root.join(&path)).with_context(|| format!("read {path}"))?;
        violations.extend(breaches(&path, &manifest, uses));
    }
    Ok(violations)
}

/// Returns the path of a crate's manifest: at the top, or below `crates/`.
fn manifest(root: &Path, name: &str) -> String {
    let top = format!("{name}/Cargo.toml");
    match name.strip_prefix("proxy-") {
        Some(name) if !root.join(&top).exists() => format!("crates/{name}/Cargo.toml"),
        _ => top,
    }
}

/// Returns the impure packages among the pure core's direct and indirect dependencies.
pub(super) fn impure_core() -> Result<Vec<Violation>> {
    let mut cargo = workspace::cargo();
    cargo.args(["tree", "--package", "proxy-core", "--edges", "normal"]);
    cargo.args(["--prefix", "none", "--format", "{p}"]);
    let output = cargo.output().context("run cargo tree")?;
    ensure!(
        output.status.success(),
        "cargo tree failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let tree = String::from_utf8(output.stdout).context("read cargo tree")?;
    ensure!(
        tree.starts_with("proxy-core "),
        "cargo tree does not show proxy-core"
    );
    Ok(impure(&tree)
        .map(|name| Violation {
            path: "crates/core/Cargo.toml".to_owned(),
            line: 1,
            what: format!("depends on {name}"),
            why: "the core is pure: values in, values out",
        })
        .collect())
}

fn impure(tree: &str) -> impl Iterator<Item = &str> {
    let names = tree.lines().filter_map(|line| line.split(' ').next());
    names.filter(|name| {
        IMPURE
            .iter()
            .any(|impure| name == impure || name.starts_with(&format!("{impure}-")))
    })
}

fn breaches(path: &str, manifest: &str, uses: &[&str]) -> Vec<Violation> {
    let broken = |line, what| Violation {
        path: path.to_owned(),
        line,
        what,
        why: "walls hold crates apart: ARCHITECTURE.md, and the list in xtask/src/tidy/walls.rs",
    };
    let found = dependencies(manifest);
    let beyond = found.iter().filter(|(name, _)| !uses.contains(name));
    let mut violations: Vec<_> = beyond
        .map(|(name, line)| broken(*line, format!("uses {name}")))
        .collect();
    let idle = uses
        .iter()
        .filter(|name| !found.iter().any(|(used, _)| used == *name));
    violations.extend(idle.map(|name| broken(1, format!("may use {name}, and does not"))));
    violations
}

/// Returns the dependencies in a manifest that have walls, with their lines.
fn dependencies(manifest: &str) -> Vec<(&str, usize)> {
    let lines = (1..)
        .zip(manifest.lines())
        .skip_while(|(_, line)| *line != "[dependencies]")
        .skip(1);
    let lines = lines.take_while(|(_, line)| !line.starts_with('['));
    let names =
        lines.filter_map(|(number, line)| Some((line.split(['.', ' ', '=']).next()?, number)));
    names.filter(|(name, _)| is_walled(name)).collect()
}

fn is_walled(name: &str) -> bool {
    name.starts_with("proxy-") || name.starts_with("aya-") || OUTSIDE.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_depends_on_no_package_that_reaches_the_world() {
        let tree = "proxy-core v0.1.0\nserde v1.0.0\ntokio-util v0.7.0\nayah v1.0.0\naya v0.14.0";
        assert_eq!(impure(tree).collect::<Vec<_>>(), ["tokio-util", "aya"]);
    }

    #[test]
    fn manifest_keeps_to_the_walls() {
        let manifest = "[package]\nname = \"a\"\n\n[dependencies]\nanyhow.workspace = true\nproxy-view.workspace = true\n\
                        kube = { workspace = true }\n\n[dev-dependencies]\nproxy-agent.workspace = true\n";
        let texts = |uses: &[&str]| -> Vec<_> {
            breaches("a/Cargo.toml", manifest, uses)
                .into_iter()
                .map(|breach| (breach.line, breach.what))
                .collect()
        };
        assert_eq!(texts(&["kube", "proxy-view"]), []);
        assert_eq!(texts(&["proxy-view"]), [(7, "uses kube".to_owned())]);
        assert_eq!(
            texts(&["kube", "proxy-view", "tokio"]),
            [(1, "may use tokio, and does not".to_owned())]
        );
    }

    #[test]
    fn crates_of_this_tree_keep_to_the_walls() {
        let lines: Vec<_> = check(workspace::root())
            .unwrap()
            .iter()
            .map(Violation::to_string)
            .collect();
        assert!(lines.is_empty(), "\n{}\n", lines.join("\n"));
    }
}
