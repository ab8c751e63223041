//! Builds the guest's initramfs: the tests, kpx, some tools with their libraries, and kernel
//! modules.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::cpio::Archive;
use super::debian::Tool;
use super::modules::Plan;
use crate::shell;

/// This machine's tools for the lab.
const TOOLS: &[&str] = &["ip", "nft", "ethtool"];
/// The content of /etc/protocols, from which the tools read protocol names.
const PROTOCOLS: &[u8] = b"tcp 6 TCP\nudp 17 UDP\nsctp 132 SCTP\n";

/// The files that do not depend on the kernel.
pub(super) struct Userland {
    /// The files: path in the guest, path on this machine.
    files: Vec<(String, PathBuf)>,
    /// The selected suites, in the guest's format.
    suites: String,
}

impl Userland {
    /// Collects static programs by their names in the guest, tools, and the suites.
    pub(super) fn new(programs: &[(&str, PathBuf)], tools: &[Tool], suites: &str) -> Result<Self> {
        let files = programs
            .iter()
            .map(|(name, path)| ((*name).to_owned(), path.clone()))
            .collect();
        let mut userland = Self {
            files,
            suites: suites.to_owned(),
        };
        userland.add_own_tools(TOOLS)?;
        for Tool { program, libraries } in tools {
            let name = program
                .file_name()
                .context("a tool has a name")?
                .to_string_lossy();
            userland.add(&format!("bin/{name}"), program, libraries)?;
        }
        Ok(userland)
    }

    pub(super) fn add_own_tools(&mut self, names: &[&str]) -> Result<()> {
        names.iter().try_for_each(|name| {
            let path = shell::which(name).with_context(|| format!("find {name}"))?;
            self.add(&format!("bin/{name}"), &path, &[])
        })
    }

    /// Adds this machine's iptables tools, with matches and targets.
    pub(super) fn add_iptables(&mut self, tools: &[&str], extensions: &[&str]) -> Result<()> {
        self.add_own_tools(tools)?;
        extensions.iter().try_for_each(|name| {
            let path = format!("/usr/lib/x86_64-linux-gnu/xtables/lib{name}.so");
            self.add(path.trim_start_matches('/'), Path::new(&path), &[])
        })
    }

    /// Adds a file and its libraries, which may be in `folders`.
    pub(super) fn add(&mut self, at: &str, path: &Path, folders: &[PathBuf]) -> Result<()> {
        let mut add = |at: String, path: PathBuf| {
            if !self.files.iter().any(|(there, _)| *there == at) {
                self.files.push((at, path));
            }
        };
        for (wanted, path) in libraries_of(path, folders)? {
            match wanted.strip_prefix('/') {
                // A program refers to its loader by path, and to its libraries by name.
                Some(loader) => add(loader.to_owned(), path),
                None => add(format!("lib/x86_64-linux-gnu/{wanted}"), path),
            }
        }
        add(at.to_owned(), path.to_owned());
        Ok(())
    }

    /// Packs everything for a kernel with these modules.
    pub(super) fn pack(&self, modules: &Plan) -> Result<Vec<u8>> {
        let mut archive = Archive::default();
        for folder in ["proc", "sys", "dev", "run", "tmp", "etc", "root", "sbin"] {
            archive.folder(folder);
        }
        // The first process writes to the console before anything is mounted.
        archive.device("dev/console", 5, 1);
        for (at, path) in &self.files {
            archive.file(
                at,
                &fs::read(path).with_context(|| format!("read {}", path.display()))?,
            );
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

/// Returns the loader and the libraries, recursively: path or name, path on this machine.
fn libraries_of(program: &Path, folders: &[PathBuf]) -> Result<Vec<(String, PathBuf)>> {
    let mut ldd = Command::new("ldd");
    ldd.arg(program)
        .env("LD_LIBRARY_PATH", std::env::join_paths(folders)?);
    let output = ldd.output().context("run ldd")?;
    ensure!(output.status.success(), "`{}` failed", shell::show(&ldd));
    let found = parse(&String::from_utf8_lossy(&output.stdout));
    found.with_context(|| format!("libraries of {}", program.display()))
}

/// Parses lines such as `libc.so.6 => /lib/libc.so.6 (0x…)`, `/lib64/ld-linux-x86-64.so.2 (0x…)`
/// and `linux-vdso.so.1 (0x…)`.
fn parse(listed: &str) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for line in listed
        .lines()
        .map(str::trim)
        .filter(|line| !line.starts_with("linux-vdso"))
    {
        let (name, path) = line.split_once(" => ").unwrap_or((line, line));
        ensure!(!path.starts_with("not found"), "{name} is not there");
        let bare = |text: &str| text.split(" (").next().unwrap_or_default().to_owned();
        found.push((bare(name), bare(path).into()));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read() {
        let listed = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                      \tlibelf.so.1 => /lib/x86_64-linux-gnu/libelf.so.1 (0x00007f)\n\
                      \t/lib64/ld-linux-x86-64.so.2 (0x00007f7)\n";
        let expected = [
            ("libelf.so.1", "/lib/x86_64-linux-gnu/libelf.so.1"),
            ("/lib64/ld-linux-x86-64.so.2", "/lib64/ld-linux-x86-64.so.2"),
        ];
        assert_eq!(
            parse(listed).unwrap(),
            expected.map(|(name, path)| (name.to_owned(), PathBuf::from(path)))
        );
        assert!(parse("\tlibnl-3.so.200 => not found\n").is_err());
    }
}
