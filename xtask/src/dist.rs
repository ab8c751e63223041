//! Builds the release: an archive, an image and a Debian package around one static kpx, and their checksums.
//!
//! The same commit makes the same bytes: files are sorted, have no owner, and have the time of the commit.

mod image;
mod pack;
mod sums;

use std::env::consts::ARCH;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::step::{quiet, step};
use crate::{build, shell, workspace};
use pack::{Entry, Files};

const CARGO_DEB_VERSION: &str = "3.8.0";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Do not optimise: a quick way to try the packages rather than kpx
    #[arg(long)]
    debug: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let kpx = build::run(&build::Options { release: !options.debug, static_: true, ..Default::default() })?;
    let bytes = fs::read(&kpx).with_context(|| format!("read {}", kpx.display()))?;
    ensure!(!has_interpreter(&bytes), "{} is not static", kpx.display());
    let release = Release::of(kpx)?;
    let files = step("pack", || release.pack())?;
    step("try the image", || image::try_out(&release.folder.join(release.file("oci.tar"))))?;
    let deb = release.debian_package()?;
    let made = files.into_iter().chain([deb]).collect::<Vec<_>>();
    sums::write(&release.folder, &made)?;
    for (name, size) in sums::verify(&release.folder)? {
        println!("{}  {:.1} MB", release.folder.join(name).display(), size as f64 / 1e6);
    }
    Ok(())
}

/// Returns true if an ELF file (64 bit, little-endian) asks for a dynamic loader.
fn has_interpreter(elf: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    let u16_at = |at: usize| elf.get(at..at + 2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
    let u64_at = |at: usize| elf.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
    let headers = || Some((usize::try_from(u64_at(0x20)?).ok()?, u16_at(0x36)?, u16_at(0x38)?));
    let Some((start, size, count)) = headers() else { return false };
    let mut kinds = (0..count).map(|nth| start + usize::from(nth) * usize::from(size));
    kinds.any(|at| elf.get(at..at + 4) == Some(PT_INTERP.to_le_bytes().as_slice()))
}

/// The content and the name of a release.
struct Release {
    folder: PathBuf,
    /// The files that the packages share, on disk for cargo-deb: `bin`, `man`, `completions`.
    stage: PathBuf,
    kpx: PathBuf,
    version: &'static str,
    /// The time in seconds since 1970: the commit's, or SOURCE_DATE_EPOCH.
    time: u64,
}

impl Release {
    fn of(kpx: PathBuf) -> Result<Self> {
        // The folder is in cargo's default place even if the target directory is elsewhere, because cargo-deb's list of
        // files names it.
        let folder = workspace::root().join("target/dist");
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
        }
        let stage = folder.join("stage");
        fs::create_dir_all(stage.join("bin"))?;
        let version = env!("CARGO_PKG_VERSION");
        let release = Self { folder, stage, kpx, version, time: time()? };
        release.stage()?;
        Ok(release)
    }

    fn file(&self, ending: &str) -> String {
        format!("kpx-{}-linux-{ARCH}.{ending}", self.version)
    }

    /// Stages kpx, its manual pages and its completions.
    fn stage(&self) -> Result<()> {
        let kpx = self.stage.join("bin/kpx");
        fs::copy(&self.kpx, &kpx).with_context(|| format!("copy {}", self.kpx.display()))?;
        let mut man = Command::new(&kpx);
        man.arg("man").arg("--dir").arg(self.stage.join("man"));
        shell::run(man)?;
        let completions = self.stage.join("completions");
        fs::create_dir(&completions)?;
        for (shell, name) in [("bash", "kpx"), ("zsh", "_kpx"), ("fish", "kpx.fish")] {
            let script =
                shell::output(&kpx, &["completions", shell]).with_context(|| format!("kpx completions {shell}"))?;
            fs::write(completions.join(name), script)?;
        }
        Ok(())
    }

    /// Writes the archive and the image, and returns their names.
    fn pack(&self) -> Result<Vec<String>> {
        let mut files = Files::default();
        files.add_folder(&self.stage, "")?;
        for folder in ["deploy", "docs"] {
            files.add_folder(&workspace::root().join(folder), folder)?;
        }
        for file in ["CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md"] {
            files.add_file(&workspace::root().join(file), file)?;
        }
        let archive = self.file("tar.gz");
        let top = archive.trim_end_matches(".tar.gz").to_owned();
        fs::write(self.folder.join(&archive), files.below(&top).tar_gz(self.time)?)?;

        let mut root = Files::default();
        root.add_file(&self.stage.join("bin/kpx"), "usr/local/bin/kpx")?;
        root.add("usr/local/bin/kube-proxy", Entry::Link("kpx".to_owned()));
        let image = self.file("oci.tar");
        fs::write(self.folder.join(&image), image::oci(&root, self.version, self.time)?)?;
        Ok(vec![archive, image])
    }

    fn debian_package(&self) -> Result<String> {
        if shell::which("cargo-deb").is_none() && shell::output("cargo", &["deb", "--version"]).is_none() {
            let mut cargo = Command::new("cargo");
            cargo.args(["install", "cargo-deb", "--locked", "--version", CARGO_DEB_VERSION]);
            workspace::forget_xtask(&mut cargo);
            quiet(&format!("install cargo-deb {CARGO_DEB_VERSION}"), [cargo])?;
        }
        let name = self.file("deb");
        let mut cargo = workspace::cargo();
        cargo.args(["deb", "--package", "proxy-agent", "--no-build", "--no-strip", "--output"]);
        cargo.arg(self.folder.join(&name)).env("SOURCE_DATE_EPOCH", self.time.to_string());
        quiet("pack for Debian", [cargo])?;
        Ok(name)
    }
}

fn time() -> Result<u64> {
    const NAME: &str = "SOURCE_DATE_EPOCH";
    let text = match std::env::var(NAME) {
        Ok(text) => text,
        Err(_) => {
            let root = workspace::root().to_string_lossy();
            shell::output("git", &["-C", &root, "log", "-1", "--format=%ct"])
                .with_context(|| format!("ask git for the time of the commit; without git, set {NAME}"))?
        }
    };
    text.trim().parse().with_context(|| format!("{NAME}: {text:?} is no number of seconds"))
}

#[cfg(test)]
#[path = "dist/tests.rs"]
mod tests;
