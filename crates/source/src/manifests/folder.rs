//! Lists the files of a folder, and wakes the source when they change.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use std::{fs, io};

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};
use tracing::warn;

use crate::health::{Health, Problem};

/// The manifests of a folder by file name. Equal listings mean unchanged files.
pub(super) type Listing = BTreeMap<OsString, Stamp>;

/// Identifies a version of a file: differs after a write or a replacement. `None` if the file's
/// metadata are unreadable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp(Option<(Id, u64, [i64; 4])>);

type Id = (u64, u64);

/// A folder that is read again after each change.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    woken: Arc<Notify>,
    /// The folder under inotify; its watcher is `None` if inotify failed.
    watched: Option<(Id, Option<SystemTime>, Option<RecommendedWatcher>)>,
    /// Set if a file of the last listing was a symbolic link.
    has_links: bool,
}

/// The quiet time before the folder is read, because editors write in several steps.
const QUIET: Duration = Duration::from_millis(50);
/// The time after which a constantly changing folder is read despite the changes.
const MAX_WAIT: Duration = Duration::from_millis(400);
/// The time between checks for changes that inotify misses: a new folder, and changes behind links.
const INTERVAL: Duration = Duration::from_secs(1);
/// The time between listings without an event: inotify misses changes by another machine in a
/// shared file system, and through another mount of a file.
const RELIST: Duration = Duration::from_secs(10);

impl Folder {
    pub(super) fn new(path: PathBuf) -> Self {
        let mut folder = Self {
            path,
            woken: Arc::new(Notify::new()),
            watched: None,
            has_links: false,
        };
        folder.watch();
        folder
    }

    pub(super) fn list(&mut self) -> io::Result<Listing> {
        let mut listing = Listing::new();
        let mut has_links = false;
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let name = entry.file_name();
            if !is_manifest(&name) {
                continue;
            }
            has_links |= entry.file_type()?.is_symlink();
            let stamp = match fs::metadata(self.path.join(&name)) {
                Ok(meta) if !meta.is_file() => continue,
                Ok(meta) => {
                    let times = [
                        meta.mtime(),
                        meta.mtime_nsec(),
                        meta.ctime(),
                        meta.ctime_nsec(),
                    ];
                    Stamp(Some(((meta.dev(), meta.ino()), meta.len(), times)))
                }
                Err(_) => Stamp(None),
            };
            listing.insert(name, stamp);
        }
        self.has_links = has_links;
        Ok(listing)
    }

    /// Waits until the folder differs from `known` and is quiet. An unreadable folder is a problem.
    pub(super) async fn change(&mut self, known: &Listing, health: &Health) -> Listing {
        let problem = Problem::Folder(self.path.clone());
        let mut relist = Instant::now() + RELIST;
        loop {
            let is_woken = timeout(INTERVAL, self.woken.notified()).await.is_ok();
            let is_watched = self.watch();
            if is_watched && !is_woken && !self.has_links && Instant::now() < relist {
                continue;
            }
            match self.list() {
                Ok(listing) => {
                    relist = Instant::now() + RELIST;
                    health.end(&problem);
                    if listing != *known
                        && let Some(listing) = self.stillness(listing).await
                    {
                        return listing;
                    }
                }
                Err(error) => {
                    relist = Instant::now();
                    health.begin(&problem, error.to_string());
                }
            }
        }
    }

    async fn stillness(&mut self, mut listing: Listing) -> Option<Listing> {
        let deadline = Instant::now() + MAX_WAIT;
        loop {
            sleep(QUIET).await;
            let now = self.list().ok()?;
            if now == listing || Instant::now() > deadline {
                return Some(now);
            }
            listing = now;
        }
    }

    /// Attaches inotify to the folder unless it is attached already. (A new folder may get the old
    /// inode.) Returns true if inotify covered the time since the last check.
    fn watch(&mut self) -> bool {
        let Ok(meta) = fs::metadata(&self.path) else {
            return false;
        };
        let id = (meta.dev(), meta.ino());
        let created = meta.created().ok();
        if let Some(watched) = self
            .watched
            .as_ref()
            .filter(|watched| (watched.0, watched.1) == (id, created))
        {
            return watched.2.is_some();
        }
        let woken = Arc::clone(&self.woken);
        let wake = move |event: notify::Result<notify::Event>| {
            // Reading the folder causes an event as well.
            if !event.is_ok_and(|event| matches!(event.kind, EventKind::Access(_))) {
                woken.notify_one();
            }
        };
        let watcher = notify::recommended_watcher(wake).and_then(|mut watcher| {
            watcher.watch(&self.path, RecursiveMode::NonRecursive)?;
            Ok(watcher)
        });
        let watcher = watcher.inspect_err(
            |error| warn!(%error, folder = %self.path.display(), "the folder cannot be watched and is polled"),
        );
        self.watched = Some((id, created, watcher.ok()));
        false
    }
}

/// Returns true for a manifest: not hidden (`..data` of a mounted ConfigMap, many editors' own
/// files) and not a backup.
fn is_manifest(name: &OsStr) -> bool {
    let known = matches!(
        Path::new(name).extension().and_then(OsStr::to_str),
        Some("yaml" | "yml" | "json")
    );
    known
        && !name.as_encoded_bytes().starts_with(b".")
        && !name.as_encoded_bytes().starts_with(b"#")
}
