//! A test's own cgroup, which holds this process while the value lives. Programs attached there
//! handle only this process's sockets.

use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{fs, io};

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

/// The mount points of the version 2 hierarchy: alone, next to version 1, and by this module.
const MOUNTED: [&str; 3] = [
    "/sys/fs/cgroup",
    "/sys/fs/cgroup/unified",
    "/run/kpx-test-cgroup2",
];
/// Writing 0 moves the writing process.
const PROCS: &str = "cgroup.procs";

#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    /// The previous cgroup of this process.
    before: PathBuf,
    /// Serialises tests: the kernel moves a process with all threads, including other tests'.
    _alone: MutexGuard<'static, ()>,
}

impl Cgroup {
    /// Moves this process with every thread. Waits until other tests have left.
    pub fn enter() -> Result<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let (root, before) = places()?;
        let this = Self {
            path: root.join(format!("kpx-test-{}", std::process::id())),
            before,
            _alone,
        };
        fs::create_dir_all(&this.path)
            .with_context(|| format!("create {}", this.path.display()))?;
        join(&this.path)?;
        Ok(this)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A cgroup that holds this process temporarily. It is removed with this value.
#[derive(Debug)]
pub struct Visited {
    path: PathBuf,
    before: PathBuf,
}

impl Visited {
    pub fn make() -> Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let (root, _) = places()?;
        let nth = MADE.fetch_add(1, Ordering::Relaxed);
        Self::at(root.join(format!("kpx-visited-{}-{nth}", std::process::id())))
    }

    fn at(path: PathBuf) -> Result<Self> {
        let (_, before) = places()?;
        fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
        Ok(Self { path, before })
    }

    /// Creates a child cgroup with any name.
    pub fn within(&self, name: &str) -> Result<Self> {
        Self::at(self.path.join(name))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Calls `f` while this process is in the cgroup with every thread. Sockets created in `f`
    /// belong to the cgroup permanently.
    pub fn visit<T>(&self, f: impl FnOnce() -> T) -> Result<T> {
        join(&self.path)?;
        let done = f();
        join(&self.before)?;
        Ok(done)
    }
}

/// Kubelet's folders for pods' cgroups, removed with this value including the pods' cgroups.
#[derive(Debug)]
pub struct Kubepods {
    path: PathBuf,
}

impl Kubepods {
    /// Creates the folders in a test's own cgroup.
    pub fn make(within: &Cgroup) -> Result<Self> {
        let path = within.path().join("kubepods");
        fs::create_dir_all(path.join("burstable"))
            .with_context(|| format!("create {}", path.display()))?;
        Ok(Self { path })
    }

    /// Creates the cgroup of a pod.
    pub fn pod(&self, uid: &str) -> Result<Visited> {
        Visited::at(self.path.join(format!("burstable/pod{uid}")))
    }
}

impl Drop for Kubepods {
    fn drop(&mut self) {
        if let Err(error) = remove_all(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "cgroup is left over");
        }
    }
}

/// A pod's cgroup that holds single threads: the thread that entered, and threads that it starts.
/// It is below this process's cgroup, where programs at the hierarchy's root apply.
#[derive(Debug)]
pub struct PodThread {
    kubepods: PathBuf,
    before: PathBuf,
    /// Only the thread that entered can leave.
    _here: PhantomData<*const ()>,
}

impl PodThread {
    pub fn enter(uid: &str) -> Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let (_, before) = places()?;
        let stem = format!(
            "kpx{}x{}-kubepods",
            std::process::id(),
            MADE.fetch_add(1, Ordering::Relaxed)
        );
        let kubepods = before.join(format!("{stem}.slice"));
        let pod = kubepods.join(format!("{stem}-pod{}.slice", uid.replace('-', "_")));
        fs::create_dir_all(&pod).with_context(|| format!("create {}", pod.display()))?;
        for cgroup in [&kubepods, &pod] {
            let of_threads = fs::write(cgroup.join("cgroup.type"), "threaded");
            of_threads.with_context(|| format!("make {} hold threads", cgroup.display()))?;
        }
        join_thread(&pod)?;
        Ok(Self {
            kubepods,
            before,
            _here: PhantomData,
        })
    }
}

impl Drop for PodThread {
    fn drop(&mut self) {
        let left = join_thread(&self.before).and_then(|()| Ok(remove_all(&self.kubepods)?));
        if let Err(error) = left {
            tracing::warn!(%error, path = %self.kubepods.display(), "cgroup is left over");
        }
    }
}

fn join_thread(cgroup: &Path) -> Result<()> {
    fs::write(cgroup.join("cgroup.threads"), "0")
        .with_context(|| format!("join {}", cgroup.display()))
}

/// Removes a cgroup and its descendants, which must be empty.
fn remove_all(cgroup: &Path) -> io::Result<()> {
    for entry in fs::read_dir(cgroup)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_all(&entry.path())?;
        }
    }
    fs::remove_dir(cgroup)
}

impl Drop for Visited {
    fn drop(&mut self) {
        if let Err(error) = remove_all(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "cgroup is left over");
        }
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let left = join(&self.before).and_then(|()| Ok(fs::remove_dir(&self.path)?));
        if let Err(error) = left {
            tracing::warn!(%error, path = %self.path.display(), "cgroup is left over");
        }
    }
}

/// Returns the root of the hierarchy, and this process's cgroup.
fn places() -> Result<(PathBuf, PathBuf)> {
    let root = root()?;
    let all = fs::read_to_string("/proc/self/cgroup").context("read this process's cgroups")?;
    let before = all
        .lines()
        .find_map(|line| line.strip_prefix("0::/"))
        .context("no cgroup of version 2")?;
    let before = root.join(before);
    Ok((root, before))
}

fn join(cgroup: &Path) -> Result<()> {
    fs::write(cgroup.join(PROCS), "0").with_context(|| format!("join {}", cgroup.display()))
}

fn root() -> Result<PathBuf> {
    for path in MOUNTED {
        if statfs(path).is_ok_and(|fs| fs.filesystem_type() == CGROUP2_SUPER_MAGIC) {
            return Ok(path.into());
        }
    }
    let own = MOUNTED[MOUNTED.len() - 1];
    fs::create_dir_all(own).with_context(|| format!("create {own}"))?;
    let mounted = mount(
        Some("cgroup2"),
        own,
        Some("cgroup2"),
        MsFlags::empty(),
        None::<&str>,
    );
    mounted.with_context(|| format!("mount {own}"))?;
    Ok(own.into())
}
