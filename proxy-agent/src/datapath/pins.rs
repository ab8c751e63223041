//! What outlives the agent, in a folder of a BPF file system: packets find their way while no agent runs, and the next
//! one takes over what it finds. Below the folder, for each layout of the maps:
//!
//! ```text
//!   v2/netns                        -> net:[…], the network namespace that all this serves
//!   v2/maps/<name>
//!   v2/maps/<name>-<max entries>    a map that is about to take the place of <name>: see `resize`
//!   v2/links/<ifindex>-<hook>       TCX only: a filter of clsact stays with its qdisc
//!   v2/links/socket-<call>          of the cgroup's root
//! ```
//!
//! In a container without the host's BPF file system the folder goes with the container: see `orphans`.

mod orphans;
mod resize;

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use aya::maps::MapInfo;
use aya_obj::{EbpfSectionKind, Object};
use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use nix::unistd::geteuid;
use proxy_common::layout::LAYOUT;
use proxy_common::names;

use super::sizes::Room;
use crate::net;
pub use orphans::{Orphan, ensure_no_hidden_links, find, may_open_by_id, serves};
pub(super) use resize::Resize;

/// Where pins are, unless the operator says otherwise.
pub const BPF_DIR: &str = "/sys/fs/bpf/kpx";

/// Where BPF file systems are mounted.
const MOUNT_POINT: &str = "/sys/fs/bpf";

/// Beside maps and links.
const NETNS: &str = "netns";

/// The folder of pins, ours alone for as long as this lives.
#[derive(Debug)]
pub struct Pins {
    dir: PathBuf,
    is_ours_alone: bool,
    may_open_by_id: bool,
    _lock: Flock<File>,
}

impl Pins {
    /// Opens the folder, or makes it. An error if another kpx uses it, or if what is in it cannot be taken over.
    /// `is_ours_alone` as [`ensure_bpf_fs`] says.
    pub fn open(root: &Path, is_ours_alone: bool) -> Result<Self> {
        fs::create_dir_all(root).with_context(|| format!("create {}", root.display()))?;
        trust(root)?;
        let dir = root.join(format!("v{LAYOUT}"));
        let this = Self { _lock: lock(root)?, dir, is_ours_alone, may_open_by_id: may_open_by_id() };
        let foreign = names(root)?.into_iter().find(|name| Some(name.as_ref()) != this.dir.file_name());
        if let Some(name) = foreign {
            ensure!(is_layout(&name), "{}/{name} is nothing of kpx's: give kpx a --bpf-dir of its own", root.display());
            bail!(
                "{}/{name} is of another version of kpx, and this one takes over v{LAYOUT} only: start that version \
                 again, or end what it left by `kpx cleanup --bpf-dir {}`",
                root.display(),
                root.display()
            );
        }
        // Who can open the folder can lock it. Not before it is known to be ours.
        let closed = fs::set_permissions(root, Permissions::from_mode(0o700));
        closed.with_context(|| format!("close {} to others", root.display()))?;
        for dir in [this.maps(), this.links()] {
            fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        }
        this.check_netns().map(|()| this)
    }

    /// Nobody else sees the folder, and it goes with this process: in a container that was not given the host's.
    pub fn is_ours_alone(&self) -> bool {
        self.is_ours_alone
    }

    /// As of when it was opened: privileges are given up later. So the next start may, which is started as this one.
    pub fn may_open_by_id(&self) -> bool {
        self.may_open_by_id
    }

    pub(super) fn links(&self) -> PathBuf {
        self.dir.join("links")
    }

    pub(super) fn maps(&self) -> PathBuf {
        self.dir.join("maps")
    }

