//! Makes the documentation site of the tree's pages with mdBook, and checks its links. No text has a
//! copy in the tree: `site/SUMMARY.md` orders the pages.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::home::Home;
use crate::step::{quiet, step};
use crate::{cargo_tool, shell, workspace};

const MDBOOK: (&str, &str) = ("mdbook", "0.5.4");
const HYPERLINK: (&str, &str) = ("hyperlink", "0.3.2");
/// The folder of the book's settings and of its order. Its own pages are no pages of the site.
const FOLDER: &str = "site/";

/// Makes the site below `target/site`, in a folder of this version.
pub(crate) fn run() -> Result<()> {
    let site = make(&Home::read()?)?;
    println!("{}", site.join("index.html").display());
    Ok(())
}

/// Makes the site, and returns its folder.
pub(crate) fn make(home: &Home) -> Result<PathBuf> {
    // mdBook's server and its watch of files would triple what is compiled.
    let search_only = ["--no-default-features", "--features=search"];
    let mdbook = cargo_tool::install(MDBOOK.0, MDBOOK.1, &search_only)?;
    let hyperlink = cargo_tool::install(HYPERLINK.0, HYPERLINK.1, &[])?;
    let target = workspace::target_dir()?;
    let (book, site) = (target.join("tmp/book"), target.join("site"));
    for old in [&book, &site] {
        if old.exists() {
            fs::remove_dir_all(old).with_context(|| format!("remove {}", old.display()))?;
        }
    }
    let source = book.join("src");
    let version = env!("CARGO_PKG_VERSION");
    let pages = site.join(version);
    step("collect the pages", || {
        collect(workspace::root(), &source)?;
        home.complete_page(&source, version)
    })?;
    let from = |name: &str| workspace::root().join(FOLDER).join(name);
    fs::copy(from("book.toml"), book.join("book.toml")).context("copy book.toml")?;
    fs::copy(from("SUMMARY.md"), source.join("SUMMARY.md")).context("copy SUMMARY.md")?;
    let mut build = Command::new(mdbook);
    build.arg("build").arg("--dest-dir").arg(&pages).arg(&book);
    build.env("MDBOOK_BOOK__TITLE", format!("kpx {version}"));
    if !home.repository.is_empty() {
        build.env("MDBOOK_OUTPUT__HTML__GIT_REPOSITORY_URL", &home.repository);
    }
    let mut check = Command::new(hyperlink);
    check.arg(&pages).arg("--check-anchors");
    check.arg("--sources").arg(&source);
    quiet("make the site", [build])?;
    quiet("check the links", [check])?;
    fs::write(site.join(ROOT), root_page(version)).context("write the page above the versions")?;
    Ok(pages)
}

/// The page above the folders of all versions.
pub(crate) const ROOT: &str = "index.html";

/// Returns the page that leads to this version, which is the newest one when it is published.
fn root_page(version: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>kpx</title>\n\
         <meta http-equiv=\"refresh\" content=\"0; url={version}/\">\n\
         <p><a href=\"{version}/\">kpx {version}</a></p>\n</html>\n"
    )
}

/// Copies the pages of a tree, and the files to which they lead.
fn collect(root: &Path, to: &Path) -> Result<()> {
    let pages = pages(root)?;
    let summary = fs::read_to_string(root.join(FOLDER).join("SUMMARY.md"))?;
    let listed: BTreeSet<_> = links(&summary).map(str::to_owned).collect();
    let missing: Vec<_> = pages.difference(&listed).collect();
    ensure!(
        missing.is_empty(),
        "site/SUMMARY.md lacks the pages {missing:?}"
    );
    let mut files = pages.clone();
    for page in &pages {
        let text = fs::read_to_string(root.join(page)).with_context(|| format!("read {page}"))?;
        let folder = Path::new(page).parent().unwrap_or(Path::new(""));
        for link in links(&text) {
            let target = plain(&folder.join(link));
            // A broken link stays for the checker, which names its page and its line.
            if root.join(&target).is_file() {
                files.insert(target.to_string_lossy().into_owned());
            }
        }
    }
    for file in files {
        let copy = to.join(&file);
        fs::create_dir_all(copy.parent().unwrap_or(to))?;
        fs::copy(root.join(&file), &copy).with_context(|| format!("copy {file}"))?;
    }
    Ok(())
}

/// Returns the paths of all pages that git tracks.
fn pages(root: &Path) -> Result<BTreeSet<String>> {
    let list = shell::git(root, &["ls-files", "*.md"]).context("ask git for the pages")?;
    Ok(list
        .lines()
        .filter(|path| !path.starts_with(FOLDER) && !path.starts_with('.'))
        .map(str::to_owned)
        .collect())
}

/// Returns the relative links of a page, without anchors.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split([')', '#']).next())
        .filter(|link| !link.is_empty() && !link.contains("://"))
}

/// Resolves `..` in a relative path.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path {
        if part == ".." {
            plain.pop();
        } else {
            plain.push(part);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_of_the_tree_is_in_the_site() {
        let folder = tempfile::tempdir().unwrap();
        collect(workspace::root(), folder.path()).unwrap();
        for file in ["README.md", "docs/install.md", "docs/web-page/services.png"] {
            assert!(folder.path().join(file).is_file(), "{file}");
        }
        assert!(!folder.path().join("xtask/src/main.rs").exists());
    }

    #[test]
    fn a_forgotten_page_and_a_linked_file_are_found() {
        let tree = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = tree.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("README.md", "[a](docs/a.md#b), [it](https://kpx.invalid/)");
        put("docs/a.md", "![picture](../b/c.png)");
        put("b/c.png", "");
        put("b/d.png", "");
        put("site/SUMMARY.md", "- [kpx](README.md)");
        let git = |words: &[&str]| {
            let mut git = Command::new("git");
            git.arg("-C").arg(tree.path()).args(words);
            shell::run(git).unwrap();
        };
        git(&["init", "--quiet"]);
        git(&["add", "."]);
        let copy = tempfile::tempdir().unwrap();
        let error = collect(tree.path(), copy.path()).unwrap_err().to_string();
        assert!(error.contains("docs/a.md"), "{error}");
        put("site/SUMMARY.md", "- [kpx](README.md)\n- [a](docs/a.md)");
        collect(tree.path(), copy.path()).unwrap();
        let has = |path: &str| copy.path().join(path).exists();
        assert!(has("README.md") && has("docs/a.md") && has("b/c.png"));
        assert!(!has("b/d.png"), "no page leads to it");
    }
}
