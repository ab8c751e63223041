//! Detects what this machine has for the build and the tests; `setup` decides.

use std::fs;
use std::path::{Path, PathBuf};

use crate::shell::{has_sudo, is_executable, is_root, output, which};

/// Debian's Rust for web browsers: newer than Debian's `rustc`, with a prebuilt `core` for the BPF
/// target.
pub(crate) const COMPILER_PACKAGES: &[&str] =
    &["rustc-web", "cargo-web", "libstd-rust-web-dev-bpf"];
/// The libraries that bpf-linker links against.
pub(crate) const LLVM_PACKAGES: &[&str] = &[
    "llvm-22-dev",
    "libpolly-22-dev",
    "libzstd-dev",
    "zlib1g-dev",
];
pub(crate) const LLVM_PREFIX: &str = "/usr/lib/llvm-22";
/// The LLVM version of [`COMPILER_PACKAGES`] and [`LLVM_PACKAGES`].
pub(crate) const DEBIAN_LLVM: u32 = 22;
/// The lab's tools and their packages.
pub(crate) const TOOLS: &[(&str, &str)] = &[
    ("ip", "iproute2"),
    ("nft", "nftables"),
    ("ethtool", "ethtool"),
];
pub(crate) const BENCH_TOOLS: &[(&str, &str)] = &[("iptables-nft-restore", "iptables")];
pub(crate) const TEST_TOOLS: &[(&str, &str)] = &[
    ("iptables-nft-restore", "iptables"),
    ("dbus-daemon", "dbus-daemon"),
    ("socat", "socat"),
    ("unzip", "unzip"),
    ("chromium", "chromium"),
    ("chromedriver", "chromium-driver"),
];

/// The tools of this machine, as `setup` needs them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Machine {
    /// True on a Debian whose packages xtask may install.
    pub(crate) apt: bool,
    pub(crate) rustup: bool,
    /// The major LLVM version of Debian's rustc, if rustc can build for the BPF target.
    pub(crate) debian: Option<u32>,
    /// The major LLVM version of rustup's nightly, if it has the sources of `core`.
    pub(crate) nightly: Option<u32>,
    pub(crate) linker: Option<Linker>,
    /// The installed packages of [`COMPILER_PACKAGES`] and [`LLVM_PACKAGES`].
    pub(crate) packages: Vec<String>,
    /// The installed tools of [`TOOLS`] and [`TEST_TOOLS`].
    pub(crate) tools: Vec<&'static str>,
    pub(crate) kubectl: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Linker {
    pub(crate) path: PathBuf,
    pub(crate) version: String,
    /// The major version of the linker's LLVM.
    pub(crate) llvm: u32,
}

impl Machine {
    pub(crate) fn look() -> Self {
        let rustup = which("rustup").is_some();
        Self {
            apt: which("apt-get").is_some()
                && is_debian()
                && (is_root().unwrap_or(false) || has_sudo()),
            rustup,
            debian: debian_llvm(),
            nightly: if rustup { nightly_llvm() } else { None },
            linker: linker(),
            packages: installed_packages(),
            tools: TOOLS
                .iter()
                .chain(TEST_TOOLS)
                .map(|&(tool, _)| tool)
                .filter(|tool| which(tool).is_some())
                .collect(),
            kubectl: which("kubectl").is_some(),
        }
    }
}

fn is_debian() -> bool {
    fs::read_to_string("/etc/os-release")
        .is_ok_and(|text| text.lines().any(|line| line == "ID=debian"))
}

fn debian_llvm() -> Option<u32> {
    let lib_dir = output(
        "/usr/bin/rustc",
        &["--print", "target-libdir", "--target", "bpfel-unknown-none"],
    )?;
    let has_core = fs::read_dir(lib_dir.trim())
        .ok()?
        .flatten()
        .any(|file| file.file_name().to_string_lossy().starts_with("libcore-"));
    if !has_core || !is_executable(Path::new("/usr/bin/cargo")) {
        return None;
    }
    llvm_major(&output("/usr/bin/rustc", &["-vV"])?)
}

fn nightly_llvm() -> Option<u32> {
    let sysroot = output("rustup", &["run", "nightly", "rustc", "--print", "sysroot"])?;
    if !Path::new(sysroot.trim())
        .join("lib/rustlib/src/rust/library/core")
        .is_dir()
    {
        return None;
    }
    llvm_major(&output("rustup", &["run", "nightly", "rustc", "-vV"])?)
}

/// Returns the bpf-linker of `cargo install`, or the bpf-linker on the PATH.
fn linker() -> Option<Linker> {
    let cargo_home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let installed = cargo_home
        .map(|home| home.join("bin/bpf-linker"))
        .filter(|file| is_executable(file));
    let path = installed.or_else(|| which("bpf-linker"))?;
    let about = output(&path, &["--version"])?;
    let version = about.trim().strip_prefix("bpf-linker ")?.to_owned();
    // bpf-linker does not print its LLVM version, but passes arguments to LLVM.
    let asked = [
        "--target",
        "bpfel",
        "--llvm-args=--version",
        "--output",
        "/dev/null",
        "/dev/null",
    ];
    let llvm = llvm_major(&output(&path, &asked)?)?;
    Some(Linker {
        path,
        version,
        llvm,
    })
}

fn installed_packages() -> Vec<String> {
    // dpkg-query fails if a package is unknown, but still lists the known packages. `output` would
    // drop this list.
    let query = std::process::Command::new("dpkg-query")
        .args(["-W", "-f", "${Package} ${db:Status-Status}\\n"])
        .args([COMPILER_PACKAGES, LLVM_PACKAGES].concat())
        .output();
    let text = query
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    text.lines()
        .filter_map(|line| line.strip_suffix(" installed"))
        .map(str::to_owned)
        .collect()
}

/// Parses the 22 of rustc's "LLVM version: 22.1.8" and of LLVM's own "Debian LLVM version 22.1.8".
fn llvm_major(about: &str) -> Option<u32> {
    let (_, version) = about.split_once("LLVM version")?;
    version
        .trim_start_matches([':', ' '])
        .split('.')
        .next()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::llvm_major;

    #[test]
    fn llvm_is_read_from_compiler_and_linker() {
        assert_eq!(
            llvm_major("host: x86_64\nrelease: 1.96.0\nLLVM version: 22.1.8\n"),
            Some(22)
        );
        assert_eq!(
            llvm_major("Debian LLVM version 22.1.8\n  Optimized build.\n"),
            Some(22)
        );
        assert_eq!(
            llvm_major("LLVM (http://llvm.org/):\n  LLVM version 23.0.0git\n"),
            Some(23)
        );
        assert_eq!(llvm_major("bpf-linker 0.13.0"), None);
    }
}
