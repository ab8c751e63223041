//! Files in memory, and reproducible archives of them.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use flate2::{Compression, GzBuilder};
use tar::{Builder, EntryType, Header};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    File { content: Vec<u8>, executable: bool },
    Link(String),
}

/// Files and links by relative path, with `/`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Files(BTreeMap<String, Entry>);

impl Files {
    pub(crate) fn add(&mut self, path: &str, entry: Entry) {
        self.0.insert(path.to_owned(), entry);
    }

    pub(crate) fn add_file(&mut self, from: &Path, path: &str) -> Result<()> {
        let content = fs::read(from).with_context(|| format!("read {}", from.display()))?;
        let executable = fs::metadata(from)?.permissions().mode() & 0o111 != 0;
        self.add(
            path,
            Entry::File {
                content,
                executable,
            },
        );
        Ok(())
    }

    pub(crate) fn add_folder(&mut self, from: &Path, path: &str) -> Result<()> {
        for entry in fs::read_dir(from).with_context(|| format!("list {}", from.display()))? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name
                .to_str()
                .with_context(|| format!("{} is not UTF-8", entry.path().display()))?;
            let path = if path.is_empty() {
                name.to_owned()
            } else {
                format!("{path}/{name}")
            };
            if entry.file_type()?.is_symlink() {
                let target = fs::read_link(entry.path())
                    .with_context(|| format!("read {}", entry.path().display()))?;
                self.add(&path, Entry::Link(target.to_string_lossy().into_owned()));
            } else if entry.file_type()?.is_dir() {
                self.add_folder(&entry.path(), &path)?;
            } else {
                self.add_file(&entry.path(), &path)?;
            }
        }
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn paths(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Writes the files below a folder.
    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        let tar = self.tar(0)?;
        let mut archive = tar::Archive::new(tar.as_slice());
        archive.set_preserve_mtime(false);
        archive
            .unpack(folder)
            .with_context(|| format!("write {}", folder.display()))
    }

    pub(crate) fn below(self, folder: &str) -> Self {
        Self(
            self.0
                .into_iter()
                .map(|(path, entry)| (format!("{folder}/{path}"), entry))
                .collect(),
        )
    }

    /// Makes a tar archive; `time` is in seconds since 1970.
    pub(crate) fn tar(&self, time: u64) -> Result<Vec<u8>> {
        let mut tar = Builder::new(Vec::new());
        for folder in self.folders() {
            let mut header = header(EntryType::Directory, 0o755, 0, time);
            tar.append_data(&mut header, format!("{folder}/"), std::io::empty())?;
        }
        for (path, entry) in &self.0 {
            match entry {
                Entry::File {
                    content,
                    executable,
                } => {
                    let mode = if *executable { 0o755 } else { 0o644 };
                    let mut header = header(EntryType::Regular, mode, content.len() as u64, time);
                    tar.append_data(&mut header, path, content.as_slice())?;
                }
                Entry::Link(target) => {
                    tar.append_link(
                        &mut header(EntryType::Symlink, 0o777, 0, time),
                        path,
                        target,
                    )?;
                }
            }
        }
        tar.into_inner().context("end the archive")
    }

    pub(crate) fn tar_gz(&self, time: u64) -> Result<Vec<u8>> {
        gzip(&self.tar(time)?)
    }

    /// Returns the directories above the files, each after its parent.
    fn folders(&self) -> Vec<String> {
        let above = |path: &String| {
            Path::new(path)
                .ancestors()
                .skip(1)
                .map(Path::to_path_buf)
                .collect::<Vec<_>>()
        };
        let mut folders: Vec<_> = self
            .0
            .keys()
            .flat_map(above)
            .map(|path| path.to_string_lossy().into_owned())
            .collect();
        folders.retain(|folder| !folder.is_empty());
        folders.sort();
        folders.dedup();
        folders
    }
}

fn header(kind: EntryType, mode: u32, size: u64, time: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(time);
    header.set_uid(0);
    header.set_gid(0);
    header
}

/// Compresses without name and time in the header.
pub(crate) fn gzip(bytes: &[u8]) -> Result<Vec<u8>> {
    const UNKNOWN_SYSTEM: u8 = 255;
    let mut gzip = GzBuilder::new()
        .operating_system(UNKNOWN_SYSTEM)
        .write(Vec::new(), Compression::best());
    gzip.write_all(bytes)?;
    gzip.finish().context("compress")
}
