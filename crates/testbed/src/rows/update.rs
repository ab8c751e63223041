//! Rewrites rows in place if `UPDATE_EXPECT` is set.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{env, fs};

use anyhow::{Context, Result, ensure};

use super::parse::{Row, aligned};
/// The outcomes so far, by file and line; the lock also protects the files.
static OUTCOMES: Mutex<BTreeMap<(String, usize), String>> = Mutex::new(BTreeMap::new());

pub fn is_updating() -> bool {
    env::var_os("UPDATE_EXPECT").is_some()
}

fn outcomes() -> MutexGuard<'static, BTreeMap<(String, usize), String>> {
    OUTCOMES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes a row's outcome, unless an earlier run of the row, such as in the other family, had
/// another outcome.
pub fn record(written: &Row, found: &Row) -> Result<()> {
    let mut outcomes = outcomes();
    let key = (written.file.clone(), written.line);
    let first = outcomes.entry(key).or_insert_with(|| found.to_string());
    ensure!(
        *first == found.to_string(),
        "the row has two outcomes\n  first: {first}\n   then: {found}"
    );
    if written == found {
        return Ok(());
    }
    let path = path_here(&written.file)?;
    let text = fs::read_to_string(&path)?;
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let line = lines
        .get_mut(written.line - 1)
        .context("the file has become shorter")?;
    let is_there = line
        .split('|')
        .nth(1)
        .is_some_and(|packet| packet.trim() == written.packet);
    ensure!(is_there, "the file has changed since it was compiled");
    *line = found.to_string();
    write(&path, &written.file, &lines.join("\n"))
}

/// Aligns a file.
pub fn align(file: &str) -> Result<()> {
    let _outcomes = outcomes();
    let path = path_here(file)?;
    let text = fs::read_to_string(&path)?;
    write(&path, file, &text)
}

fn write(path: &Path, file: &str, text: &str) -> Result<()> {
    let text = aligned(file, text)?;
    fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

/// Returns the path of a rows file on this machine.
fn path_here(file: &str) -> Result<PathBuf> {
    let found = Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .map(|dir| dir.join(file))
        .find(|path| path.exists());
    found.with_context(|| format!("{file} is not here"))
}
