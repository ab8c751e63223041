//! Gathers the licenses of the crates in kpx, whose texts belong to every copy.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use super::sbom::Linked;

/// The file in archive, image and package.
pub(super) const NAME: &str = "THIRD-PARTY-LICENSES";

const PREFACE: &str =
    "kpx is linked with the crates below, with the Rust standard library (MIT OR Apache-2.0) and with the GNU C
library (LGPL-2.1-or-later). A number in brackets is that of a text at the end, as the crate has it.
";

/// Returns the licenses of what `cargo metadata` says is linked, with the texts of their files.
pub(super) fn texts(metadata: &Value) -> Result<String> {
    let linked = Linked::of(metadata)?;
    let is_of_others = |package: &&&Value| !package["source"].is_null();
    let (mut list, mut numbers, mut texts) = (PREFACE.to_owned(), BTreeMap::new(), String::new());
    let mut packages: Vec<_> = linked.packages.values().filter(is_of_others).collect();
    packages.sort_by_key(|package| (package["name"].as_str(), package["version"].as_str()));
    for package in packages {
        let text = |field: &str| package[field].as_str().unwrap_or_default();
        let folder = Path::new(text("manifest_path")).parent().context("a manifest is in a folder")?;
        let mut marks = String::new();
        for found in files(folder)? {
            let next = numbers.len() + 1;
            let number = *numbers.entry(found.clone()).or_insert(next);
            if number == next {
                write!(texts, "\n==== [{number}]\n\n{}\n", found.trim_end())?;
            }
            write!(marks, " [{number}]")?;
        }
        write!(list, "\n{} {}: {}{marks}", text("name"), text("version"), text("license"))?;
    }
    Ok(list + "\n" + &texts)
}

/// Returns the texts of a crate's license files, by the files' names.
fn files(folder: &Path) -> Result<Vec<String>> {
    const BEGINNINGS: [&str; 5] = ["license", "licence", "copying", "copyright", "notice"];
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        if path.is_file() && BEGINNINGS.iter().any(|beginning| name.starts_with(beginning)) {
            paths.push(path);
        }
    }
    paths.sort();
    let read = |path: &std::path::PathBuf| {
        let bytes = fs::read(path).with_context(|| format!("read {}", path.display()))?;
        Ok(String::from_utf8_lossy(&bytes).replace("\r\n", "\n"))
    };
    paths.iter().map(read).collect()
}
