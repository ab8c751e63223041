//! Boots Debian's kernels in virtual machines, and runs tests in each: single packets through the
//! programs, and a cluster of network namespaces with real sockets.
//!
//! QEMU emulates a foreign architecture. Only programs, kernels and tools differ then.

mod cpio;
mod debian;
pub(crate) mod icount;
mod initramfs;
mod modules;
mod qemu;
mod report;
pub(crate) mod scale;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use self::debian::{Debian, NEWEST};
use self::initramfs::Userland;
use self::modules::Modules;
use self::qemu::Accelerator;
use self::report::Report;
use crate::arch::Arch;
use crate::build;
use crate::setup::{self, Need};
use crate::step::step;
use crate::{shell, workspace};

/// The kernels: the oldest supported kernel, those of stable releases, and Debian's newest.
const KERNELS: &[&str] = &["5.10", "6.1", "6.12", NEWEST];
/// The requested kernels that a run must not skip.
const MUST_RUN: &[&str] = &["6.1", "6.12"];
/// A program: path in the guest, package, its features, kind of the target, its name.
type Program = (
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    &'static str,
);

const PROGRAMS: &[Program] = &[
    ("init", "tools", "", "--bin", "kpx-guest"),
    ("bin/kpx", "proxy-agent", "", "--bin", "kpx"),
    ("bin/kernel", "kpx-tests", "", "--test", "kernel"),
    ("bin/vm", "kpx-tests", "", "--test", "vm"),
];

/// The guests' suites, fast suites first: name, required kernel modules and features (`-` for
/// none), program and arguments. Suites whose names have a common part before `/` are selected
/// together, and skipped separately.
const SUITES: &[&str] = &[
    "check - /bin/vm check::",
    "lines - /bin/vm lines::",
    "ipvs ip_vs,ip_vs_rr,dummy,ip_set,xt_set,nft_compat /bin/vm ipvs::",
    "sockets sctp /bin/vm --exact plain::pods_reach_services_by_the_default_mechanism",
    "sockets-by-clsact sctp,tcx /bin/vm --exact plain::pods_reach_services_by_clsact",
    "tunnels sctp,wireguard,ip6_tunnel /bin/vm --exact plain::pods_behind_tunnels_of_the_kernel_reach_services",
    "dsr ipip,ip6_tunnel /bin/vm dsr::",
    "shapes/vlan sctp,8021q /bin/vm --exact plain::nodes_on_a_vlan_serve",
    "shapes/bond sctp,bonding /bin/vm --exact plain::nodes_on_a_bond_serve",
    "shapes/macvlan sctp,macvlan /bin/vm --exact plain::pods_on_macvlan_devices_reach_services",
    "shapes/ipvlan sctp,ipvlan /bin/vm --exact plain::pods_on_ipvlan_devices_reach_other_services",
    "shapes/netkit sctp,netkit /bin/vm --exact plain::pods_on_netkit_pairs_reach_services",
    "packets - /bin/kernel --skip reference::",
];

/// The suite that compares a guest with this machine's kernel.
const LINES: &str = "lines";

/// The excluded tests: suite, test, and the reason why a guest cannot test it.
const LEFT_OUT: &[(&str, &str, &str)] = &[];

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Series of kernels, such as 6.1, or `newest`
    #[arg(long = "kernel", value_name = "SERIES", value_delimiter = ',')]
    #[arg(default_values_t = KERNELS.iter().map(|series| (*series).to_owned()))]
    kernels: Vec<String>,
    /// The kernels' architecture, by default this machine's; QEMU emulates another one
    #[arg(long, value_enum)]
    arch: Option<Arch>,
    /// Look for newer packages than those that were fetched before
    #[arg(long)]
    renew: bool,
    /// Go on with the next kernel when one fails
    #[arg(long)]
    keep_going: bool,
    /// Run only these tests: check, lines, ipvs, sockets, sockets-by-clsact, tunnels, dsr, shapes,
    /// packets
    #[arg(long, value_delimiter = ',', value_name = "SUITE")]
    only: Vec<String>,
    /// Use the programs of the last run
    #[arg(long)]
    no_build: bool,
    /// Seconds that a guest may take
    #[arg(long, default_value_t = 1800)]
    limit: u64,
    /// The accelerator of the guests; by default KVM if the processor has it
    #[arg(long)]
    accel: Option<Accelerator>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let arch = options.arch.map_or_else(Arch::of_this_machine, Ok)?;
    let suites = options.suites(arch)?;
    ensure!(
        arch.is_native() || options.accel != Some(Accelerator::Kvm),
        "KVM runs this machine's architecture only"
    );
    let debian = Debian::new(arch)?;
    debian.ensure_qemu()?;
    let folder = workspace::target_dir()?.join("vmtest").join(arch.go_name());
    let mut files = programs(&folder, arch, !options.no_build)?;
    if options.wants(LINES, arch) {
        files.push((LINES, lines_of_host(&folder)?));
    }
    let userland = Userland::new(&files, &debian.tools(options.renew)?, &suites)?;

    let mut outcomes = Vec::new();
    for name in &options.kernels {
        let outcome = one(&debian, &userland, &folder, name, options);
        let outcome = outcome.with_context(|| format!("kernel {name}"))?;
        let failed = matches!(&outcome, Outcome::Ran(report) if !report.is_good());
        println!("{outcome}");
        outcomes.push((name.as_str(), outcome));
        if failed && !options.keep_going {
            break;
        }
    }
    for (suite, test, why) in LEFT_OUT
        .iter()
        .filter(|(suite, ..)| options.wants(suite, arch))
    {
        println!("left out of {suite}: {test}: {why}");
    }
    conclude(&options.kernels, &outcomes)
}

