//! Builds the release: an archive, an image and a Debian package of one static kpx, and their
//! checksums.
//!
//! The packages are reproducible from the same kpx: files are sorted, have no owner, and have the
//! time of the commit.

mod bill;
mod deb;
mod image;
mod licenses;
mod pack;
mod sums;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use serde_json::Value;

use crate::arch::Arch;
use crate::step::step;
use crate::{build, shell, workspace};
use bill::bill;
use pack::{Entry, Files};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Do not optimise: a quick way to try the packages rather than kpx
    #[arg(long)]
    debug: bool,
    /// Release for this architecture, this machine's by default; several times for several, which
    /// also share an image
    #[arg(long, value_enum)]
    arch: Vec<Arch>,
    /// Make no Debian package, for which cargo-deb is installed
    #[arg(long)]
    no_deb: bool,
}

/// Makes the image of kpx for this machine. Returns its archive.
pub(crate) fn image() -> Result<PathBuf> {
    let options = Options {
        debug: false,
        arch: Vec::new(),
        no_deb: true,
    };
    let release = make(&options)?;
    let arch = Arch::of_this_machine().context("kpx is not released for this machine")?;
    Ok(release.folder.join(release.file(arch, "oci.tar")))
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let release = make(options)?;
    for (name, size) in sums::verify(&release.folder)? {
        println!(
            "{}  {:.1} MB",
            release.folder.join(name).display(),
            size as f64 / 1e6
        );
    }
    Ok(())
}

fn make(options: &Options) -> Result<Release> {
    let own =
        || Arch::of_this_machine().context("kpx is not released for this machine: name an --arch");
    let arches = if options.arch.is_empty() {
        vec![own()?]
    } else {
        options.arch.clone()
    };
    arches.iter().try_for_each(|arch| arch.ensure_tools())?;
    let release = Release::new()?;
    let mut made = Vec::new();
    let mut roots = Vec::new();
    for arch in arches {
        let build = build::Options {
            release: !options.debug,
            static_: true,
            arch: Some(arch),
            ..Default::default()
        };
        let kpx = build::run(&build)?;
        let bytes = fs::read(&kpx).with_context(|| format!("read {}", kpx.display()))?;
        ensure!(!has_interpreter(&bytes), "{} is not static", kpx.display());
        let metadata = metadata(arch)?;
        let bill = bill(&metadata, arch, release.time)?;
        let licenses = licenses::texts(&bill, &metadata)?;
        release.stage(&kpx, arch, &licenses)?;
        made.push(step("pack", || release.pack(arch))?);
        let name = release.file(arch, "cdx.json");
        let text = serde_json::to_string_pretty(&bill)? + "\n";
        fs::write(release.folder.join(&name), text)?;
        made.push(name);
        if !options.no_deb {
            made.push(release.debian_package(arch)?);
        }
        roots.push((arch, release.root()?));
    }
    made.extend(step("make the image", || release.images(&roots))?);
    sums::write(&release.folder, &made)?;
    Ok(release)
}

/// Returns true if an ELF file (64 bit, little-endian) requests a dynamic loader.
fn has_interpreter(elf: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    let u16_at = |at: usize| {
        elf.get(at..at + 2)
            .map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]))
    };
    let u64_at = |at: usize| elf.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
    let headers = || {
        Some((
            usize::try_from(u64_at(0x20)?).ok()?,
            u16_at(0x36)?,
            u16_at(0x38)?,
        ))
    };
    let Some((start, size, count)) = headers() else {
        return false;
    };
    let mut kinds = (0..count).map(|nth| start + usize::from(nth) * usize::from(size));
    kinds.any(|at| elf.get(at..at + 4) == Some(PT_INTERP.to_le_bytes().as_slice()))
}

struct Release {
    folder: PathBuf,
    /// The directory of the files that all packages share: `bin`, `man`, `completions`, licenses.
    stage: PathBuf,
    version: &'static str,
    /// The time in seconds since 1970: the commit's, or SOURCE_DATE_EPOCH.
    time: u64,
}

