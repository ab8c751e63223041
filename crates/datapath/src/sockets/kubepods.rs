//! Finds pods' cgroups by the names that kubelet gives them.
//!
//! The search covers only kubelet's own directories. It ignores all cgroups that a pod creates
//! below its own cgroup.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result};
use proxy_common::socket::PODS_DEPTH;
use rustix::fs::{Dir, FileType, Mode, OFlags, openat};
use rustix::io::Errno;

/// The maximum depth of kubelet's top directory, which has two more levels below it.
const KUBEPODS_DEPTH: u32 = PODS_DEPTH - 2;

/// A level in the hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// Above kubelet's top directory.
    Above,
    /// Kubelet's top directory, which contains the pods of QoS class Guaranteed.
    Kubepods,
    /// The directory of another QoS class.
    Class,
    /// A pod's cgroup, with the pod's UID.
    Pod(Box<str>),
}

impl Place {
    /// Returns the level of a directory; `None` if the directory cannot contain pods' cgroups.
    fn of(name: &str, within: &Self) -> Option<Self> {
        match within {
            Self::Above if is_kubepods(name) => Some(Self::Kubepods),
            // Users and services choose the names of directories below their own.
            Self::Above if name == "user.slice" => None,
            Self::Above => (!name.contains('.') || has_ending(name, &[".slice", ".scope"]))
                .then_some(Self::Above),
            Self::Kubepods if is_class(name) => Some(Self::Class),
            Self::Kubepods | Self::Class => pod_uid(name).map(Self::Pod),
            Self::Pod(_) => None,
        }
    }
}

fn is_kubepods(name: &str) -> bool {
    name == "kubepods" || name == "kubepods.slice" || name.ends_with("-kubepods.slice")
}

fn is_class(name: &str) -> bool {
    let classes = ["besteffort", "burstable"];
    classes.contains(&name) || has_ending(name, &["-besteffort.slice", "-burstable.slice"])
}

/// Returns the UID in the name of a pod's cgroup. Slices have `_` instead of `-`, because `-`
/// separates slices.
fn pod_uid(name: &str) -> Option<Box<str>> {
    let uid = match name.strip_suffix(".slice") {
        Some(slice) => slice.rsplit_once("-pod")?.1.replace('_', "-"),
        None => name.strip_prefix("pod")?.to_owned(),
    };
    let is_uid = !uid.is_empty()
        && uid
            .bytes()
            .all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    is_uid.then(|| uid.into())
}

fn has_ending(name: &str, endings: &[&str]) -> bool {
    endings.iter().any(|ending| name.ends_with(ending))
}

/// Returns the ids of pods' cgroups by pod UID. If several cgroups have the same UID, the highest
/// in the tree is the pod's, because only kubelet creates cgroups there.
pub(super) fn find(root: impl AsFd) -> Result<BTreeMap<Box<str>, u64>> {
    let mut pods = BTreeMap::new();
    // A queue of paths, because a host may have more directories than this process may open files.
    let mut folders = VecDeque::from([(".".to_owned(), Place::Above, 0)]);
    while let Some((path, within, depth)) = folders.pop_front() {
        let folder = match open(&root, &path) {
            Err(Errno::NOENT | Errno::NODEV | Errno::ACCESS) if depth > 0 => continue,
            opened => opened.with_context(|| format!("open the cgroup {path}"))?,
        };
        for entry in Dir::read_from(&folder).context("list cgroups")? {
            let entry = match entry {
                Ok(entry) => entry,
                Err(Errno::NOENT) => break, // The directory is gone.
                Err(error) => return Err(error).context("list cgroups"),
            };
            let Some(name) = entry
                .file_name()
                .to_str()
                .ok()
                .filter(|name| !name.starts_with('.'))
            else {
                continue;
            };
            if entry.file_type() != FileType::Directory {
                continue;
            }
            match Place::of(name, &within) {
                Some(Place::Pod(uid)) => drop(pods.entry(uid).or_insert_with(|| entry.ino())),
                Some(Place::Above) if depth + 1 >= KUBEPODS_DEPTH => {}
                Some(place) => folders.push_back((format!("{path}/{name}"), place, depth + 1)),
                None => {}
            }
        }
    }
    Ok(pods)
}

