//! Downloads kernels, the emulator, and tools for guests from Debian into the user's cache.
//!
//! The package lists are private: the machine's own apt sources are neither used nor changed.

use std::cmp::Reverse;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::qemu::Machine;
use crate::arch::Arch;
use crate::step::quiet;
use crate::{shell, workspace};

/// The word for Debian's newest kernel, in place of a series.
pub(super) const NEWEST: &str = "newest";
/// The suites of Debian's archive, newest first. None has an expired Release file, and each kernel
/// series is in one of them.
const KERNEL_SUITES: &[&str] = &[
    "trixie-backports",
    "trixie-security",
    "bookworm-backports",
    "bookworm-security",
    "bullseye-security",
];
/// The packages of the guests' tools.
const TOOLS: &[&str] = &[
    "ethtool",
    "iproute2",
    "ipset",
    "iptables",
    "ipvsadm",
    "nftables",
    "wireguard-tools",
];
/// apt's command for the named packages alone.
const ALONE: &[&str] = &["download"];
/// apt's command for packages with everything that they depend on: nothing counts as installed.
const WITH_DEPENDENCIES: &[&str] = &[
    "-oDir::State::status=/dev/null",
    "install",
    "-y",
    "--download-only",
    "--no-install-recommends",
];

pub(super) struct Kernel {
    pub(super) arch: Arch,
    /// The release, as `uname -r` prints it.
    pub(super) release: String,
    pub(super) image: PathBuf,
    /// The directory `lib/modules/<release>`.
    pub(super) modules: PathBuf,
}

pub(super) struct Debian {
    arch: Arch,
    cache: PathBuf,
}

impl Debian {
    pub(super) fn new(arch: Arch) -> Result<Self> {
        let home = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
        let cache = home
            .context("neither XDG_CACHE_HOME nor HOME says where to keep kernels")?
            .join("kpx/vmtest")
            .join(arch.go_name());
        fs::create_dir_all(&cache).with_context(|| format!("create {}", cache.display()))?;
        Ok(Self { arch, cache })
    }

    /// Installs the emulator if it is missing. Neither removes nor upgrades packages.
    pub(super) fn ensure_qemu(&self) -> Result<()> {
        let machine = Machine::of(self.arch);
        if shell::which(machine.emulator).is_some() {
            return Ok(());
        }
        let installing = || format!("install {}", machine.emulator);
        let apt = Self::new(Arch::of_this_machine()?)?
            .apt_of_release()
            .with_context(installing)?;
        // Bookworm's own emulator conflicts with the disk image tools of bookworm-backports.
        let from = if codename()? == "bookworm" {
            "/bookworm-backports"
        } else {
            ""
        };
        let packages = machine
            .packages
            .iter()
            .map(|name| format!("{name}{from}"))
            .collect::<Vec<_>>();
        let prefix = shell::root_prefix()?;
        let words = [
            prefix,
            &["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"],
        ]
        .concat();
        let mut install = Command::new(words[0]);
        install.args(&words[1..]).arg("-c").arg(&apt.config);
        install
            .args([
                "install",
                "-y",
                "--no-install-recommends",
                "--no-remove",
                "--no-upgrade",
            ])
            .args(packages);
        quiet("install QEMU", [install])
    }

    /// Downloads the guests' tools with their libraries, which this machine need not have. Returns
    /// the root directory of the unpacked packages. Uses the cache unless `renew`.
    pub(super) fn tools(&self, renew: bool) -> Result<PathBuf> {
        let folder = self.cache.join("tools");
        if renew || !folder.exists() {
            let apt = self.apt_of_release()?;
            unpack(&folder, |part| apt.fetch(WITH_DEPENDENCIES, TOOLS, part))?;
        }
        Ok(folder)
    }

    /// Returns the newest kernel of a series (`6.1`), or of all series ([`NEWEST`]). Uses the cache
    /// unless `renew`.
    pub(super) fn kernel(&self, name: &str, renew: bool) -> Result<Kernel> {
        let series = (name != NEWEST).then_some(name);
        let folder = self.cache.join("kernels").join(name);
        if renew || !folder.exists() {
            let apt = self.apt("kernels", KERNEL_SUITES)?;
            self.fetch(&apt, series, &folder)?;
        }
        Kernel::find(self.arch, &folder)
    }