impl Options {
    /// Returns the selected suites, one per line.
    fn suites(&self, arch: Arch) -> Result<String> {
        let name = |suite: &str| {
            suite
                .split([' ', '/'])
                .next()
                .unwrap_or_default()
                .to_owned()
        };
        let unknown = self
            .only
            .iter()
            .find(|only| !SUITES.iter().any(|suite| name(suite) == **only));
        if let Some(unknown) = unknown {
            bail!("there are no tests {unknown}");
        }
        ensure!(
            arch.is_native() || !self.only.iter().any(|only| only == LINES),
            "{LINES} compares with this machine's kernel, which is not of {}",
            arch.go_name()
        );
        let wanted = SUITES.iter().filter(|suite| self.wants(&name(suite), arch));
        let line = |suite: &&str| {
            let left_out = LEFT_OUT.iter().filter(|(of, ..)| *of == name(suite));
            let left_out: String = left_out
                .map(|(_, test, _)| format!(" --skip {test}"))
                .collect();
            format!("{suite}{left_out} --color never --test-threads 1\n")
        };
        Ok(wanted.map(line).collect())
    }

    fn wants(&self, suite: &str, arch: Arch) -> bool {
        if self.only.is_empty() {
            return suite != LINES || arch.is_native();
        }
        self.only.iter().any(|only| only == suite)
    }
}

enum Outcome {
    Ran(Report),
    /// The kernel is unavailable, for this reason.
    Skipped(String),
}

fn one(
    debian: &Debian,
    userland: &Userland,
    folder: &Path,
    name: &str,
    options: &Options,
) -> Result<Outcome> {
    let kernel = match debian.kernel(name, options.renew) {
        Ok(kernel) => kernel,
        Err(error) => return Ok(Outcome::Skipped(format!("{name}: SKIPPED: {error:#}"))),
    };
    let for_ipvs: &[_] = if options.wants("ipvs", kernel.arch) {
        &[modules::FOR_IPTABLES, modules::FOR_IPVS]
    } else {
        &[]
    };
    let plan =
        Modules::find(&kernel.modules)?.plan(&[&[modules::WANTED], for_ipvs].concat().concat())?;
    let initramfs = folder.join(format!("{name}.cpio"));
    fs::write(&initramfs, userland.pack(&plan)?)
        .with_context(|| format!("write {}", initramfs.display()))?;
    let log = folder.join(format!("{name}.log"));
    let accelerator = options
        .accel
        .unwrap_or_else(|| Accelerator::best(kernel.arch));
    let limit = Duration::from_secs(options.limit);
    step(&format!("test on {}", kernel.release), || {
        qemu::boot(
            accelerator,
            qemu::MEMORY_GIB,
            &kernel,
            &initramfs,
            &log,
            limit,
        )
        .map(Outcome::Ran)
    })
}

