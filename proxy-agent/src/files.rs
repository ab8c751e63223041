//! Watches the configuration files for changes.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use notify::{EventKind, RecursiveMode, Watcher as _};
use tokio::sync::Notify;
use tokio::time::timeout;
use tracing::warn;

/// The time between two reads without an inotify event. A node may have no free inotify instance,
/// and inotify follows only a single link.
const INTERVAL: Duration = Duration::from_secs(10);

/// The files with the content that was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Files(Vec<(PathBuf, String)>);

impl Files {
    pub(crate) fn read(&mut self, path: &Path) -> Result<&str> {
        let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        self.0.push((path.to_owned(), text));
        Ok(self
            .0
            .last()
            .map(|(_, text)| text.as_str())
            .unwrap_or_default())
    }

    pub(crate) fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        self.0.iter().map(|(path, _)| path)
    }

    pub(crate) fn names(&self) -> String {
        let names: Vec<_> = self
            .0
            .iter()
            .map(|(path, _)| path.display().to_string())
            .collect();
        if names.is_empty() {
            "flags".to_owned()
        } else {
            names.join(", ")
        }
    }

    /// Waits until a file changes or becomes unreadable, and returns a text that names the file.
    /// Only a different content is a change, also for a remounted ConfigMap.
    pub async fn changed(&self) -> String {
        if self.0.is_empty() {
            return std::future::pending().await;
        }
        let woken = Arc::new(Notify::new());
        let watcher = self.watch(&woken);
        if let Err(error) = &watcher {
            warn!(
                error = format!("{error:#}"),
                "the configuration is polled, because it cannot be watched"
            );
        }
        loop {
            if let Some(change) = self.0.iter().find_map(change) {
                return change;
            }
            let _ = timeout(INTERVAL, woken.notified()).await;
        }
    }

    /// Watches directories instead of files: editors replace files, and a ConfigMap's file is a
    /// link through the link `..data`, which the kubelet replaces.
    fn watch(&self, woken: &Arc<Notify>) -> Result<notify::RecommendedWatcher> {
        let wakes = Arc::clone(woken);
        let mut watcher =
            notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
                // The agent's own reads cause access events.
                if !event.is_ok_and(|event| matches!(event.kind, EventKind::Access(_))) {
                    wakes.notify_one();
                }
            })
            .context("watch the configuration")?;
        for (path, _) in &self.0 {
            let target = fs::canonicalize(path).unwrap_or_else(|_| path.clone());
            for file in [path, &target] {
                let folder = match file.parent() {
                    Some(folder) if folder != Path::new("") => folder,
                    _ => Path::new("."),
                };
                watcher
                    .watch(folder, RecursiveMode::NonRecursive)
                    .with_context(|| format!("watch {}", folder.display()))?;
            }
        }
        Ok(watcher)
    }
}

fn change((path, was): &(PathBuf, String)) -> Option<String> {
    match fs::read_to_string(path) {
        Ok(text) if text == *was => None,
        Ok(_) => Some(format!("{} has changed", path.display())),
        Err(error) => Some(format!("{} is no longer readable: {error}", path.display())),
    }
}
