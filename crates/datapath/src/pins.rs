//! Keeps maps and links pinned in a directory of a BPF file system after the agent exits. The
//! programs keep serving, and the next agent takes the pins over. The directory for each layout of
//! the maps:
//!
//! ```text
//!   v2/netns                        -> net:[…], the network namespace that all this serves
//!   v2/maps/<name>
//!   v2/maps/<name>-<max entries>    a map that is about to replace <name>: see `resize`
//!   v2/links/<ifindex>-<hook>       TCX only: a filter of clsact stays with its qdisc
//!   v2/links/socket-<call>          of the cgroup's root; socket-sock_ops for events
//!   v2/slow/<map id>                the array of a load: see `slow_path`
//! ```
//!
//! In a container without the host's BPF file system the directory disappears with the container:
//! see `orphans`.

mod bpf_fs;
mod kept;
pub(crate) mod orphans;
mod resize;
pub(crate) mod retired;

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use aya::maps::MapInfo;
use aya_obj::{EbpfSectionKind, Object};
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::geteuid;
use proxy_common::layout::LAYOUT;
use proxy_common::names;

use super::loaded::may_open_by_id;
use super::sizes::MapSize;
use super::sockets::{self, translates};
use bpf_fs::is_on_bpf_fs;
pub use bpf_fs::{BpfFs, ensure_bpf_fs};
pub(crate) use kept::KeptMaps;
use proxy_net as net;
pub(super) use resize::Resize;

/// The default directory of the pins.
pub const BPF_DIR: &str = "/sys/fs/bpf/kpx";

/// The symbolic link that names the network namespace, next to `maps` and `links`.
const NETNS: &str = "netns";

/// The directory of the pins, locked while this value lives.
#[derive(Debug)]
pub struct Pins {
    dir: PathBuf,
    bpf_fs: BpfFs,
    may_open_by_id: bool,
    _lock: Flock<File>,
}

impl Pins {
    /// Opens or creates the directory. Returns an error if another kpx instance uses it, or if its
    /// content cannot be taken over. `bpf_fs` is the result of [`ensure_bpf_fs`].
    pub fn open(root: &Path, bpf_fs: BpfFs) -> Result<Self> {
        fs::create_dir_all(root).with_context(|| format!("create {}", root.display()))?;
        trust(root)?;
        let dir = root.join(format!("v{LAYOUT}"));
        let this = Self {
            _lock: lock(root)?,
            dir,
            bpf_fs,
            may_open_by_id: may_open_by_id(),
        };
        let foreign = names(root)?
            .into_iter()
            .find(|name| Some(name.as_ref()) != this.dir.file_name());
        if let Some(name) = foreign {
            ensure!(
                is_layout(&name),
                "{}/{name} is not kpx's: give kpx a --bpf-dir of its own",
                root.display()
            );
            bail!(
                "{}/{name} belongs to another version of kpx; this version takes over layout v{LAYOUT} only: start that version again, or remove its state with `kpx cleanup --bpf-dir {}`",
                root.display(),
                root.display()
            );
        }
        // Any process that can open the directory can lock it. Restrict access only when the
        // directory is known to be kpx's.
        let closed = fs::set_permissions(root, Permissions::from_mode(0o700));
        closed.with_context(|| format!("restrict access to {}", root.display()))?;
        for dir in [this.maps(), this.links(), this.slow()] {
            fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        }
        this.check_netns()?;
        Ok(this)
    }

    /// Returns true if the directory disappears with this container and is invisible to other
    /// containers.
    pub fn is_ours_alone(&self) -> bool {
        self.bpf_fs == BpfFs::Container
    }

    /// Returns true if the directory outlives containers.
    pub(super) fn are_of_host(&self) -> bool {
        self.bpf_fs == BpfFs::Host
    }

    /// Returns true if a predecessor has left maps but no links of devices: its programs are clsact
    /// filters, which the next agent takes over unchanged.
    pub(super) fn are_of_filters(&self) -> Result<bool> {
        let mut links = names(&self.links())?;
        links.retain(|pin| !sockets::is_pin(pin));
        Ok(self.has_maps()? && links.is_empty())
    }

