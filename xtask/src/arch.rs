//! The architectures of releases, and the tools to build for a foreign architecture.

use std::env::consts;
use std::process::Command;

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::setup::{self, Install};
use crate::shell;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Arch {
    #[value(alias = "x86_64")]
    Amd64,
    #[value(alias = "aarch64")]
    Arm64,
}

impl Arch {
    /// Returns this machine's architecture; an error if kpx has no release for it.
    pub(crate) fn of_this_machine() -> Result<Self> {
        [Self::Amd64, Self::Arm64]
            .into_iter()
            .find(|arch| arch.is_native())
            .context("kpx is not released for this machine: name an --arch")
    }

    /// Returns Rust's name, used in file names.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }

    /// Returns Go's name, used by OCI and Debian.
    pub(crate) fn go_name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// Returns true if this machine runs its programs without emulation.
    pub(crate) fn is_native(self) -> bool {
        self.name() == consts::ARCH
    }

    pub(crate) fn triple(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }

    fn compiler(self) -> String {
        format!("{}-linux-gnu-gcc", self.name())
    }

    /// Returns the emulator for programs of this architecture; `None` if the kernel runs them.
    pub(crate) fn emulator(self) -> Option<String> {
        (!self.is_native()).then(|| format!("qemu-{}-static", self.name()))
    }

    /// Installs the tools to build kpx for a foreign architecture, or fails with the commands to
    /// type.
    pub(crate) fn ensure_tools(self) -> Result<()> {
        let missing = || {
            let targets =
                shell::output("rustup", &["target", "list", "--installed"]).unwrap_or_default();
            self.missing(&targets, |tool| shell::which(tool).is_some())
        };
        setup::install(&format!("kpx for {}", self.go_name()), missing)
    }

    /// Returns the missing steps. `targets` are rustup's installed targets.
    fn missing(self, targets: &str, has: impl Fn(&str) -> bool) -> Vec<Install> {
        let Some(emulator) = self.emulator() else {
            return Vec::new();
        };
        let packages = match self {
            Self::Amd64 => [
                "gcc-x86-64-linux-gnu",
                "libc6-dev-amd64-cross",
                "qemu-user-static",
            ],
            Self::Arm64 => [
                "gcc-aarch64-linux-gnu",
                "libc6-dev-arm64-cross",
                "qemu-user-static",
            ],
        };
        let has_tools = [self.compiler(), emulator].iter().all(|tool| has(tool));
        let has_target = targets.lines().any(|target| target == self.triple());
        let steps = [
            (has_tools, Install::Packages(packages.to_vec())),
            (has_target, Install::Target(self.triple())),
        ];
        steps
            .into_iter()
            .filter_map(|(has, step)| (!has).then_some(step))
            .collect()
    }

    /// Makes a cargo command build for this architecture, with the kernel programs of `object`.
    pub(crate) fn choose(self, cargo: &mut Command, object: &std::path::Path) {
        let triple = self.triple();
        let compiler = self.compiler();
        let name = triple.replace('-', "_");
        cargo
            .args(["--target", &triple])
            .env("KPX_BPF_OBJECT", object);
        cargo
            .env(
                format!("CARGO_TARGET_{}_LINKER", name.to_uppercase()),
                &compiler,
            )
            .env(format!("CC_{name}"), &compiler);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn other() -> Arch {
        [Arch::Amd64, Arch::Arm64]
            .into_iter()
            .find(|arch| !arch.is_native())
            .unwrap()
    }

    #[test]
    fn own_architecture_takes_no_further_tools() {
        assert_eq!(Arch::of_this_machine().unwrap().missing("", |_| false), []);
    }

    #[test]
    fn other_architecture_takes_compiler_emulator_and_target() {
        let arch = other();
        let missing = arch.missing("x86_64-unknown-linux-musl\n", |_| false);
        let [Install::Packages(packages), Install::Target(target)] = missing.as_slice() else {
            panic!("{missing:?}")
        };
        assert!(packages.contains(&"qemu-user-static"), "{packages:?}");
        assert_eq!(*target, arch.triple());
        let targets = format!("{}\n", arch.triple());
        assert_eq!(arch.missing(&targets, |_| true), []);
        let without_emulator = arch.missing(&targets, |tool| tool != arch.emulator().unwrap());
        assert!(
            matches!(without_emulator.as_slice(), [Install::Packages(_)]),
            "{without_emulator:?}"
        );
    }
}
