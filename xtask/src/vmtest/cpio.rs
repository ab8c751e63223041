//! Writes an initramfs: a cpio archive in the format "newc" (the kernel's
//! initramfs/buffer-format.rst). Creates the directories above a file; root owns everything.

use std::collections::BTreeSet;

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const DEVICE: u32 = 0o020_600;
const LINK: u32 = 0o120_777;

#[derive(Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    folders: BTreeSet<String>,
    entries: u32,
}

impl Archive {
    /// Adds a directory; `path` is relative to the root.
    pub(super) fn folder(&mut self, path: &str) {
        if !path.is_empty() && !self.folders.contains(path) {
            self.folders_above(path);
            self.entry(path, FOLDER, (0, 0), &[]);
            self.folders.insert(path.to_owned());
        }
    }

    /// Adds a file, which all users may execute.
    pub(super) fn file(&mut self, path: &str, content: &[u8]) {
        self.folders_above(path);
        self.entry(path, PROGRAM, (0, 0), content);
    }

    /// Adds a symbolic link.
    pub(super) fn link(&mut self, path: &str, target: &str) {
        self.folders_above(path);
        self.entry(path, LINK, (0, 0), target.as_bytes());
    }

    /// Adds a character device with its major and minor number.
    pub(super) fn device(&mut self, path: &str, major: u32, minor: u32) {
        self.folders_above(path);
        self.entry(path, DEVICE, (major, minor), &[]);
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn folders_above(&mut self, path: &str) {
        if let Some((above, _)) = path.rsplit_once('/') {
            self.folder(above);
        }
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).expect("files of an initramfs are far below 4 GiB");
        let name_size = u32::try_from(path.len() + 1).expect("paths are short");
        // The fields: inode, mode, user, group, links, time, size, device (2), device number of a
        // device file (2), length of the name, checksum.
        let fields = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            size,
            0,
            0,
            device.0,
            device.1,
            name_size,
            0,
        ];
        self.bytes.extend(b"070701");
        self.bytes.extend(
            fields
                .iter()
                .flat_map(|field| format!("{field:08x}").into_bytes()),
        );
        self.bytes.extend(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The name, mode, device and content of an entry.
    type Entry = (String, u32, (u32, u32), Vec<u8>);

    fn read(mut bytes: &[u8]) -> Vec<Entry> {
        let mut entries = Vec::new();
        while !bytes.is_empty() {
            assert_eq!(&bytes[..6], b"070701");
            let field = |nth: usize| {
                let digits = std::str::from_utf8(&bytes[6 + nth * 8..][..8]).unwrap();
                u32::from_str_radix(digits, 16).unwrap()
            };
            let name_size = field(11) as usize;
            let size = field(6) as usize;
            let start = (110 + name_size).next_multiple_of(4);
            let name = std::str::from_utf8(&bytes[110..][..name_size])
                .unwrap()
                .trim_end_matches('\0')
                .to_owned();
            entries.push((
                name,
                field(1),
                (field(9), field(10)),
                bytes[start..][..size].to_vec(),
            ));
            bytes = &bytes[(start + size).next_multiple_of(4)..];
        }
        entries
    }

    #[test]
    fn packed_archive_can_be_read() {
        let mut archive = Archive::default();
        archive.file("init", b"first");
        archive.device("dev/console", 5, 1);
        archive.file("lib/modules/veth.ko", b"odd");
        archive.folder("lib/modules");
        archive.link("usr", ".");
        let none = (0, 0);
        let expected = [
            ("init", PROGRAM, none, "first"),
            ("dev", FOLDER, none, ""),
            ("dev/console", DEVICE, (5, 1), ""),
            ("lib", FOLDER, none, ""),
            ("lib/modules", FOLDER, none, ""),
            ("lib/modules/veth.ko", PROGRAM, none, "odd"),
            ("usr", LINK, none, "."),
            ("TRAILER!!!", 0, none, ""),
        ];
        let expected = expected
            .map(|(path, mode, device, content)| (path.to_owned(), mode, device, content.into()));
        assert_eq!(read(&archive.finish()), expected);
    }
}
