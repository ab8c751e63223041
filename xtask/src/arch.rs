//! The architectures that kpx is released for, and what another one than this machine's takes.

use std::env::consts;
use std::process::Command;

use anyhow::{Result, ensure};
use clap::ValueEnum;

use crate::shell;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Arch {
    #[value(alias = "x86_64")]
    Amd64,
    #[value(alias = "aarch64")]
    Arm64,
}

impl Arch {
    /// Returns this machine's; None if kpx is not released for it.
    pub(crate) fn of_this_machine() -> Option<Self> {
        [Self::Amd64, Self::Arm64].into_iter().find(|arch| arch.name() == consts::ARCH)
    }

    /// Returns the name in Rust's words, which files have.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }

    /// Returns the name in Go's words, which OCI uses.
    pub(crate) fn go_name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// Returns true if this machine runs its programs by itself.
    pub(crate) fn is_native(self) -> bool {
        self.name() == consts::ARCH
    }

    pub(crate) fn triple(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }

    fn compiler(self) -> String {
        format!("{}-linux-gnu-gcc", self.name())
    }

    /// Returns the program that runs programs of this architecture here; None if the kernel does.
    pub(crate) fn emulator(self) -> Option<String> {
        (!self.is_native()).then(|| format!("qemu-{}-static", self.name()))
    }

    /// Fails with what to install where something for another architecture is missing.
    pub(crate) fn demand_tools(self) -> Result<()> {
        let Some(emulator) = self.emulator() else { return Ok(()) };
        let has_target = shell::output("rustup", &["target", "list", "--installed"])
            .is_some_and(|targets| targets.lines().any(|target| target == self.triple()));
        let has_tools = [&self.compiler(), &emulator].iter().all(|tool| shell::which(tool).is_some());
        let (triple, arch) = (self.triple(), self.go_name());
        let packages =
            format!("gcc-{}-linux-gnu libc6-dev-{arch}-cross qemu-user-static", self.name().replace('_', "-"));
        ensure!(
            has_target && has_tools,
            "kpx for {arch} takes: rustup target add {triple}; apt-get install {packages}"
        );
        Ok(())
    }

    /// Has a cargo command build for this architecture, with the kernel programs of this object.
    pub(crate) fn choose(self, cargo: &mut Command, object: &std::path::Path) {
        let (triple, compiler) = (self.triple(), self.compiler());
        let name = triple.replace('-', "_");
        cargo.args(["--target", &triple]).env("KPX_BPF_OBJECT", object);
        cargo
            .env(format!("CARGO_TARGET_{}_LINKER", name.to_uppercase()), &compiler)
            .env(format!("CC_{name}"), &compiler);
    }
}
