//! Records the changes to this host that outlive kpx's devices and do not show their owner. kpx
//! writes the record in the run directory before each change, so that a later start can revert it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::{ports, sysctl};

#[derive(Clone, Debug)]
pub struct Changes {
    path: PathBuf,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct List {
    /// The boot id. A list from an earlier boot is ignored.
    boot_id: String,
    sysctls: BTreeMap<String, Sysctl>,
    /// The source ports that kpx reserved, in the kernel's format.
    reserved_ports: String,
    /// The interface indexes of the devices that got a clsact qdisc.
    qdiscs: BTreeSet<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Sysctl {
    before: String,
    set: String,
}

/// The values that another program sets for kernel parameters, by path below `/proc/sys/net`.
pub type Wanted = BTreeMap<&'static str, String>;

/// The result of reverting a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Undo {
    Removed(String),
    /// The change that stays, and why.
    Left(String),
}

impl Changes {
    pub fn new(run_dir: &Path) -> Self {
        Self {
            path: run_dir.join("changes.json"),
        }
    }

    /// Sets a kernel parameter if its value differs.
    pub fn set_sysctl(&self, key: &str, value: &str) -> Result<()> {
        let now =
            sysctl::read(key)?.with_context(|| format!("the kernel has no sysctl net/{key}"))?;
        if now == value {
            return Ok(());
        }
        let earlier = self.read()?.sysctls.remove(key);
        // The recorded value is from before the first change by any kpx instance.
        let before = earlier
            .as_ref()
            .map_or(now, |earlier| earlier.before.clone());
        self.note_sysctl(
            key,
            Some(Sysctl {
                before,
                set: value.to_owned(),
            }),
        )?;
        let written = sysctl::write(key, value);
        if written.is_err() {
            self.note_sysctl(key, earlier)?;
        }
        written
    }

    fn note_sysctl(&self, key: &str, sysctl: Option<Sysctl>) -> Result<()> {
        self.update(|list| {
            list.sysctls.remove(key);
            list.sysctls
                .extend(sysctl.map(|sysctl| (key.to_owned(), sysctl)));
        })
    }

    /// Reserves the source ports that the programs use, so the kernel does not assign them to
    /// sockets. Returns false if all these ports were already reserved.
    pub fn reserve_ports(&self) -> Result<bool> {
        let missing = ports::missing()?;
        if missing.is_empty() {
            return Ok(false);
        }
        let earlier = self.read()?.reserved_ports;
        let all = ports::parse(&earlier)?.union(&missing).copied().collect();
        self.update(|list| list.reserved_ports = ports::text(&all))?;
        ports::reserve(&missing).map(|()| true)
    }

    /// Records a qdisc. Call this before adding clsact to a device. Returns false if the device is
    /// already recorded.
    pub fn begin_qdisc(&self, ifindex: u32) -> Result<bool> {
        let mut is_new = false;
        if !self.read()?.qdiscs.contains(&ifindex) {
            self.update(|list| is_new = list.qdiscs.insert(ifindex))?;
        }
        Ok(is_new)
    }

    /// Removes the record of a device that already had a qdisc.
    pub fn forget_qdisc(&self, ifindex: u32) -> Result<()> {
        self.update(|list| {
            list.qdiscs.remove(&ifindex);
        })
    }

    /// Removes the records of devices that are gone.
    pub fn keep_qdiscs(&self, is_there: impl Fn(u32) -> bool) -> Result<()> {
        let gone: Vec<u32> = self
            .read()?
            .qdiscs
            .into_iter()
            .filter(|ifindex| !is_there(*ifindex))
            .collect();
        if gone.is_empty() {
            return Ok(());
        }
        self.update(|list| list.qdiscs.retain(|ifindex| !gone.contains(ifindex)))
    }

    /// Returns the devices that got a clsact qdisc.
    pub fn qdiscs(&self) -> Result<BTreeSet<u32>> {
        Ok(self.read()?.qdiscs)
    }

    /// Reverts the parameters that still have kpx's value, calls `done` for each, and empties the
    /// list. Parameters in `wanted` keep the value that another program sets.
    pub fn undo(&self, wanted: &Wanted, done: &mut dyn FnMut(Undo)) -> Result<()> {
        let list = self.read()?;
        for (key, Sysctl { before, set }) in &list.sysctls {
            if sysctl::read(key)?.as_ref() != Some(set) {
                continue;
            }
            if wanted.get(key.as_str()) == Some(set) {
                done(Undo::Left(format!(
                    "sysctl net/{key} is {set}, as kube-proxy wants it"
                )));
                continue;
            }
            sysctl::write(key, before)?;
            done(Undo::Removed(format!(
                "the value {set} of sysctl net/{key}, which is {before} again"
            )));
        }
        let ours = ports::parse(&list.reserved_ports)?;
        if !ours.is_empty() {
            ports::release(&ours)?;
            done(Undo::Removed(format!(
                "{} from the reserved ports",
                list.reserved_ports
            )));
        }
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).with_context(|| format!("remove {}", self.path.display()))
            }
            _ => Ok(()),
        }
    }

    fn read(&self) -> Result<List> {
        let boot_id = boot_id()?;
        let list = match fs::read(&self.path) {
            Ok(text) => serde_json::from_slice(&text)
                .with_context(|| format!("read {}", self.path.display()))?,
            Err(error) if error.kind() == ErrorKind::NotFound => List::default(),
            Err(error) => {
                return Err(error).with_context(|| format!("read {}", self.path.display()));
            }
        };
        Ok(if list.boot_id == boot_id {
            list
        } else {
            List {
                boot_id,
                ..List::default()
            }
        })
    }

    /// Replaces the file atomically: a crash leaves the old list or the new list.
    fn update(&self, change: impl FnOnce(&mut List)) -> Result<()> {
        let mut list = self.read()?;
        change(&mut list);
        let new = self.path.with_extension("json.new");
        let text = serde_json::to_vec_pretty(&list).context("write the list of changes")?;
        fs::write(&new, text).with_context(|| format!("write {}", new.display()))?;
        fs::rename(&new, &self.path).with_context(|| format!("write {}", self.path.display()))
    }
}

fn boot_id() -> Result<String> {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").context("read the boot's id")?;
    Ok(id.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_reverts_no_file_outside_sysctls() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        fs::write(&victim, "kept").unwrap();
        let to_root = "../".repeat(4);
        for key in [
            victim.display().to_string(),
            format!("{to_root}{}", victim.display()),
        ] {
            let changes = Changes::new(dir.path());
            let sysctl = Sysctl {
                before: "lost".to_owned(),
                set: "kept".to_owned(),
            };
            changes.note_sysctl(&key, Some(sysctl)).unwrap();
            let mut done = Vec::new();
            let error = changes
                .undo(&Wanted::new(), &mut |undo| done.push(undo))
                .unwrap_err();
            assert!(
                error.to_string().contains("is not a sysctl below net"),
                "{error:#}"
            );
            assert_eq!(
                (fs::read_to_string(&victim).unwrap().as_str(), done),
                ("kept", vec![]),
                "{key}"
            );
            fs::remove_file(dir.path().join("changes.json")).unwrap();
        }
    }
}
