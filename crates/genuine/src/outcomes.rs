//! Outcomes of test runs, kept outside the checkout to compare proxies in clusters of one shape.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::parts;
use crate::state::State;

/// Keeps the outcomes of a test with the cluster's proxy.
pub(crate) fn write(state: &State, test: &str, outcomes: &impl Serialize) -> Result<()> {
    let path = path(state, test)?;
    fs::write(&path, serde_json::to_vec_pretty(outcomes)?)
        .with_context(|| format!("write {}", path.display()))
}

/// Returns the kept outcomes of a test with the cluster's proxy.
pub(crate) fn own<T: Default + DeserializeOwned>(state: &State, test: &str) -> Result<T> {
    let path = path(state, test)?;
    if path.exists() {
        read(&path)
    } else {
        Ok(T::default())
    }
}

/// Returns the kept outcomes of a test with other proxies, by their names.
pub(crate) fn of_others<T: DeserializeOwned>(
    state: &State,
    test: &str,
) -> Result<Vec<(String, T)>> {
    let folder = folder(state, test)?;
    let mut all = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))? {
        let path = entry.context("read the earlier outcomes")?.path();
        let proxy = path.file_stem().unwrap_or_default().to_string_lossy();
        if proxy != state.proxy {
            all.push((proxy.into_owned(), read(&path)?));
        }
    }
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(all)
}

fn path(state: &State, test: &str) -> Result<PathBuf> {
    Ok(folder(state, test)?.join(format!("{}.json", state.proxy)))
}

/// Returns the folder of a test's outcomes in clusters of this shape.
fn folder(state: &State, test: &str) -> Result<PathBuf> {
    let folder = parts::cache()?.join("outcomes").join(format!(
        "{}-{}-{}-nodes/{test}",
        state.kubernetes,
        state.cni,
        state.nodes.len()
    ));
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    Ok(folder)
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = fs::read(path).with_context(|| format!("read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("read {}", path.display()))
}
