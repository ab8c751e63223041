//! Builds the release: an archive, an image and a Debian package of one static kpx, and their
//! checksums.
//!
//! The packages are reproducible from the same kpx: files are sorted, have no owner, and have the
//! time of the commit.

mod bill;
mod deb;
mod image;
mod licenses;
pub(crate) mod pack;
mod rpm;
pub(crate) mod sums;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use serde_json::Value;

use crate::arch::Arch;
use crate::home::{Home, LOCAL_IMAGE};
use crate::step::step;
use crate::{build, shell, workspace};
use bill::bill;
use pack::{Entry, Files};

/// The folders that every package has; the rest of `deploy` serves to make packages.
const FOLDERS: [&str; 6] = [
    "deploy/helm",
    "deploy/kubeadm",
    "deploy/kubernetes",
    "deploy/monitoring",
    "deploy/systemd",
    "docs",
];

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Do not optimise: a quick way to try the packages rather than kpx
    #[arg(long)]
    pub(crate) debug: bool,
    /// Release for this architecture, this machine's by default; several times for several, which
    /// also share an image
    #[arg(long, value_enum)]
    pub(crate) arch: Vec<Arch>,
    /// Make no Debian package, for which cargo-deb is installed
    #[arg(long)]
    pub(crate) no_deb: bool,
}

impl Options {
    /// Returns the named architectures, or this machine's.
    fn arches(&self) -> Result<Vec<Arch>> {
        if !self.arch.is_empty() {
            return Ok(self.arch.clone());
        }
        Ok(vec![Arch::of_this_machine()?])
    }
}

/// Makes the image of kpx for this machine. Returns its archive.
pub(crate) fn image() -> Result<PathBuf> {
    let options = Options {
        debug: false,
        arch: Vec::new(),
        no_deb: true,
    };
    let release = Release::new("dist", None)?;
    release.make(&options)?;
    let arch = Arch::of_this_machine()?;
    Ok(release.folder.join(release.file(arch, "oci.tar")))
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let release = Release::new("dist", None)?;
    let made = release.make(options)?;
    sums::write(&release.folder, &made)?;
    list(&release.folder)
}