/// Fails unless everything that ran passed, and the requested kernels of [`MUST_RUN`] ran.
fn conclude(asked: &[String], outcomes: &[(&str, Outcome)]) -> Result<()> {
    println!(
        "{:<8} {:<34} {:>7} {:>7}",
        "SERIES", "KERNEL", "PASSED", "FAILED"
    );
    for (name, outcome) in outcomes {
        match outcome {
            Outcome::Ran(report) => {
                let verdict = if report.is_good() { "" } else { "  not good" };
                let passed = report.passed();
                let failed = report.failed();
                println!(
                    "{name:<8} {:<34} {passed:>7} {failed:>7}{verdict}",
                    report.kernel
                );
            }
            Outcome::Skipped(_) => println!("{name:<8} skipped: it is unavailable"),
        }
    }
    for name in MUST_RUN
        .iter()
        .filter(|name| asked.iter().any(|asked| asked == *name))
    {
        let ran = outcomes
            .iter()
            .any(|(ran, outcome)| ran == name && matches!(outcome, Outcome::Ran(_)));
        ensure!(
            ran,
            "no test ran on {name}, without which this run proves nothing"
        );
    }
    ensure!(
        outcomes
            .iter()
            .any(|(_, outcome)| matches!(outcome, Outcome::Ran(_))),
        "no test ran"
    );
    if !outcomes.iter().all(|(_, outcome)| {
        matches!(outcome, Outcome::Ran(report) if report.is_good())
            || matches!(outcome, Outcome::Skipped(_))
    }) {
        bail!("tests failed");
    }
    Ok(())
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ran(report) => report.fmt(f),
            Self::Skipped(why) => writeln!(f, "{why}"),
        }
    }
}

/// Returns the guests' programs as pairs: path in the guest, path on this machine. Builds them, or
/// uses those of the last run.
fn programs(folder: &Path, arch: Arch, build: bool) -> Result<Vec<(&'static str, PathBuf)>> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let mut other = None;
    if build {
        let toolchain = setup::ensure(Need::Lab)?;
        if arch.is_native() {
            build::object(&toolchain, &build::Options::default())?;
        } else {
            let object = build::object_for(&toolchain, &build::Options::default(), arch)?;
            other = Some((arch, object));
        }
    }
    let program = |(path, package, features, kind, name): &Program| {
        // Other builds overwrite cargo's own copy.
        let kept = folder.join(name);
        if build {
            let built = step(&format!("build {name}"), || {
                link(package, features, kind, name, false, other.as_ref())
            })?;
            fs::copy(&built, &kept).with_context(|| format!("copy {}", built.display()))?;
        }
        Ok((*path, kept))
    };
    PROGRAMS.iter().map(program).collect()
}

/// Writes a file with the source lines of the kernel programs that remain after this machine's
/// verifier has removed dead code.
fn lines_of_host(folder: &Path) -> Result<PathBuf> {
    let file = folder.join("lines");
    let mut command = shell::as_root(Path::new("env"))?;
    command
        .arg(format!("KPX_LINES={}", file.display()))
        .arg(folder.join("vm"))
        .args(["--quiet", "lines::"]);
    shell::run(command)?;
    Ok(file)
}

/// Links a program statically. Only this last step gets the flags, so that a plain build shares the
/// earlier steps. Another architecture than this machine's comes with its kernel programs.
fn link(
    package: &str,
    features: &str,
    kind: &str,
    name: &str,
    release: bool,
    other: Option<&(Arch, PathBuf)>,
) -> Result<PathBuf> {
    let mut cargo = workspace::cargo();
    cargo.args([
        "rustc",
        "--quiet",
        "--package",
        package,
        kind,
        name,
        "--message-format=json-render-diagnostics",
    ]);
    cargo.args(["--features", features]);
    cargo.args(release.then_some("--release"));
    if let Some((arch, object)) = other {
        arch.choose(&mut cargo, object);
    }
    cargo.args(["--", "-Ctarget-feature=+crt-static", "-Cstrip=symbols"]);
    let output = cargo
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("run cargo")?;
    ensure!(output.status.success(), "`{}` failed", shell::show(&cargo));
    let messages = String::from_utf8_lossy(&output.stdout);
    let made = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let made = made.filter(|message| message["target"]["name"] == name);
    let made = made
        .filter_map(|message| Some(PathBuf::from(message["executable"].as_str()?)))
        .next_back();
    made.with_context(|| format!("cargo does not say where {name} is"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    fn suites(arguments: &[&str], arch: Arch) -> Result<String> {
        Cli::parse_from([&["vmtest"], arguments].concat())
            .options
            .suites(arch)
    }

    #[test]
    fn lines_are_compared_on_one_architecture() {
        let foreign = [Arch::Amd64, Arch::Arm64]
            .into_iter()
            .find(|arch| !arch.is_native())
            .unwrap();
        let native = Arch::of_this_machine().unwrap();
        let all = suites(&[], native).unwrap();
        let without = suites(&[], foreign).unwrap();
        let difference: Vec<_> = all.lines().filter(|line| !without.contains(line)).collect();
        assert!(
            matches!(difference.as_slice(), [line] if line.starts_with("lines ")),
            "{difference:?}"
        );
        let error = suites(&["--only", "check,lines"], foreign).unwrap_err();
        assert!(
            error.to_string().contains("this machine's kernel"),
            "{error}"
        );
        assert!(suites(&["--only", "lines"], native).is_ok());
    }
}
