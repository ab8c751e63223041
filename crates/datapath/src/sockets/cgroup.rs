//! Finds the cgroup for socket translation: the root of the version 2 hierarchy, which contains
//! every process.

use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, fstatfs, statfs};
use rustix::fs::{Access, AtFlags, Mode, OFlags, accessat, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use tracing::{info, warn};

/// The mount point of the version 2 hierarchy, and the subdirectory of its mount next to version 1.
const USUAL: &str = "/sys/fs/cgroup";
const BESIDE_V1: &str = "unified";

/// The mount point of the host's hierarchy in containers of kpx's manifests.
const OF_HOST: &str = "/host/cgroup";

/// A file in every cgroup except the root.
const NOT_ROOT: &str = "cgroup.type";

/// A directory of the hierarchy, held open.
#[derive(Debug)]
pub struct Cgroup {
    dir: OwnedFd,
    name: String,
}

impl Cgroup {
    /// Opens the cgroup that the operator gives, or the host's root cgroup at its usual mount
    /// points. Returns an error if no hierarchy is mounted there.
    pub fn find(given: Option<&Path>) -> Result<Self> {
        let given = given.or_else(|| is_mounted(Path::new(OF_HOST)).then_some(Path::new(OF_HOST)));
        if let Some(path) = given {
            let this = Self::at(&hierarchy(path))?;
            if !this.is_root() {
                info!(cgroup = %this, "not the root: only sockets of processes below it are served");
            }
            return Ok(this);
        }
        let this = Self::at(&hierarchy(Path::new(USUAL)))?;
        this.ensure_root()?;
        Ok(this)
    }

    /// Opens the cgroup like [`Self::find`]. If the root is not mounted, mounts it invisibly to
    /// other processes. Call this before giving up capabilities: mounting requires CAP_SYS_ADMIN.
    pub fn find_or_mount(given: Option<&Path>) -> Result<Self> {
        let found = Self::find(given);
        if found.is_ok() || given.is_some() {
            return found;
        }
        let this = Self::mount().context(
            "the root of cgroup2 is not mounted at its usual place, and this kpx may not mount it: into a container mount the \
             host's, and name it by --cgroup-root",
        )?;
        this.ensure_root()?;
        warn!("cgroup2 is not mounted at its usual place: kpx has mounted it for itself");
        Ok(this)
    }

    fn ensure_root(&self) -> Result<()> {
        ensure!(
            self.is_root(),
            "this process is in a cgroup namespace of its own, where the root is not the host's: mount the host's \
             cgroup2 file system into the container, and name it by --cgroup-root"
        );
        Ok(())
    }

    fn at(path: &Path) -> Result<Self> {
        let dir = File::open(path).with_context(|| format!("open {}", path.display()))?;
        let kind = fstatfs(&dir)
            .with_context(|| format!("read the file system type of {}", path.display()))?;
        let is_cgroup2 = kind.filesystem_type() == CGROUP2_SUPER_MAGIC;
        ensure!(
            is_cgroup2,
            "{} is not a cgroup of version 2",
            path.display()
        );
        Ok(Self {
            dir: dir.into(),
            name: path.display().to_string(),
        })
    }

    /// Mounts the hierarchy without a path. The mount disappears with its last open descriptor.
    fn mount() -> Result<Self> {
        let fs = fsopen("cgroup2", FsOpenFlags::FSOPEN_CLOEXEC).context("open cgroup2")?;
        fsconfig_create(&fs).context("make a cgroup2 file system")?;
        let flags = MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC
            | MountAttrFlags::MOUNT_ATTR_RDONLY;
        let mounted =
            fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, flags).context("mount cgroup2")?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir =
            openat(&mounted, ".", flags, Mode::empty()).context("open the root of cgroup2")?;
        Ok(Self {
            dir,
            name: "root (mounted by kpx)".to_owned(),
        })
    }

    pub(super) fn try_clone(&self) -> Result<Self> {
        let dir = self
            .dir
            .try_clone()
            .with_context(|| format!("open the cgroup {self} again"))?;
        Ok(Self {
            dir,
            name: self.name.clone(),
        })
    }

    fn is_root(&self) -> bool {
        accessat(&self.dir, NOT_ROOT, Access::EXISTS, AtFlags::empty()).is_err()
    }
}

impl AsFd for Cgroup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

impl fmt::Display for Cgroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Returns the directory of version 2, given a mount point that may contain both versions.
fn hierarchy(path: &Path) -> PathBuf {
    let beside = path.join(BESIDE_V1);
    if !is_cgroup2(path) && is_cgroup2(&beside) {
        beside
    } else {
        path.to_owned()
    }
}

fn is_mounted(path: &Path) -> bool {
    is_cgroup2(&hierarchy(path))
}

fn is_cgroup2(path: &Path) -> bool {
    statfs(path).is_ok_and(|fs| fs.filesystem_type() == CGROUP2_SUPER_MAGIC)
}
