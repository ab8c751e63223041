//! Collects the license texts of kpx's crates, which every copy must include.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

/// The file name in archive, image and package.
pub(super) const NAME: &str = "THIRD-PARTY-LICENSES";

const PREFACE: &str =
    "kpx is linked with the crates below, with the Rust standard library (MIT OR Apache-2.0) and with the GNU C
library (LGPL-2.1-or-later). A number in brackets is that of a text at the end, as the crate has it. Some crates bring no text.
";

/// The remark for a crate without license text.
pub(super) const NO_TEXT: &str = " (the crate brings no text)";

/// Returns the licenses of third-party crates in the bill, with the texts of their files, located
/// by cargo's metadata.
pub(super) fn texts(bill: &Value, metadata: &Value) -> Result<String> {
    let components = bill["components"].as_array().into_iter().flatten();
    let linked: BTreeSet<_> = components.map(key).collect();
    let is_meant =
        |package: &&Value| !package["source"].is_null() && linked.contains(&key(package));
    let all = metadata["packages"].as_array().into_iter().flatten();
    let mut list = PREFACE.to_owned();
    let mut numbers = BTreeMap::new();
    let mut texts = String::new();
    let mut packages: Vec<_> = all.filter(is_meant).collect();
    packages.sort_by_key(|package| key(package));
    for package in packages {
        let text = |field: &str| package[field].as_str().unwrap_or_default();
        let folder = Path::new(text("manifest_path"))
            .parent()
            .context("a manifest is in a folder")?;
        let mut marks = String::new();
        for found in files(folder)? {
            let next = numbers.len() + 1;
            let number = *numbers.entry(found.clone()).or_insert(next);
            if number == next {
                write!(texts, "\n==== [{number}]\n\n{}\n", found.trim_end())?;
            }
            write!(marks, " [{number}]")?;
        }
        if marks.is_empty() {
            marks.push_str(NO_TEXT);
        }
        write!(
            list,
            "\n{} {}: {}{marks}",
            text("name"),
            text("version"),
            text("license")
        )?;
    }
    Ok(list + "\n" + &texts)
}

/// Returns the name and the version of a component or a package.
fn key(package: &Value) -> (Option<&str>, Option<&str>) {
    (package["name"].as_str(), package["version"].as_str())
}

/// Returns the texts of a crate's license files, sorted by file name. Also searches the directory
/// `LICENSES`.
fn files(folder: &Path) -> Result<Vec<String>> {
    const BEGINNINGS: [&str; 5] = ["license", "licence", "copying", "copyright", "notice"];
    let entries = |folder: &Path| -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))?;
        Ok(entries
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<Result<_, _>>()?)
    };
    let mut paths = Vec::new();
    let below = folder.join("LICENSES");
    for path in entries(folder)? {
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .to_lowercase();
        if path.is_file()
            && BEGINNINGS
                .iter()
                .any(|beginning| name.starts_with(beginning))
        {
            paths.push(path);
        }
    }
    if below.is_dir() {
        paths.extend(entries(&below)?.into_iter().filter(|path| path.is_file()));
    }
    paths.sort();
    let read = |path: &PathBuf| {
        let bytes = fs::read(path).with_context(|| format!("read {}", path.display()))?;
        Ok(String::from_utf8_lossy(&bytes).replace("\r\n", "\n"))
    };
    paths.iter().map(read).collect()
}
