//! Builds the guest's initramfs: the tests, kpx, Debian's tools with their libraries, and kernel
//! modules.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::cpio::Archive;
use super::modules::Plan;

/// The directories of the tools and their libraries, at the root or below `usr`.
const FOLDERS: &[&str] = &["bin", "sbin", "lib", "lib64"];
/// The directories therein that no tool needs: converters between encodings, half of all bytes.
const LEFT_OUT: &[&str] = &["gconv"];
/// The content of /etc/protocols, from which the tools read protocol names.
const PROTOCOLS: &[u8] = b"tcp 6 TCP\nudp 17 UDP\nsctp 132 SCTP\n";

/// The files that do not depend on the kernel.
pub(super) struct Userland {
    /// The files and symbolic links: path in the guest, path on this machine.
    files: Vec<(String, PathBuf)>,
    /// The selected suites, in the guest's format.
    suites: String,
}

impl Userland {
    /// Collects static programs by their names in the guest, the tools of a root directory, and the
    /// suites.
    pub(super) fn new(programs: &[(&str, PathBuf)], tools: &Path, suites: &str) -> Result<Self> {
        let mut files: Vec<_> = programs
            .iter()
            .map(|(name, path)| ((*name).to_owned(), path.clone()))
            .collect();
        for root in [tools.to_owned(), tools.join("usr")] {
            for folder in FOLDERS {
                collect(&root.join(folder), folder, &mut files)?;
            }
        }
        Ok(Self {
            files,
            suites: suites.to_owned(),
        })
    }

    /// Packs everything for a kernel with these modules.
    pub(super) fn pack(&self, modules: &Plan) -> Result<Vec<u8>> {
        let mut archive = Archive::default();
        for folder in ["proc", "sys", "dev", "run", "tmp", "etc", "root", "sbin"] {
            archive.folder(folder);
        }
        // The first process writes to the console before anything is mounted.
        archive.device("dev/console", 5, 1);
        // Packages name their files with and without this directory.
        archive.link("usr", ".");
        for (at, path) in &self.files {
            let reading = || format!("read {}", path.display());
            if path.is_symlink() {
                let target = fs::read_link(path).with_context(reading)?;
                archive.link(at, &target.to_string_lossy());
            } else {
                archive.file(at, &fs::read(path).with_context(reading)?);
            }
        }
        archive.file("etc/protocols", PROTOCOLS);
        archive.file("etc/suites", self.suites.as_bytes());
        let mut order = String::new();
        for (name, module) in &modules.load {
            archive.file(&format!("lib/modules/{name}.ko"), module);
            order += &format!("{name}\n");
        }
        archive.file("lib/modules/order", order.as_bytes());
        archive.file("lib/modules/missing", modules.missing.join("\n").as_bytes());
        Ok(archive.finish())
    }
}

/// Collects the files and links below a directory, which need not exist.
fn collect(folder: &Path, at: &str, files: &mut Vec<(String, PathBuf)>) -> Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let at = format!("{at}/{name}");
        if !entry.file_type()?.is_dir() {
            files.push((at, entry.path()));
        } else if !LEFT_OUT.contains(&name.as_str()) {
            collect(&entry.path(), &at, files)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn directory_usr_merges_into_the_root() {
        let root = tempfile::tempdir().unwrap();
        let file = |path: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        };
        file("bin/ip");
        file("usr/sbin/nft");
        file("usr/lib/aarch64-linux-gnu/libnftables.so.1.1.0");
        file("usr/lib/aarch64-linux-gnu/gconv/UTF-7.so");
        file("usr/share/doc/nftables/copyright");
        let link = "lib/aarch64-linux-gnu/libnftables.so.1";
        symlink("libnftables.so.1.1.0", root.path().join("usr").join(link)).unwrap();
        let userland = Userland::new(&[("init", "/guest".into())], root.path(), "").unwrap();
        let mut paths: Vec<_> = userland.files.iter().map(|(at, _)| at.as_str()).collect();
        paths.sort_unstable();
        let library = "lib/aarch64-linux-gnu/libnftables.so.1.1.0";
        assert_eq!(paths, ["bin/ip", "init", link, library, "sbin/nft"]);
    }
}
