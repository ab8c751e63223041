//! The archive: its parts, and their list CONTENTS.

use std::fmt::{Display, Write as _};
use std::io::{self, Read, Write};

use anyhow::{Context, Result, ensure};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use jiff::Timestamp;
use proxy_view::output::escaped;

/// The name of the list of parts.
const CONTENTS: &str = "CONTENTS";
/// Maximum unpacked size of a node's archive in bytes.
const LONGEST: u64 = 1 << 30;

pub(super) struct Archive {
    tar: tar::Builder<GzEncoder<Box<dyn Write + Send>>>,
    contents: String,
    /// The missing parts.
    failed: Vec<String>,
    time: u64,
}

impl Archive {
    /// Begins an archive. `about` is the header of CONTENTS.
    pub(super) fn new(writer: Box<dyn Write + Send>, about: &str) -> Self {
        let contents = format!("{about}\n{:<40} {:>12}  FROM\n", "FILE", "BYTES");
        let time = Timestamp::now().as_second().try_into().unwrap_or_default();
        let tar = tar::Builder::new(GzEncoder::new(writer, Compression::default()));
        Self {
            tar,
            contents,
            failed: Vec::new(),
            time,
        }
    }

    /// Adds a part, or lists the reason why it is missing. Fails only if the archive cannot be
    /// written.
    pub(super) fn add(&mut self, name: &str, from: &str, part: Result<Vec<u8>>) -> Result<()> {
        match part {
            Ok(bytes) => {
                self.put(name, bytes.len() as u64, &bytes[..])?;
                self.list(name, bytes.len(), from);
            }
            Err(error) => {
                self.list(name, "missing", &format!("{from}: {error:#}"));
                self.failed.push(name.to_owned());
            }
        }
        Ok(())
    }

    /// Adds the parts of a node's archive below a folder; adds no part unless all parts are
    /// complete files with plain names.
    pub(super) fn add_all(&mut self, folder: &str, archive: &[u8]) -> Result<()> {
        // The archive is unpacked twice, to check and to copy, and never held in memory: a few
        // bytes may unpack to a great size.
        let mut parts = 0;
        each_part(archive, |name, mut part| {
            let read = io::copy(&mut part, &mut io::sink())
                .with_context(|| format!("read {name} of the node's archive"))?;
            ensure!(
                read == part.size(),
                "{name} of the node's archive breaks off"
            );
            parts += 1;
            Ok(())
        })?;
        ensure!(parts > 0, "the node's archive is empty");
        each_part(archive, |name, part| {
            self.put(&format!("{folder}/{name}"), part.size(), part)
        })?;
        self.list(
            &format!("{folder}/"),
            parts,
            &format!("kpx sysdump there; {folder}/{CONTENTS} lists it"),
        );
        Ok(())
    }

    /// Adds a line to CONTENTS. Escaping keeps a node from injecting lines.
    fn list(&mut self, name: &str, size: impl Display, from: &str) {
        let from = escaped(from.trim_end()).replace('\n', " ");
        let _ = writeln!(self.contents, "{name:<40} {size:>12}  {from}");
    }

    /// Adds CONTENTS, ends the archive, and returns the names of missing parts.
    pub(super) fn finish(mut self) -> Result<Vec<String>> {
        let contents = std::mem::take(&mut self.contents);
        self.put(CONTENTS, contents.len() as u64, contents.as_bytes())?;
        let gzip = self.tar.into_inner().context("write the archive")?;
        let mut writer = gzip.finish().context("write the archive")?;
        writer.flush().context("write the archive")?;
        Ok(self.failed)
    }

    fn put(&mut self, name: &str, size: u64, bytes: impl Read) -> Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(size);
        header.set_mode(0o600);
        header.set_mtime(self.time);
        self.tar
            .append_data(&mut header, name, bytes)
            .with_context(|| format!("write {name} to the archive"))
    }
}

/// A part of a node's archive while it is read.
type Part<'a, 'b> = tar::Entry<'a, io::Take<GzDecoder<&'b [u8]>>>;

/// Calls a function for each part of a node's archive. tar's long-name entries are rejected, so
/// that no name fills the memory.
fn each_part<'b>(
    archive: &'b [u8],
    mut to: impl FnMut(&str, Part<'_, 'b>) -> Result<()>,
) -> Result<()> {
    let mut inner = tar::Archive::new(GzDecoder::new(archive).take(LONGEST));
    for part in inner
        .entries()
        .context("read the node's archive")?
        .raw(true)
    {
        let part = part.context("read the node's archive")?;
        let name = part
            .path()
            .context("read a name in the node's archive")?
            .to_string_lossy()
            .into_owned();
        ensure!(
            part.header().entry_type().is_file() && is_plain(&name),
            "the node's archive has a part {name:?}"
        );
        to(&name, part)?;
    }
    Ok(())
}

/// Returns true for the name of a file directly in the archive's folder.
fn is_plain(name: &str) -> bool {
    let is_letter = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    !name.is_empty() && name.len() <= 80 && !name.starts_with('.') && name.chars().all(is_letter)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use anyhow::anyhow;

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn written(fill: impl FnOnce(&mut Archive)) -> (Vec<u8>, Vec<String>) {
        let shared = Shared::default();
        let mut archive = Archive::new(Box::new(shared.clone()), "about\n");
        fill(&mut archive);
        let failed = archive.finish().unwrap();
        (shared.0.lock().unwrap().clone(), failed)
    }

    fn read(archive: &[u8]) -> Vec<(String, String)> {
        let mut archive = tar::Archive::new(GzDecoder::new(archive));
        let parts = archive.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            (entry.path().unwrap().display().to_string(), text)
        });
        parts.collect()
    }

    #[test]
    fn part_that_fails_is_named_and_others_stay() {
        let (archive, failed) = written(|archive| {
            archive.add("a.txt", "cat a", Ok(b"one".to_vec())).unwrap();
            archive
                .add("b.txt", "cat b", Err(anyhow!("no such\nfile\u{1b}\n")))
                .unwrap();
        });
        assert_eq!(failed, ["b.txt"]);
        let parts = read(&archive);
        assert_eq!(parts[0], ("a.txt".to_owned(), "one".to_owned()));
        assert_eq!(parts[1].0, "CONTENTS");
        let lines: Vec<_> = parts[1]
            .1
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(
            lines,
            [
                "about",
                "",
                "FILE BYTES FROM",
                "a.txt 3 cat a",
                "b.txt missing cat b: no such file\\u{1b}"
            ]
        );
    }

    #[test]
    fn node_cannot_write_outside_its_folder() {
        let (good, _) =
            written(|archive| archive.add("a.txt", "cat a", Ok(b"one".to_vec())).unwrap());
        let (whole, _) = written(|archive| archive.add_all("nodes/n1", &good).unwrap());
        let names: Vec<_> = read(&whole).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["nodes/n1/a.txt", "nodes/n1/CONTENTS", "CONTENTS"]);
        let (bad, _) = written(|archive| {
            archive
                .add("b/c.txt", "cat c", Ok(b"one".to_vec()))
                .unwrap()
        });
        written(|archive| {
            let error = archive.add_all("nodes/n1", &bad).unwrap_err().to_string();
            assert!(error.contains("b/c.txt"), "{error}");
            assert!(archive.add_all("nodes/n1", b"no archive").is_err());
            assert!(
                archive
                    .add_all("nodes/n1", &good[..good.len() - 12])
                    .is_err()
            );
        });
        for name in ["..", ".profile", "a/b", "", "a\u{1b}"] {
            assert!(!is_plain(name), "{name:?}");
        }
    }
}