    fn fetch(&self, apt: &Apt, series: Option<&str>, folder: &Path) -> Result<()> {
        let names = apt.kernels()?;
        let mut versions: Vec<&str> = names
            .iter()
            .filter_map(|name| version(name, self.arch, series))
            .collect();
        versions.sort_by_key(|version| Reverse(numbers(version)));
        ensure!(
            !versions.is_empty(),
            "the suites {} have none",
            KERNEL_SUITES.join(", ")
        );
        // A list may name packages that have left the archive.
        let mut errors = Vec::new();
        for version in versions.iter().take(3) {
            let arch = self.arch.go_name();
            let package = |kind: &str| format!("linux-{kind}-{version}-cloud-{arch}");
            let fetched = unpack(folder, |part| {
                apt.fetch(ALONE, &[&package("image")], part)?;
                // Newer kernels have two packages.
                if Kernel::find(self.arch, part).is_err() {
                    apt.fetch(ALONE, &[&package("binary"), &package("modules")], part)?;
                }
                Kernel::find(self.arch, part).map(drop)
            });
            match fetched {
                Ok(()) => return Ok(()),
                Err(error) => errors.push(format!("{version}: {error:#}")),
            }
        }
        bail!("none of the newest can be fetched: {}", errors.join("; "))
    }

    /// Returns the packages of the release of Debian that this machine has.
    fn apt_of_release(&self) -> Result<Apt> {
        let codename = codename()?;
        let suites =
            ["", "-updates", "-security", "-backports"].map(|ending| format!("{codename}{ending}"));
        self.apt("release", &suites.each_ref().map(String::as_str))
    }

    /// Downloads the current lists of these suites.
    fn apt(&self, name: &str, suites: &[&str]) -> Result<Apt> {
        let folder = self.cache.join("apt").join(name);
        for below in ["lists/partial", "archives/partial"] {
            fs::create_dir_all(folder.join(below))?;
        }
        let sources = suites.iter().map(|suite| {
            let archive = if suite.ends_with("-security") {
                "debian-security"
            } else {
                "debian"
            };
            format!("deb http://deb.debian.org/{archive} {suite} main\n")
        });
        fs::write(folder.join("sources.list"), sources.collect::<String>())?;
        let config = folder.join("apt.conf");
        let at = folder.display();
        let arch = self.arch.go_name();
        fs::write(
            &config,
            format!(
                "APT::Architecture \"{arch}\";\nDir::Etc::sourcelist \"{at}/sources.list\";\nDir::Etc::sourceparts \"/dev/null\";\n\
                 Dir::State::lists \"{at}/lists\";\nDir::Cache \"{at}\";\nDir::Cache::archives \"archives\";\n\
                 Dir::Cache::pkgcache \"pkgcache.bin\";\nDir::Cache::srcpkgcache \"srcpkgcache.bin\";\n\
                 Debug::NoLocking \"true\";\nAPT::Sandbox::User \"\";\nAcquire::Languages \"none\";\n\
                 #clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n\
                 #clear Acquire::IndexTargets;\n\
                 Acquire::IndexTargets::deb::Packages {{ MetaKey \"$(COMPONENT)/binary-$(ARCHITECTURE)/Packages\"; \
                 flatMetaKey \"Packages\"; ShortDescription \"Packages\"; Optional \"no\"; }};\n"
            ),
        )?;
        let apt = Apt { config };
        quiet(
            &format!("fetch Debian's lists for {name} of {arch}"),
            [apt.command("apt-get", &["update"])],
        )?;
        Ok(apt)
    }
}

struct Apt {
    config: PathBuf,
}

impl Apt {
    fn kernels(&self) -> Result<Vec<String>> {
        let output = self
            .command("apt-cache", &["pkgnames", "linux-image-"])
            .output()
            .context("run apt-cache")?;
        Ok(String::from_utf8_lossy(&output.stdout)
            .lines()
            .map(str::to_owned)
            .collect())
    }

    /// Downloads packages by a command of apt, and unpacks them into a directory.
    fn fetch(&self, how: &[&str], packages: &[&str], folder: &Path) -> Result<()> {
        let at = tempfile::tempdir().context("make a folder for packages")?;
        let archives = format!("-oDir::Cache::archives={}", at.path().display());
        fs::create_dir(at.path().join("partial"))?;
        let mut fetch = self.command("apt-get", &[&archives]);
        fetch.args(how).args(packages).current_dir(at.path());
        quiet(&format!("fetch {}", packages.join(" ")), [fetch])?;
        for entry in fs::read_dir(at.path())? {
            let path = entry?.path();
            if path.extension().is_some_and(|ending| ending == "deb") {
                let mut dpkg = Command::new("dpkg");
                dpkg.arg("-x").arg(path).arg(folder);
                shell::run(dpkg)?;
            }
        }
        Ok(())
    }

    fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        workspace::forget_xtask(&mut command);
        command.arg("-c").arg(&self.config).args(args);
        command
    }
}

/// Replaces the content of a directory. After an interruption, no directory looks complete.
fn unpack(folder: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let part = folder.with_extension("part");
    for old in [&part, folder] {
        if old.exists() {
            fs::remove_dir_all(old).with_context(|| format!("remove {}", old.display()))?;
        }
    }
    fs::create_dir_all(&part).with_context(|| format!("create {}", part.display()))?;
    fill(&part)?;
    fs::rename(&part, folder).with_context(|| format!("rename to {}", folder.display()))
}

impl Kernel {
    fn find(arch: Arch, folder: &Path) -> Result<Self> {
        let below = |path: &str| {
            let entries = fs::read_dir(folder.join(path))
                .into_iter()
                .flatten()
                .flatten();
            entries.map(|entry| entry.path()).collect::<Vec<_>>()
        };
        let mut modules = ["lib/modules", "usr/lib/modules"]
            .into_iter()
            .flat_map(below);
        let modules = modules.find(|path| path.join("kernel").is_dir());
        let modules = modules.with_context(|| format!("no modules in {}", folder.display()))?;
        let release = modules
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        let images = [
            folder.join(format!("boot/vmlinuz-{release}")),
            modules.join("vmlinuz"),
        ];
        let image = images.into_iter().find(|image| image.exists());
        let image = image.with_context(|| format!("no kernel in {}", folder.display()))?;
        Ok(Self {
            arch,
            release,
            image,
            modules,
        })
    }
}

/// Returns the version in a package's name, if it is a kernel of that architecture and series for
/// virtual machines.
fn version<'a>(package: &'a str, arch: Arch, series: Option<&str>) -> Option<&'a str> {
    let version = package
        .strip_prefix("linux-image-")?
        .strip_suffix(arch.go_name())?
        .strip_suffix("-cloud-")?;
    // A name without a patch level is a metapackage.
    let in_series = match series {
        Some(series) => version.strip_prefix(series)?.starts_with('.'),
        None => numbers(version).len() > 2,
    };
    in_series.then_some(version)
}

fn numbers(version: &str) -> Vec<u32> {
    version
        .split(|letter: char| !letter.is_ascii_digit())
        .filter_map(|number| number.parse().ok())
        .collect()
}

fn codename() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release").context("read /etc/os-release")?;
    let codename = text
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    ensure!(
        text.lines().any(|line| line == "ID=debian"),
        "this is no Debian, whose packages guests consist of"
    );
    Ok(codename.context("this Debian has no name")?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_of_a_series_is_found_by_numbers() {
        let packages = [
            "linux-image-6.1.0-9-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64-unsigned",
            "linux-image-6.1.0-0.deb11.52-cloud-amd64",
            "linux-image-6.1-cloud-amd64",
            "linux-image-6.12.117+deb13-cloud-amd64",
            "linux-image-6.12.9+deb13-cloud-amd64",
            "linux-image-cloud-amd64",
            "linux-image-6.1.0-57-cloud-arm64",
            "linux-image-6.1.0-57-cloud-arm64-dbg",
            "linux-image-6.1.0-58-arm64",
            "linux-image-6.1-cloud-arm64",
        ];
        let newest_of = |arch, series| {
            packages
                .iter()
                .filter_map(|name| version(name, arch, series))
                .max_by_key(|v| numbers(v))
        };
        let newest = |series| newest_of(Arch::Amd64, series);
        assert_eq!(newest(Some("6.1")), Some("6.1.0-56"));
        assert_eq!(newest(Some("6.12")), Some("6.12.117+deb13"));
        assert_eq!(newest(Some("5.15")), None);
        assert_eq!(newest(None), Some("6.12.117+deb13"));
        assert_eq!(newest_of(Arch::Arm64, Some("6.1")), Some("6.1.0-57"));
        assert_eq!(newest_of(Arch::Arm64, Some("6.12")), None);
    }
}
