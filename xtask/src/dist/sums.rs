//! Checksums in the format of `sha256sum --check`.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

pub(crate) const NAME: &str = "SHA256SUMS";

/// Returns the digest in lower-case hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

pub(crate) fn write(folder: &Path, names: &[String]) -> Result<()> {
    let mut names = names.to_vec();
    names.sort();
    let lines = names.iter().map(|name| {
        let bytes = fs::read(folder.join(name)).with_context(|| format!("read {name}"))?;
        Ok(format!("{}  {name}\n", sha256(&bytes)))
    });
    fs::write(folder.join(NAME), lines.collect::<Result<String>>()?)
        .with_context(|| format!("write {NAME}"))
}

/// Reads all listed files, checks their sums, and returns their names and sizes in bytes.
pub(crate) fn verify(folder: &Path) -> Result<Vec<(String, usize)>> {
    let text = fs::read_to_string(folder.join(NAME)).with_context(|| format!("read {NAME}"))?;
    let lines = text.lines().map(|line| {
        let (sum, name) = line
            .split_once("  ")
            .with_context(|| format!("{NAME}: {line:?}"))?;
        let bytes = fs::read(folder.join(name)).with_context(|| format!("read {name}"))?;
        ensure!(sha256(&bytes) == sum, "{name} is not what {NAME} says");
        Ok((name.to_owned(), bytes.len()))
    });
    lines.collect()
}