    /// Interface indexes mean nothing in another network namespace.
    fn check_netns(&self) -> Result<()> {
        let ours = net::namespace()?;
        let path = self.dir.join(NETNS);
        match fs::read_link(&path) {
            Ok(theirs) => ensure!(
                ours == theirs,
                "{} serves another network namespace, {}: give this kpx a --bpf-dir of its own",
                self.dir.display(),
                theirs.display()
            ),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                symlink(&ours, &path).with_context(|| format!("create {}", path.display()))?;
            }
            Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
        }
        Ok(())
    }

    /// Where each map of an object that outlives the agent is to be opened or made. An error if one that is there cannot
    /// be one of ours. `room` is what the agent asks for, in place of what the object says.
    pub(super) fn plan(&self, object: &[u8], room: &BTreeMap<&str, Room>) -> Result<Vec<Place>> {
        let place = |want: Definition| {
            let room = room.get(want.name.as_str()).copied();
            self.place(&want, room.unwrap_or(Room::exactly(want.max_entries)))
        };
        definitions(object)?.into_iter().map(place).collect()
    }

    fn place(&self, want: &Definition, room: Room) -> Result<Place> {
        let path = self.maps().join(&want.name);
        let mut there = Vec::new();
        for name in names(&self.maps())? {
            if name.split('-').next() != Some(&want.name) {
                continue;
            }
            let found = self.maps().join(name);
            let is = Definition::of_pin(&want.name, &found)?;
            ensure!(
                is.fits(want),
                "{} is no map of this kpx: {is} instead of {want}. `kpx cleanup` removes it, with all flows",
                found.display()
            );
            there.push((is.max_entries, found));
        }
        let entries = room.beside(there.iter().map(|(entries, _)| *entries));
        let fits = there.iter().position(|(has, _)| *has == entries).map(|at| there.remove(at).1);
        let target = match fits {
            Some(fits) => fits,
            None if there.is_empty() => path.clone(),
            None => self.maps().join(format!("{}-{entries}", want.name)),
        };
        let sources = there.into_iter().map(|(_, found)| found).collect();
        Ok(Place { name: want.name.clone(), path, target, sources })
    }
}

/// Where a map is pinned.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) name: String,
    path: PathBuf,
    /// Where it is now, or is to be made.
    pub(super) target: PathBuf,
    /// Maps of another size whose entries it takes over.
    sources: Vec<PathBuf>,
}

/// What makes a map the one that programs were built for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Definition {
    name: String,
    map_type: u32,
    key_size: u32,
    value_size: u32,
    flags: u32,
    max_entries: u32,
}

impl Definition {
    fn of_pin(name: &str, path: &Path) -> Result<Self> {
        let info = MapInfo::from_pin(path).with_context(|| format!("open the pinned map {}", path.display()))?;
        Self::of_map(name, &info).with_context(|| format!("map {}", path.display()))
    }

    fn of_map(name: &str, info: &MapInfo) -> Result<Self> {
        Ok(Self {
            name: name.to_owned(),
            map_type: info.map_type().context("ask for its type")? as u32,
            key_size: info.key_size(),
            value_size: info.value_size(),
            flags: info.map_flags(),
            max_entries: info.max_entries(),
        })
    }

    /// All but the room is the same.
    fn fits(&self, want: &Self) -> bool {
        Self { max_entries: want.max_entries, ..self.clone() } == *want
    }
}

impl std::fmt::Display for Definition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { map_type, key_size, value_size, flags, .. } = self;
        write!(f, "type {map_type}, {key_size} bytes of key, {value_size} of value, flags {flags:#x}")
    }
}

/// The maps of an object that outlive the agent, by name.
pub(super) fn definitions(object: &[u8]) -> Result<Vec<Definition>> {
    let object = Object::parse(object).context("read the BPF object")?;
    let of_programs = object.maps.iter().filter(|(_, map)| {
        !matches!(map.section_kind(), EbpfSectionKind::Data | EbpfSectionKind::Rodata | EbpfSectionKind::Bss)
    });
    let mut found: Vec<_> = of_programs
        .filter(|(name, _)| !names::is_per_load(name))
        .map(|(name, map)| Definition {
            name: name.clone(),
            map_type: map.map_type(),
            key_size: map.key_size(),
            value_size: map.value_size(),
            flags: map.map_flags(),
            max_entries: map.max_entries(),
        })
        .collect();
    found.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(found)
}

/// Removes the pins of every layout: links first, so that no program is left with half of its maps. Says each that was
/// removed, also if the next one fails. What is still used lives on until it no longer is.
pub fn remove(root: &Path, removed: &mut dyn FnMut(String)) -> Result<()> {
    if !root.exists() {
        return Ok(());
    }
    trust(root)?;
    let (layouts, others): (Vec<_>, Vec<_>) = names(root)?.into_iter().partition(|name| is_layout(name));
    for layout in layouts {
        let dir = root.join(&layout);
        // Ingress before egress: a flow must not be opened whose replies nobody translates.
        let mut links = names(&dir.join("links"))?;
        links.sort_by_key(|name| !name.ends_with("ingress"));
        for link in links {
            remove_pin(&dir.join("links").join(&link))?;
            removed(format!("the link {link}, pinned in {}", dir.display()));
        }
        let maps = names(&dir.join("maps"))?;
        maps.iter().try_for_each(|name| remove_pin(&dir.join("maps").join(name)))?;
        if !maps.is_empty() {
            removed(format!("{} maps pinned in {}", maps.len(), dir.display()));
        }
        fs::remove_dir_all(&dir).with_context(|| format!("remove {}", dir.display()))?;
    }
    if !others.is_empty() {
        return Ok(());
    }
    match fs::remove_dir(root) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", root.display()))
        }
        _ => Ok(()),
    }
}

