//! Finds or installs the tools for the build and the tests, without questions.
//!
//! A pure function decides on the next step from the facts and the steps tried so far. A loop
//! collects facts, runs the step and repeats. No step runs twice, so the loop ends.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, bail, ensure};

use crate::machine::{
    BENCH_TOOLS, COMPILER_PACKAGES, DEBIAN_LLVM, LLVM_PACKAGES, LLVM_PREFIX, Linker, Machine,
    TEST_TOOLS, TOOLS,
};
use crate::{axe, helm, resolved, shell, step, workspace};

const LINKER_VERSION: &str = "0.13.0";

/// The tools that a command needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    Build,
    /// The tools of `Build`, and the tools to run kpx in network namespaces.
    Lab,
    /// The tools of `Lab`, and the tools that load kube-proxy's rules for comparison.
    Bench,
    /// The tools of `Lab`, and the additional tools of tests.
    Tests,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Toolchain {
    pub(crate) compiler: Compiler,
    pub(crate) linker: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compiler {
    /// /usr/bin/rustc, with Debian's prebuilt `core` for the BPF target.
    Debian,
    /// rustup's nightly, which builds `core` from source.
    Nightly,
}

pub(crate) fn run() -> Result<()> {
    let Toolchain { compiler, linker } = ensure(Need::Tests)?;
    helm::ensure();
    axe::ensure();
    resolved::ensure();
    let compiler = match compiler {
        Compiler::Debian => "/usr/bin/rustc",
        Compiler::Nightly => "rustup's nightly",
    };
    println!(
        "kernel programs are built by {compiler} and {}",
        linker.display()
    );
    Ok(())
}

/// Installs the missing tools, or fails with the commands that would install them.
pub(crate) fn ensure(need: Need) -> Result<Toolchain> {
    let mut tried = Vec::new();
    loop {
        let machine = Machine::look();
        match next(&machine, need, &tried) {
            Next::Ready(toolchain) => {
                if need == Need::Tests && !machine.kubectl {
                    eprintln!("warning: no kubectl here: tests that use it will fail");
                    eprintln!(
                        "         (https://kubernetes.io/docs/tasks/tools/ says how to install it)"
                    );
                }
                return Ok(toolchain);
            }
            Next::Take(install) => {
                if let Err(error) = step::quiet(&install.name(), install.commands()) {
                    eprintln!("{error:#}");
                }
                tried.push(install);
            }
            Next::Stuck(help) => bail!(help),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Next {
    Ready(Toolchain),
    Take(Install),
    /// No step remains. The text has the commands that the user must run.
    Stuck(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Install {
    Packages(Vec<&'static str>),
    Nightly,
    /// A target of rustup's stable toolchain.
    Target(String),
    /// The linker for this compiler.
    Linker(Compiler),
}

/// Runs each possible step of `missing` once. If steps are still missing then, the error has their
/// commands.
pub(crate) fn install(what: &str, missing: impl Fn() -> Vec<Install>) -> Result<()> {
    let steps = missing();
    if steps.is_empty() {
        return Ok(());
    }
    let machine = Machine::look();
    for step in steps.iter().filter(|step| step.is_possible(&machine)) {
        if let Err(error) = step::quiet(&step.name(), step.commands()) {
            eprintln!("{error:#}");
        }
    }
    let left = missing();
    let mut text =
        format!("{what} takes more than could be installed from here; these commands would do it:");
    for command in left.iter().flat_map(Install::commands) {
        let _ = write!(text, "\n    {}", shell::show(&command));
    }
    ensure!(left.is_empty(), text);
    Ok(())
}

/// Returns the next step for the compiler with fewer missing steps, or for Debian's compiler in a
/// tie.
fn next(machine: &Machine, need: Need, tried: &[Install]) -> Next {
    let ways = [Compiler::Debian, Compiler::Nightly]
        .map(|compiler| (compiler, missing(machine, need, compiler)));
    let open = ways.iter().filter(|(_, missing)| {
        missing
            .iter()
            .all(|step| step.is_possible(machine) && !tried.contains(step))
    });
    let Some((compiler, missing)) = open.min_by_key(|(_, missing)| missing.len()) else {
        return Next::Stuck(help(machine, &ways));
    };
    match (missing.first(), &machine.linker) {
        (None, Some(linker)) => Next::Ready(Toolchain {
            compiler: *compiler,
            linker: linker.path.clone(),
        }),
        (Some(install), _) => Next::Take(install.clone()),
        (None, None) => unreachable!("without a linker, it is missing"),
    }
}

/// Returns the missing steps for this compiler, in order.
fn missing(machine: &Machine, need: Need, compiler: Compiler) -> Vec<Install> {
    let mut packages = Vec::new();
    let (llvm, has_compiler) = match compiler {
        Compiler::Debian => (
            machine.debian.unwrap_or(DEBIAN_LLVM),
            machine.debian.is_some(),
        ),
        Compiler::Nightly => (
            machine.nightly.unwrap_or_default(),
            machine.nightly.is_some(),
        ),
    };
    let has_linker = machine
        .linker
        .as_ref()
        .is_some_and(|linker| fits(linker, llvm));
    if compiler == Compiler::Debian {
        let wanted = [
            (has_compiler, COMPILER_PACKAGES),
            (has_linker, LLVM_PACKAGES),
        ];
        let wanted = wanted
            .iter()
            .filter(|(has, _)| !has)
            .flat_map(|(_, packages)| *packages);
        packages.extend(wanted.filter(|name| !machine.packages.iter().any(|there| there == *name)));
    }
    let tools: &[&[(&'static str, &'static str)]] = match need {
        Need::Build => &[],
        Need::Lab => &[TOOLS],
        Need::Bench => &[TOOLS, BENCH_TOOLS],
        Need::Tests => &[TOOLS, TEST_TOOLS],
    };
    let tools = tools
        .iter()
        .copied()
        .flatten()
        .filter(|(tool, _)| !machine.tools.contains(tool));
    packages.extend(tools.map(|(_, package)| package));
    let lacks_nightly = compiler == Compiler::Nightly && !has_compiler;
    let steps = [
        (!packages.is_empty(), Install::Packages(packages)),
        (lacks_nightly, Install::Nightly),
        (!has_linker, Install::Linker(compiler)),
    ];
    steps
        .into_iter()
        .filter_map(|(lacks, install)| lacks.then_some(install))
        .collect()
}

/// Returns true if the linker can read the compiler's output: LLVM reads output of older versions,
/// never of newer versions.
fn fits(linker: &Linker, llvm_of_compiler: u32) -> bool {
    linker.version == LINKER_VERSION && linker.llvm >= llvm_of_compiler
}

impl Install {
    fn is_possible(&self, machine: &Machine) -> bool {
        match self {
            Self::Packages(_) => machine.apt,
            Self::Nightly | Self::Target(_) => machine.rustup,
            Self::Linker(_) => true,
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Packages(names) => format!("install {}", names.join(" ")),
            Self::Nightly => {
                "install rustup's nightly toolchain with the sources of core".to_owned()
            }
            Self::Target(target) => format!("install rustup's target {target}"),
            Self::Linker(_) => format!("install bpf-linker {LINKER_VERSION}"),
        }
    }

    fn commands(&self) -> Vec<Command> {
        match self {
            Self::Packages(names) => {
                let install = [
                    &["install", "-y", "--no-install-recommends"],
                    names.as_slice(),
                ]
                .concat();
                vec![apt_get(&["update"]), apt_get(&install)]
            }
            Self::Nightly => vec![command(
                "rustup",
                &["toolchain", "install", "nightly", "--component", "rust-src"],
            )],
            Self::Target(target) => vec![command("rustup", &["target", "add", target])],
            Self::Linker(compiler) => vec![install_linker(*compiler)],
        }
    }
}

fn apt_get(args: &[&str]) -> Command {
    // Without root this step is only shown.
    let prefix = shell::root_prefix().unwrap_or(&["sudo"]);
    let words = [
        prefix,
        &["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"],
        args,
    ]
    .concat();
    command(words[0], &words[1..])
}

fn install_linker(compiler: Compiler) -> Command {
    // An unoptimised bpf-linker builds three times as fast, and hardly runs slower: nearly all of
    // its work happens in LLVM, which is optimised.
    let mut cargo = command(
        "cargo",
        &[
            "install",
            "bpf-linker",
            "--version",
            LINKER_VERSION,
            "--force",
            "--debug",
        ],
    );
    cargo.env("CARGO_PROFILE_DEV_DEBUG", "0");
    // A concurrent build of kpx waits for this installation, and holds the lock on its own target
    // directory.
    cargo.args([
        "--target-dir".as_ref(),
        std::env::temp_dir().join("kpx-bpf-linker").as_os_str(),
    ]);
    workspace::forget_xtask(&mut cargo);
    if compiler == Compiler::Debian {
        // bpf-linker's build would use Debian's default LLVM, which is too old.
        cargo.env("LLVM_PREFIX", LLVM_PREFIX);
        cargo.args([
            "--no-default-features",
            "--features",
            &format!("llvm-{DEBIAN_LLVM}"),
        ]);
    }
    cargo
}

fn command(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args);
    command
}

/// Explains why no step remains, and lists commands that would help.
fn help(machine: &Machine, ways: &[(Compiler, Vec<Install>)]) -> String {
    let mut text = String::from("something is missing that could not be installed from here\n");
    if let Some(linker) = &machine.linker {
        for (name, llvm) in [
            ("Debian's rustc", machine.debian),
            ("rustup's nightly", machine.nightly),
        ] {
            if let Some(llvm) = llvm.filter(|&llvm| llvm > linker.llvm) {
                let _ = writeln!(
                    text,
                    "{} has LLVM {} and cannot read what {name} writes, which has LLVM {llvm}: \
                     the linker's must not be older",
                    linker.path.display(),
                    linker.llvm
                );
            }
        }
        if linker.version != LINKER_VERSION {
            let path = linker.path.display();
            let _ = writeln!(
                text,
                "{path} is version {}, kpx is built with {LINKER_VERSION}",
                linker.version
            );
        }
    }
    for (compiler, missing) in ways {
        let with = match compiler {
            Compiler::Debian => "on Debian",
            Compiler::Nightly => "with rustup, and LLVM's libraries or a released bpf-linker",
        };
        let _ = writeln!(text, "{with}:");
        for command in missing.iter().flat_map(Install::commands) {
            let _ = writeln!(text, "    {}", shell::show(&command));
        }
    }
    text
}

#[cfg(test)]
#[path = "setup_tests.rs"]
mod tests;
