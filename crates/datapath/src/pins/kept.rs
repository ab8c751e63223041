//! Holds the pinned maps open, to pin them again after another program removes the pins or unmounts
//! their file system: only pinned maps outlive the agent.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use aya::maps::MapData;

use super::bpf_fs::{MOUNT_POINT, is_on_bpf_fs};
use super::{Pins, names, trust};

pub(crate) struct KeptMaps(Vec<(PathBuf, MapData)>);

impl KeptMaps {
    pub(crate) fn open(pins: &Pins) -> Result<Self> {
        let mut kept = Vec::new();
        for dir in [pins.maps(), pins.slow()] {
            for name in names(&dir)? {
                let path = dir.join(name);
                let map = MapData::from_pin(&path)
                    .with_context(|| format!("open the pinned map {}", path.display()))?;
                kept.push((path, map));
            }
        }
        Ok(Self(kept))
    }

    /// Restores missing pins. Returns their number.
    pub(crate) fn restore(&self) -> Result<u64> {
        let gone: Vec<_> = self.0.iter().filter(|(path, _)| !path.exists()).collect();
        if gone.is_empty() {
            return Ok(0);
        }
        for (path, map) in &gone {
            map.pin(path)
                .with_context(|| format!("pin the map {}", path.display()))?;
        }
        Ok(gone.len() as u64)
    }
}

impl Pins {
    /// Creates missing directories again. Returns an error if the BPF file system is unmounted.
    pub(crate) fn reopen(&self) -> Result<()> {
        let dirs = [self.maps(), self.links(), self.slow()];
        if dirs.iter().all(|dir| dir.exists()) {
            return Ok(());
        }
        let root = self.dir.parent().context("a folder of layouts")?;
        ensure!(
            is_on_bpf_fs(root)?,
            "the BPF file system with {} was unmounted: when this agent exits, its programs and maps are removed and \
             open connections end. `mount -t bpf -o mode=0700 bpf {MOUNT_POINT}` lets it pin them again",
            root.display()
        );
        fs::create_dir_all(root).with_context(|| format!("create {}", root.display()))?;
        trust(root)?;
        fs::set_permissions(root, Permissions::from_mode(0o700))
            .with_context(|| format!("close {}", root.display()))?;
        for dir in dirs {
            fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        }
        self.check_netns()
    }
}