fn open(within: impl AsFd, name: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(within, name, flags, Mode::empty())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::MetadataExt;

    use nix::sys::resource::{Resource, getrlimit, setrlimit};

    use super::*;

    const UID: &str = "6ad0a8c5-9fd1-4d0b-8f5e-0a1b2c3d4e5f";
    const OTHER: &str = "7be1b9d6-0ae2-4e1c-906f-1b2c3d4e5f60";

    /// Returns the UIDs found in a tree of these directories, with the directory of each.
    fn found(folders: &[&str]) -> Vec<(String, String)> {
        let root = tempfile::tempdir().unwrap();
        folders
            .iter()
            .for_each(|folder| fs::create_dir_all(root.path().join(folder)).unwrap());
        let pods = find(File::open(root.path()).unwrap()).unwrap();
        let folder_of = |id: u64| {
            let is_it =
                |folder: &&&str| fs::metadata(root.path().join(folder)).unwrap().ino() == id;
            folders.iter().find(is_it).unwrap().to_string()
        };
        pods.into_iter()
            .map(|(uid, id)| (uid.into(), folder_of(id)))
            .collect()
    }

    fn is(uid: &str, folder: &str) -> (String, String) {
        (uid.to_owned(), folder.to_owned())
    }

    #[test]
    fn kubelets_folders_name_pods() {
        let slice = |uid: &str| uid.replace('-', "_");
        for folder in [
            format!("kubepods/pod{UID}"),
            format!("kubepods/besteffort/pod{UID}"),
            format!("kubepods/burstable/pod{UID}"),
            format!("kubepods.slice/kubepods-pod{}.slice", slice(UID)),
            format!(
                "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{}.slice",
                slice(UID)
            ),
            format!(
                "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{}.slice",
                slice(UID)
            ),
            format!("system.slice/docker-1.scope/kubelet/kubepods/pod{UID}"),
        ] {
            assert_eq!(found(&[&folder]), [is(UID, &folder)]);
        }
        let hash = "0123456789abcdef0123456789abcdef";
        let folder = format!("kubepods/burstable/pod{hash}");
        assert_eq!(
            found(&[&folder]),
            [is(hash, &folder)],
            "a static pod's uid is a hash"
        );
    }

    /// The host has more directories than a process may open files.
    #[test]
    fn folders_beside_kubelets_need_no_open_files() {
        const SCOPES: usize = 2_000;
        let root = tempfile::tempdir().unwrap();
        for scope in 0..SCOPES {
            fs::create_dir_all(
                root.path()
                    .join(format!("system.slice/crio-conmon-{scope}.scope")),
            )
            .unwrap();
        }
        fs::create_dir_all(root.path().join(format!("kubepods/pod{UID}"))).unwrap();
        let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, 1_024, most).unwrap();
        let pods = find(File::open(root.path()).unwrap()).unwrap();
        assert_eq!(pods.keys().map(AsRef::as_ref).collect::<Vec<_>>(), [UID]);
    }

    /// Cgroups of a pod, and of users and services, do not replace another pod's cgroup.
    #[test]
    fn a_pod_cannot_take_anothers_place() {
        let own = format!("kubepods/burstable/pod{UID}");
        let real = format!("kubepods/burstable/pod{OTHER}");
        for spoofed in [
            format!("{own}/pod{OTHER}"),
            format!("{own}/kubepods/pod{OTHER}"),
            format!(
                "{own}/container/kubepods.slice/kubepods-pod{}.slice",
                OTHER.replace('-', "_")
            ),
        ] {
            assert_eq!(found(&[&own, &spoofed]), [is(UID, &own)], "{spoofed}");
            assert_eq!(
                found(&[&own, &spoofed, &real]),
                [is(UID, &own), is(OTHER, &real)],
                "{spoofed}"
            );
        }
        for folder in [
            format!("user.slice/user-1000.slice/kubepods/pod{UID}"),
            format!("system.slice/any.service/kubepods/pod{UID}"),
            format!("pod{UID}"),
            format!("kubepods/other/pod{UID}"),
            "kubepods/pod".to_owned(),
            "kubepods/podium".to_owned(),
            "kubepods.slice/kubepods-other.slice".to_owned(),
        ] {
            assert_eq!(found(&[&folder]), [], "{folder}");
        }
        let deeper = format!("a/kubepods/pod{UID}");
        let first = format!("kubepods/pod{UID}");
        assert_eq!(found(&[&deeper, &first]), [is(UID, &first)]);
    }
}