/// Prints the files of a folder, after a check of their sums.
pub(crate) fn list(folder: &Path) -> Result<()> {
    for (name, size) in sums::verify(folder)? {
        let path = folder.join(name);
        println!("{}  {:.1} MB", path.display(), size as f64 / 1e6);
    }
    Ok(())
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

/// A release in the making, in a folder of the target directory.
pub(crate) struct Release {
    pub(crate) folder: PathBuf,
    /// The directory of the files that all packages share: `bin`, `man`, `completions`, `deploy`,
    /// `docs`, licenses.
    pub(crate) stage: PathBuf,
    pub(crate) version: &'static str,
    /// The time of all files, in seconds since 1970.
    pub(crate) time: u64,
    /// Where the release will be; `None` for packages that stay with their checkout.
    home: Option<Home>,
}

/// kpx for an architecture, with what packages say about its crates.
struct Built {
    arch: Arch,
    kpx: PathBuf,
    bill: String,
    licenses: String,
}

impl Release {
    pub(crate) fn new(folder: &str, home: Option<Home>) -> Result<Self> {
        // cargo-deb's list of files contains the default target directory, so the directory is
        // there even if another target directory is set.
        let target = workspace::root().join("target");
        let (folder, stage) = (target.join(folder), target.join("dist/stage"));
        for old in [&folder, &stage] {
            if old.exists() {
                fs::remove_dir_all(old).with_context(|| format!("remove {}", old.display()))?;
            }
            fs::create_dir_all(old)?;
        }
        Ok(Self {
            folder,
            stage,
            version: env!("CARGO_PKG_VERSION"),
            time: time()?,
            home,
        })
    }

    /// Makes all files for the architectures, and returns their names.
    pub(crate) fn make(&self, options: &Options) -> Result<Vec<String>> {
        let arches = options.arches()?;
        arches.iter().try_for_each(|arch| arch.ensure_tools())?;
        let built = arches.into_iter().map(|arch| self.build(arch, options));
        let built = built.collect::<Result<Vec<_>>>()?;
        let (mut made, digest) = step("make the image", || self.images(&built))?;
        for built in &built {
            self.stage(built, &digest)?;
            made.push(step("pack", || self.pack(built.arch))?);
            let name = self.file(built.arch, "cdx.json");
            fs::write(self.folder.join(&name), &built.bill)?;
            made.push(name);
            if !options.no_deb {
                made.push(self.debian_package(built.arch)?);
            }
            if self.home.is_some() {
                made.push(self.rpm_package(built.arch)?);
                made.push(self.plugin(built.arch)?);
            }
        }
        Ok(made)
    }

    fn build(&self, arch: Arch, options: &Options) -> Result<Built> {
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
        let bill = bill(&metadata, arch, self.time)?;
        Ok(Built {
            arch,
            kpx,
            licenses: licenses::texts(&bill, &metadata)?,
            bill: serde_json::to_string_pretty(&bill)? + "\n",
        })
    }

    pub(crate) fn file(&self, arch: Arch, ending: &str) -> String {
        format!("kpx-{}-linux-{}.{ending}", self.version, arch.name())
    }

    /// Packs kubectl's plugin by itself, because krew takes no archive with links. Returns its name.
    fn plugin(&self, arch: Arch) -> Result<String> {
        let mut files = Files::default();
        files.add_file(&self.stage.join("bin/kpx"), "kubectl-kpx")?;
        for license in ["LICENSE", licenses::NAME] {
            files.add_file(&self.stage.join(license), license)?;
        }
        let name = self.plugin_file(arch);
        fs::write(self.folder.join(&name), files.tar_gz(self.time)?)?;
        Ok(name)
    }

    pub(crate) fn plugin_file(&self, arch: Arch) -> String {
        format!("kubectl-{}", self.file(arch, "tar.gz"))
    }

    /// Stages what all packages share: kpx, its link as kubectl's plugin, the manual pages and
    /// completions that kpx writes, and the tree's pages and manifests.
    fn stage(&self, built: &Built, digest: &str) -> Result<()> {
        fs::remove_dir_all(&self.stage)?;
        fs::create_dir_all(self.stage.join("bin"))?;
        let staged = self.stage.join("bin/kpx");
        fs::copy(&built.kpx, &staged).with_context(|| format!("copy {}", built.kpx.display()))?;
        symlink("kpx", self.stage.join("bin/kubectl-kpx")).context("link kubectl-kpx")?;
        let words: Vec<_> = built
            .arch
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
        fs::write(self.stage.join(licenses::NAME), &built.licenses)?;
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
        let mut files = Files::default();
        for folder in FOLDERS {
            files.add_folder(&workspace::root().join(folder), folder)?;
        }
        for file in ["CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md"] {
            files.add_file(&workspace::root().join(file), file)?;
        }
        files.write(&self.stage)?;
        if let Some(home) = &self.home {
            home.publish(&self.stage.join("deploy"), self.version, digest)?;
            home.complete_page(&self.stage, self.version)?;
        }
        Ok(())
    }

    fn pack(&self, arch: Arch) -> Result<String> {
        let mut files = Files::default();
        files.add_folder(&self.stage, "")?;
        let archive = self.file(arch, "tar.gz");
        let top = archive.trim_end_matches(".tar.gz").to_owned();
        fs::write(
            self.folder.join(&archive),
            files.below(&top).tar_gz(self.time)?,
        )?;
        Ok(archive)
    }

    /// Writes an image for each architecture and, for several, one image for all. Runs kpx in each.
    /// Returns the files, and the digest of the last image.
    fn images(&self, built: &[Built]) -> Result<(Vec<String>, String)> {
        let name = self.home.as_ref().map_or(LOCAL_IMAGE, |home| &home.image);
        let roots = built.iter().map(|built| Ok((built.arch, root(built)?)));
        let roots = roots.collect::<Result<Vec<_>>>()?;
        let single = roots
            .iter()
            .map(|one| (self.file(one.0, "oci.tar"), std::slice::from_ref(one)));
        let all =
            (roots.len() > 1).then(|| (format!("kpx-{}-linux.oci.tar", self.version), &roots[..]));
        let (mut names, mut digest) = (Vec::new(), String::new());
        for (file, roots) in single.chain(all) {
            let path = self.folder.join(&file);
            let image = image::oci(roots, name, self.version, self.time)?;
            fs::write(&path, image.archive)?;
            roots
                .iter()
                .try_for_each(|(arch, _)| image::try_out(&path, *arch))?;
            names.push(file);
            digest = image.digest;
        }
        Ok((names, digest))
    }

    fn debian_package(&self, arch: Arch) -> Result<String> {
        let name = self.file(arch, "deb");
        let package = self.folder.join(&name);
        deb::pack(&package, arch, self.time)?;
        deb::look_into(&package, arch, self.version, &self.stage)?;
        Ok(name)
    }

    fn rpm_package(&self, arch: Arch) -> Result<String> {
        let name = self.file(arch, "rpm");
        rpm::pack(&self.folder.join(&name), arch, self.time, &metadata(arch)?)?;
        Ok(name)
    }
}

/// Returns the content of the image.
fn root(built: &Built) -> Result<Files> {
    let mut root = Files::default();
    root.add_file(&built.kpx, "usr/local/bin/kpx")?;
    root.add("usr/local/bin/kube-proxy", Entry::Link("kpx".to_owned()));
    root.add_file(&workspace::root().join("LICENSE"), "licenses/LICENSE")?;
    let licenses = Entry::File {
        content: built.licenses.clone().into_bytes(),
        executable: false,
    };
    root.add(&format!("licenses/{}", licenses::NAME), licenses);
    Ok(root)
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

/// Returns the time of the commit, or SOURCE_DATE_EPOCH, in seconds since 1970.
pub(crate) fn time() -> Result<u64> {
    const NAME: &str = "SOURCE_DATE_EPOCH";
    let text =
        match std::env::var(NAME) {
            Ok(text) => text,
            Err(_) => shell::git(workspace::root(), &["log", "-1", "--format=%ct"]).with_context(
                || format!("ask git for the time of the commit; without git, set {NAME}"),
            )?,
        };
    text.trim()
        .parse()
        .with_context(|| format!("{NAME}: {text:?} is not a number of seconds"))
}

#[cfg(test)]
#[path = "dist/tests.rs"]
mod tests;