impl Release {
    fn new() -> Result<Self> {
        // cargo-deb's list of files contains the default target directory, so the directory is
        // there even if another target directory is set.
        let folder = workspace::root().join("target/dist");
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
        }
        let stage = folder.join("stage");
        fs::create_dir_all(&stage)?;
        Ok(Self {
            folder,
            stage,
            version: env!("CARGO_PKG_VERSION"),
            time: time()?,
        })
    }

    fn file(&self, arch: Arch, ending: &str) -> String {
        format!("kpx-{}-linux-{}.{ending}", self.version, arch.name())
    }

    /// Stages kpx, its link as kubectl's plugin, the licenses, and the manual pages and completions
    /// that kpx writes.
    fn stage(&self, kpx: &Path, arch: Arch, licenses: &str) -> Result<()> {
        fs::remove_dir_all(&self.stage)?;
        fs::create_dir_all(self.stage.join("bin"))?;
        let staged = self.stage.join("bin/kpx");
        fs::copy(kpx, &staged).with_context(|| format!("copy {}", kpx.display()))?;
        symlink("kpx", self.stage.join("bin/kubectl-kpx")).context("link kubectl-kpx")?;
        let words: Vec<_> = arch
            .emulator()
            .into_iter()
            .chain([staged.to_string_lossy().into_owned()])
            .collect();
        let run = |arguments: &[&str]| {
            let all: Vec<_> = words[1..]
                .iter()
                .map(String::as_str)
                .chain(arguments.iter().copied())
                .collect();
            shell::output(&words[0], &all).with_context(|| format!("kpx {}", arguments.join(" ")))
        };
        fs::write(self.stage.join(licenses::NAME), licenses)?;
        run(&["man", "--dir", &self.stage.join("man").to_string_lossy()])?;
        let completions = self.stage.join("completions");
        fs::create_dir(&completions)?;
        for (shell, name) in [
            ("bash", "kpx"),
            ("zsh", "_kpx"),
            ("fish", "kpx.fish"),
            ("powershell", "kpx.ps1"),
        ] {
            fs::write(completions.join(name), run(&["completions", shell])?)?;
        }
        Ok(())
    }

    fn pack(&self, arch: Arch) -> Result<String> {
        let mut files = Files::default();
        files.add_folder(&self.stage, "")?;
        for folder in ["deploy", "docs"] {
            files.add_folder(&workspace::root().join(folder), folder)?;
        }
        for file in ["CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md"] {
            files.add_file(&workspace::root().join(file), file)?;
        }
        let archive = self.file(arch, "tar.gz");
        let top = archive.trim_end_matches(".tar.gz").to_owned();
        fs::write(
            self.folder.join(&archive),
            files.below(&top).tar_gz(self.time)?,
        )?;
        Ok(archive)
    }

    fn root(&self) -> Result<Files> {
        let mut root = Files::default();
        root.add_file(&self.stage.join("bin/kpx"), "usr/local/bin/kpx")?;
        root.add("usr/local/bin/kube-proxy", Entry::Link("kpx".to_owned()));
        root.add_file(&workspace::root().join("LICENSE"), "licenses/LICENSE")?;
        root.add_file(
            &self.stage.join(licenses::NAME),
            &format!("licenses/{}", licenses::NAME),
        )?;
        Ok(root)
    }

    /// Writes an image for each architecture and, for several, one image for all. Runs kpx in each.
    fn images(&self, roots: &[(Arch, Files)]) -> Result<Vec<String>> {
        let single = roots
            .iter()
            .map(|one| (self.file(one.0, "oci.tar"), std::slice::from_ref(one)));
        let all = (roots.len() > 1).then(|| (format!("kpx-{}-linux.oci.tar", self.version), roots));
        let mut names = Vec::new();
        for (name, roots) in single.chain(all) {
            let path = self.folder.join(&name);
            fs::write(&path, image::oci(roots, self.version, self.time)?)?;
            roots
                .iter()
                .try_for_each(|(arch, _)| image::try_out(&path, *arch))?;
            names.push(name);
        }
        Ok(names)
    }

    fn debian_package(&self, arch: Arch) -> Result<String> {
        let name = self.file(arch, "deb");
        let package = self.folder.join(&name);
        deb::pack(&package, arch, self.time)?;
        deb::look_into(&package, arch, self.version, &self.stage)?;
        Ok(name)
    }
}

/// Returns cargo's metadata of all packages, as linked for an architecture.
fn metadata(arch: Arch) -> Result<Value> {
    let mut cargo = workspace::cargo();
    cargo.args([
        "metadata",
        "--format-version",
        "1",
        "--locked",
        "--filter-platform",
        &arch.triple(),
    ]);
    let output = cargo.output().context("ask cargo for the packages")?;
    ensure!(
        output.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn time() -> Result<u64> {
    const NAME: &str = "SOURCE_DATE_EPOCH";
    let text = match std::env::var(NAME) {
        Ok(text) => text,
        Err(_) => {
            let root = workspace::root().to_string_lossy();
            shell::output("git", &["-C", &root, "log", "-1", "--format=%ct"]).with_context(
                || format!("ask git for the time of the commit; without git, set {NAME}"),
            )?
        }
    };
    text.trim()
        .parse()
        .with_context(|| format!("{NAME}: {text:?} is not a number of seconds"))
}

#[cfg(test)]
#[path = "dist/tests.rs"]
mod tests;
