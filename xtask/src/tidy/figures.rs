//! The size and shape of the tree in figures, for readers to judge, and the purity of the core.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::imports::Graph;
use super::prose::{Prose, SENTENCE_WORDS};
use super::source::{File, Tree};
use crate::workspace;

/// The packages, with those that begin like them, that the pure core does without.
const IMPURE: [&str; 4] = ["aya", "kube", "tokio", "hyper"];

/// A figure as it is printed, and what is wrong with it.
pub(super) struct Figure {
    text: String,
    excess: Option<String>,
}

impl Figure {
    fn limited(name: &str, value: usize, limit: usize, detail: &str) -> Self {
        let excess = (value > limit).then(|| format!("{name}: {value}, over {limit} {detail}"));
        Self { text: format!("{name:<44} {value:>7}  of {limit}"), excess }
    }

    fn plain(name: &str, value: usize) -> Self {
        Self { text: format!("{name:<44} {value:>7}"), excess: None }
    }
}

/// Measures the tree, prints each figure and returns what is wrong with them.
pub(super) fn print(root: &Path, tree: &Tree) -> Result<Vec<String>> {
    let mut figures = Vec::new();
    for sources in crates(root)? {
        figures.extend(of_crate(tree, &sources));
    }
    let kernel = tree.files.iter().filter(|file| file.path.starts_with("proxy-ebpf/"));
    let sites = kernel.map(unsafe_sites).sum();
    figures.push(Figure::plain("proxy-ebpf: unsafe sites", sites));
    figures.extend(of_prose(root, tree)?);
    let lock = fs::read_to_string(root.join("Cargo.lock")).context("read Cargo.lock")?;
    let packages = lock.lines().filter(|line| *line == "[[package]]").count();
    figures.push(Figure::plain("Cargo.lock: packages", packages));
    let mut executables = 0;
    for manifest in ["tests/Cargo.toml", "lab-tools/Cargo.toml"] {
        let text = fs::read_to_string(root.join(manifest)).with_context(|| format!("read {manifest}"))?;
        executables += text.lines().filter(|line| *line == "[[test]]").count();
    }
    figures.push(Figure::plain("tests, lab-tools: test executables", executables));
    let impure = impure_dependencies()?;
    figures.push(Figure::limited("proxy-core: impure dependencies", impure.len(), 0, &impure.join(" ")));
    for figure in &figures {
        println!("{}", figure.text);
    }
    Ok(figures.into_iter().filter_map(|figure| figure.excess).collect())
}

/// Returns the packages below the pure core that do more than compute.
fn impure_dependencies() -> Result<Vec<String>> {
    let mut cargo = workspace::cargo();
    cargo.args(["tree", "--package", "proxy-core", "--edges", "normal", "--prefix", "none", "--format", "{p}"]);
    let output = cargo.output().context("run cargo tree")?;
    ensure!(output.status.success(), "cargo tree failed: {}", String::from_utf8_lossy(&output.stderr));
    let tree = String::from_utf8(output.stdout).context("read cargo tree")?;
    ensure!(tree.starts_with("proxy-core "), "cargo tree does not show proxy-core");
    let names = tree.lines().filter_map(|line| line.split(' ').next());
    let is_impure = |name: &&str| IMPURE.iter().any(|impure| name == impure || name.starts_with(&format!("{impure}-")));
    Ok(names.filter(is_impure).map(str::to_owned).collect())
}

/// Returns the directories of sources of the workspace's crates, sorted.
fn crates(root: &Path) -> Result<Vec<String>> {
    let mut crates = Vec::new();
    for entry in fs::read_dir(root).context("read the top of the workspace")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if root.join(&name).join("Cargo.toml").is_file() {
            let has_sources = root.join(&name).join("src").is_dir();
            crates.push(if has_sources { format!("{name}/src") } else { name });
        }
    }
    crates.sort();
    Ok(crates)
}

fn of_crate(tree: &Tree, sources: &str) -> [Figure; 3] {
    let name = sources.trim_end_matches("/src");
    let files = tree.files.iter().filter(|file| file.path.starts_with(&format!("{name}/")));
    let lines = files.map(|file| file.lines).sum();
    let shape = Graph::read(tree, sources).shape();
    [
        Figure::plain(&format!("{name}: lines"), lines),
        Figure::plain(&format!("{name}: files in a circle"), shape.circle.len()),
        Figure::plain(&format!("{name}: levels of imports"), shape.levels),
    ]
}

fn of_prose(root: &Path, tree: &Tree) -> Result<[Figure; 3]> {
    let mut prose = Prose::default();
    for file in &tree.files {
        let text = fs::read_to_string(root.join(&file.path)).with_context(|| format!("read {}", file.path))?;
        prose.read(&file.path, &text);
    }
    Ok([
        Figure::plain("comment lines", prose.lines),
        Figure::plain("comment lines that break a rule of prose", prose.breaches.len()),
        Figure::plain(&format!("sentences over {SENTENCE_WORDS} words, of {}", prose.sentences), prose.long_sentences),
    ])
}

/// Counts blocks, functions, implementations and attributes that say `unsafe`.
fn unsafe_sites(file: &File) -> usize {
    file.tokens.iter().filter(|token| token.text == "unsafe").count()
}
