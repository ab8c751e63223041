//! The size and shape of the tree in figures, each with its limit.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::imports::Graph;
use super::prose::{Prose, SENTENCE_WORDS};
use super::source::{File, Tree};
use crate::workspace;

const CRATE_LINES: usize = 17_400;
const CIRCLE_FILES: usize = 9;
/// The crates with a limit of their own.
const CRATE_LINES_OF: &[(&str, usize)] = &[("lab-tools", 19_200), ("proxy-agent", 17_500), ("tests", 29_100)];
/// The kernel programs are one program: the skb, the headers and the maps meet in the trait of the address family.
const CIRCLE_FILES_OF: &[(&str, usize)] = &[("proxy-ebpf", 33)];
const LEVELS: usize = 12;
/// One for each helper that takes a pointer, or that the bindings call unsafe all the same.
const UNSAFE_SITES: usize = 72;
/// Eight of them speak WebSocket, for commands in pods.
const PACKAGES: usize = 443;
const TEST_EXECUTABLES: usize = 8;
/// The packages, with those that begin like them, that the pure core does without.
const IMPURE: [&str; 4] = ["aya", "kube", "tokio", "hyper"];
/// The share of comment lines that may break a rule of prose.
const PROSE: f64 = 0.01;

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

/// Measures the tree, prints each figure and returns those above their limits.
pub(super) fn print(root: &Path, tree: &Tree) -> Result<Vec<String>> {
    let mut figures = Vec::new();
    for sources in crates(root)? {
        figures.extend(of_crate(tree, &sources));
    }
    let kernel = tree.files.iter().filter(|file| file.path.starts_with("proxy-ebpf/"));
    let sites = kernel.map(unsafe_sites).sum();
    figures.push(Figure::limited("proxy-ebpf: unsafe sites", sites, UNSAFE_SITES, ""));
    figures.extend(of_prose(root, tree)?);
    let lock = fs::read_to_string(root.join("Cargo.lock")).context("read Cargo.lock")?;
    let packages = lock.lines().filter(|line| *line == "[[package]]").count();
    figures.push(Figure::limited("Cargo.lock: packages", packages, PACKAGES, ""));
    let mut executables = 0;
    for manifest in ["tests/Cargo.toml", "lab-tools/Cargo.toml"] {
        let text = fs::read_to_string(root.join(manifest)).with_context(|| format!("read {manifest}"))?;
        executables += text.lines().filter(|line| *line == "[[test]]").count();
    }
    figures.push(Figure::limited("tests, lab-tools: test executables", executables, TEST_EXECUTABLES, ""));
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
        Figure::limited(&format!("{name}: lines"), lines, limit(CRATE_LINES_OF, name, CRATE_LINES), ""),
        Figure::limited(
            &format!("{name}: files in a circle"),
            shape.circle.len(),
            limit(CIRCLE_FILES_OF, name, CIRCLE_FILES),
            &shape.circle.join(" "),
        ),
        Figure::limited(&format!("{name}: levels of imports"), shape.levels, LEVELS, ""),
    ]
}

fn limit(own: &[(&str, usize)], name: &str, usual: usize) -> usize {
    own.iter().find(|(crate_name, _)| *crate_name == name).map_or(usual, |(_, limit)| *limit)
}

fn of_prose(root: &Path, tree: &Tree) -> Result<[Figure; 3]> {
    let mut prose = Prose::default();
    for file in &tree.files {
        let text = fs::read_to_string(root.join(&file.path)).with_context(|| format!("read {}", file.path))?;
        prose.read(&file.path, &text);
    }
    let (share, breaches) = (prose.share(), prose.breaches.len());
    let listed: String = prose.breaches.iter().map(|breach| format!("\n  {breach}")).collect();
    let text =
        format!("{:<44} {:>6.2}%  of {:.0}%", "comment lines that break a rule of prose", share * 100.0, PROSE * 100.0);
    let excess =
        (share > PROSE).then(|| format!("{breaches} of {} comment lines break a rule of prose:{listed}", prose.lines));
    Ok([
        Figure::plain("comment lines", prose.lines),
        Figure { text, excess },
        Figure::plain(&format!("sentences over {SENTENCE_WORDS} words, of {}", prose.sentences), prose.long_sentences),
    ])
}

/// Counts blocks, functions, implementations and attributes that say `unsafe`.
fn unsafe_sites(file: &File) -> usize {
    file.tokens.iter().filter(|token| token.text == "unsafe").count()
}