/// Whatever else is there is not ours to remove.
fn is_layout(name: &str) -> bool {
    name.strip_prefix('v').is_some_and(|number| number.parse::<u32>().is_ok())
}

pub(super) fn remove_pin(path: &Path) -> Result<()> {
    fs::remove_file(path).with_context(|| format!("remove the pin {}", path.display()))
}

/// Keeps every other kpx from a folder of pins for as long as the result lives. None if there is no such folder.
pub fn lock_if_there(root: &Path) -> Result<Option<Flock<File>>> {
    if !root.exists() {
        return Ok(None);
    }
    trust(root)?;
    lock(root).map(Some)
}

/// An error unless nobody else can have put anything into this folder. Where a BPF file system was mounted without a mode, anybody
/// may have made it, with links to other places in it; and the operator may have named another one.
fn trust(root: &Path) -> Result<()> {
    let metadata = fs::symlink_metadata(root).with_context(|| format!("look at {}", root.display()))?;
    ensure!(
        metadata.is_dir() && metadata.uid() == geteuid().as_raw() && metadata.mode() & 0o022 == 0,
        "{} is no folder into which this user alone may write",
        root.display()
    );
    ensure!(is_on_bpf_fs(root)?, "{} is not in a BPF file system", root.display());
    Ok(())
}

fn lock(root: &Path) -> Result<Flock<File>> {
    let file = File::open(root).with_context(|| format!("open {}", root.display()))?;
    let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno);
    lock.with_context(|| format!("another kpx is using {}", root.display()))
}

/// An error if what is in a folder of pins serves another network namespace: what else belongs to it is there.
pub fn check_netns(root: &Path) -> Result<()> {
    let ours = net::namespace()?;
    for layout in names(root)? {
        let dir = root.join(layout);
        // There is none in half a start.
        let Ok(theirs) = fs::read_link(dir.join(NETNS)) else { continue };
        ensure!(
            ours == theirs,
            "{} serves another network namespace, {}: clean up there, or say --force if there is no such any more",
            dir.display(),
            theirs.display()
        );
    }
    Ok(())
}

/// What is in a folder, in order. Nothing if there is none.
pub(super) fn names(dir: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("list {}", dir.display()))?,
    };
    let mut names = entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<Vec<_>>>()
        .with_context(|| format!("list {}", dir.display()))?;
    names.sort();
    Ok(names)
}

/// Mounts a BPF file system where they are mounted, if nobody has, which takes CAP_SYS_ADMIN. True if it did and nobody
/// else sees it. To be called before capabilities are given up: who lacks one that process 1 has may not ask for that.
pub fn ensure_bpf_fs(root: &Path) -> Result<bool> {
    if is_on_bpf_fs(root)? {
        return Ok(false);
    }
    ensure!(
        root.starts_with(MOUNT_POINT),
        "{} is not in a BPF file system: mount one there, or name a folder below {MOUNT_POINT}",
        root.display()
    );
    // Two that mount at once would hide each other's.
    let place = File::open(MOUNT_POINT).with_context(|| format!("open {MOUNT_POINT}"))?;
    let _lock = Flock::lock(place, FlockArg::LockExclusive)
        .map_err(|(_, errno)| errno)
        .with_context(|| format!("lock {MOUNT_POINT}"))?;
    if is_on_bpf_fs(root)? {
        return Ok(false);
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("bpf"), MOUNT_POINT, Some("bpf"), flags, Some("mode=0700")).with_context(|| {
        format!("no BPF file system is mounted at {MOUNT_POINT}, nor may this kpx mount one: `mount -t bpf -o mode=0700 bpf {MOUNT_POINT}`")
    })?;
    Ok(!is_in_namespaces_of_the_host())
}

/// False in a container, as far as can be told.
fn is_in_namespaces_of_the_host() -> bool {
    /// linux/proc_ns.h: PROC_PID_INIT_INO.
    const INITIAL_PID_NS: &str = "pid:[4026531836]";
    let of = |process: &str, kind: &str| fs::read_link(format!("/proc/{process}/ns/{kind}")).ok();
    let is_first = of("self", "pid").is_some_and(|ns| ns == Path::new(INITIAL_PID_NS));
    is_first && of("1", "mnt").is_some_and(|ns| Some(ns) == of("self", "mnt"))
}

fn is_on_bpf_fs(path: &Path) -> Result<bool> {
    let there =
        path.ancestors().find(|dir| dir.exists()).with_context(|| format!("no folder above {}", path.display()))?;
    let fs = statfs(there).with_context(|| format!("ask for the file system of {}", there.display()))?;
    Ok(fs.filesystem_type() == BPF_FS_MAGIC)
}