    /// Returns true if the directory's lifetime is unknown.
    pub(super) fn is_of_unknown_owner(&self) -> bool {
        self.bpf_fs == BpfFs::Unknown
    }

    /// Returns true if this process could open objects by id when it opened the directory, before
    /// it gave up privileges. The next start has the same privileges if it is started in the same
    /// way.
    pub fn may_open_by_id(&self) -> bool {
        self.may_open_by_id
    }

    /// Returns the directory of the maps' pins below `root`.
    pub fn maps_in(root: &Path) -> PathBuf {
        root.join(format!("v{LAYOUT}")).join("maps")
    }

    pub(super) fn links(&self) -> PathBuf {
        self.dir.join("links")
    }

    /// Returns the directory of the arrays through which programs call the slow path.
    pub(super) fn slow(&self) -> PathBuf {
        self.dir.join("slow")
    }

    pub(super) fn maps(&self) -> PathBuf {
        self.dir.join("maps")
    }

    /// Removes the pins of maps that no program uses.
    pub(super) fn remove_maps(&self, unused: &[&str]) -> Result<()> {
        let pins = names(&self.maps())?;
        let is_unused = |pin: &&String| {
            pin.split('-')
                .next()
                .is_some_and(|name| unused.contains(&name))
        };
        pins.iter()
            .filter(is_unused)
            .try_for_each(|pin| remove_pin(&self.maps().join(pin)))
    }

    /// Checks the network namespace, because interface indexes are valid only in their namespace.
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

    /// Plans where to open or create each map of the object that outlives the agent. Returns an
    /// error if an existing map does not match. `size` overrides the object's sizes.
    pub(super) fn plan(
        &self,
        object: &[u8],
        sizes: &BTreeMap<&str, MapSize>,
    ) -> Result<Vec<PinPath>> {
        let pin_path = |want: Definition| {
            let size = sizes.get(want.name.as_str()).copied();
            self.pin_path(&want, size.unwrap_or(MapSize::exactly(want.max_entries)))
        };
        definitions(object)?.into_iter().map(pin_path).collect()
    }

    fn pin_path(&self, want: &Definition, size: MapSize) -> Result<PinPath> {
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
                "{} is not a map of this version of kpx: {is} instead of {want}. `kpx cleanup` removes it, with all flows",
                found.display()
            );
            there.push((is.max_entries, found));
        }
        let entries = size.beside(there.iter().map(|(entries, _)| *entries));
        let fits = there
            .iter()
            .position(|(has, _)| *has == entries)
            .map(|at| there.remove(at).1);
        let target = match fits {
            Some(fits) => fits,
            None if there.is_empty() => path.clone(),
            None => self.maps().join(format!("{}-{entries}", want.name)),
        };
        let sources = there.into_iter().map(|(_, found)| found).collect();
        Ok(PinPath {
            name: want.name.clone(),
            entries,
            path,
            target,
            sources,
        })
    }
}

#[derive(Debug)]
pub(super) struct PinPath {
    pub(super) name: String,
    pub(super) entries: u32,
    path: PathBuf,
    /// The current path of the map, or the path at which to create it.
    pub(super) target: PathBuf,
    /// The paths of maps with other sizes that this map replaces.
    sources: Vec<PathBuf>,
}

/// The properties of a map that programs depend on.
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
        let info = MapInfo::from_pin(path)
            .with_context(|| format!("open the pinned map {}", path.display()))?;
        Self::of_map(name, &info).with_context(|| format!("map {}", path.display()))
    }

    fn of_map(name: &str, info: &MapInfo) -> Result<Self> {
        Ok(Self {
            name: name.to_owned(),
            map_type: info.map_type().context("read its type")? as u32,
            key_size: info.key_size(),
            value_size: info.value_size(),
            flags: info.map_flags(),
            max_entries: info.max_entries(),
        })
    }

    fn fits(&self, want: &Self) -> bool {
        Self {
            max_entries: want.max_entries,
            ..self.clone()
        } == *want
    }
}

impl std::fmt::Display for Definition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            map_type,
            key_size,
            value_size,
            flags,
            ..
        } = self;
        write!(
            f,
            "type {map_type}, {key_size} bytes of key, {value_size} of value, flags {flags:#x}"
        )
    }
}

/// Returns the maps of an object that outlive the agent, by name.
pub(super) fn definitions(object: &[u8]) -> Result<Vec<Definition>> {
    let object = Object::parse(object).context("read the BPF object")?;
    let of_programs = object.maps.iter().filter(|(_, map)| {
        !matches!(
            map.section_kind(),
            EbpfSectionKind::Data | EbpfSectionKind::Rodata | EbpfSectionKind::Bss
        )
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

/// Removes the pins of every layout: links first, so that every program keeps all its maps. Reports
/// each removed pin, even if the next removal fails. The kernel frees an object with its last user.
pub fn remove(root: &Path, removed: &mut dyn FnMut(String)) -> Result<()> {
    if !root.exists() {
        return Ok(());
    }
    trust(root)?;
    let (layouts, others): (Vec<_>, Vec<_>) =
        names(root)?.into_iter().partition(|name| is_layout(name));
    for layout in layouts {
        let dir = root.join(&layout);
        // Ingress goes before egress: otherwise flows would open without translation of their
        // replies.
        let mut links = names(&dir.join("links"))?;
        // For the same reason, programs that translate `connect` are detached first.
        links.sort_by_key(|name| !name.ends_with("ingress") && !translates(name));
        for link in links {
            remove_pin(&dir.join("links").join(&link))?;
            removed(format!("the link {link}, pinned in {}", dir.display()));
        }
        let maps = names(&dir.join("maps"))?;
        maps.iter()
            .try_for_each(|name| remove_pin(&dir.join("maps").join(name)))?;
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

/// Returns true for the directory of a layout. kpx does not remove other content.
fn is_layout(name: &str) -> bool {
    name.strip_prefix('v')
        .is_some_and(|number| number.parse::<u32>().is_ok())
}

pub(super) fn remove_pin(path: &Path) -> Result<()> {
    fs::remove_file(path).with_context(|| format!("remove the pin {}", path.display()))
}

/// Locks a directory of pins against other kpx processes while the result lives. Returns `None` if
/// there is no such directory.
pub fn lock_if_there(root: &Path) -> Result<Option<Flock<File>>> {
    if !root.exists() {
        return Ok(None);
    }
    trust(root)?;
    lock(root).map(Some)
}

/// Returns an error unless only this user can have written to the directory. On a BPF file system
/// mounted without a mode, any user can create the directory and put links to other places in it.
/// The operator may also have given another directory.
fn trust(root: &Path) -> Result<()> {
    let metadata =
        fs::symlink_metadata(root).with_context(|| format!("look at {}", root.display()))?;
    ensure!(
        metadata.is_dir() && metadata.uid() == geteuid().as_raw() && metadata.mode() & 0o022 == 0,
        "{} is not a folder that only this user may write",
        root.display()
    );
    ensure!(
        is_on_bpf_fs(root)?,
        "{} is not in a BPF file system",
        root.display()
    );
    Ok(())
}

fn lock(root: &Path) -> Result<Flock<File>> {
    let file = File::open(root).with_context(|| format!("open {}", root.display()))?;
    let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno);
    lock.with_context(|| format!("another kpx is using {}", root.display()))
}

/// Returns an error if a directory of pins serves another network namespace, where its devices and
/// filters are.
pub fn check_netns(root: &Path) -> Result<()> {
    let ours = net::namespace()?;
    for layout in names(root)? {
        let dir = root.join(layout);
        // An interrupted start leaves no such link.
        let Ok(theirs) = fs::read_link(dir.join(NETNS)) else {
            continue;
        };
        ensure!(
            ours == theirs,
            "{} serves another network namespace, {}: clean up there, or use --force if that namespace no longer exists",
            dir.display(),
            theirs.display()
        );
    }
    Ok(())
}

/// Returns the names in a directory, sorted; empty if there is no such directory.
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
