//! The init process of a virtual machine. It runs the tests of `cargo xtask vmtest`, prints their
//! results to the console, and powers the machine off.
//!
//! Its own lines begin with `kpx-guest: `; the tests' output is unchanged.

mod kernel;

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::resource::{Resource, setrlimit};

/// Each line has a name, the required kernel features, a program, and its arguments. The features
/// are modules, [`TCX`] and [`NETKIT`], comma-separated, or `-`.
const SUITES: &str = "/etc/suites";
const NETKIT: &str = "netkit";
const TCX: &str = "tcx";
const TCX_SINCE: (u32, u32) = (6, 6);
/// The limit of open files. The kernel's own is 1024, and tests hold the maps of several loads.
const OPEN_FILES: u64 = 65_536;

struct Suite<'a> {
    name: &'a str,
    needs: Vec<&'a str>,
    program: &'a str,
    arguments: Vec<&'a str>,
}

fn main() {
    if std::process::id() != 1 {
        eprintln!("this is the first process of a virtual machine, and would switch this one off");
        std::process::exit(1);
    }
    if let Err(error) = run() {
        report(&format!("complaint {error:#}"));
    }
    report("end");
    nix::unistd::sync();
    // If init returned, the kernel would panic, which the host reports as a failure.
    let _off = reboot(RebootMode::RB_POWER_OFF);
}

fn run() -> Result<()> {
    kernel::mount_all()?;
    report(&format!("kernel {}", kernel::release()?));
    setrlimit(Resource::RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES)
        .context("raise the limit of open files")?;
    let missing = kernel::load_modules()?;
    let suites = fs::read_to_string(SUITES).with_context(|| format!("read {SUITES}"))?;
    for line in suites.lines() {
        let suite = Suite::parse(line).with_context(|| format!("{SUITES}: {line}"))?;
        if let Some(why) = suite.is_for_others(&missing)? {
            report(&format!("skipped {} {why}", suite.name));
            continue;
        }
        report(&format!("suite {}", suite.name));
        let code = suite.run()?;
        report(&format!("ended {code}"));
    }
    kernel::complaints()?
        .iter()
        .for_each(|complaint| report(&format!("complaint {complaint}")));
    Ok(())
}

impl<'a> Suite<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.split(' ');
        let name = words.next()?;
        let needs = words.next()?;
        let program = words.next()?;
        let needs = needs.split(',').filter(|need| *need != "-").collect();
        Some(Self {
            name,
            needs,
            program,
            arguments: words.collect(),
        })
    }

    /// Returns the reason why the suite does not apply to this kernel.
    fn is_for_others(&self, missing: &[String]) -> Result<Option<String>> {
        if self.needs.contains(&TCX) && testbed::kernel::version()? < TCX_SINCE {
            return Ok(Some(
                "this kernel has no TCX: programs are attached by clsact".to_owned(),
            ));
        }
        if self.needs.contains(&NETKIT) && !kernel::makes_netkit()? {
            return Ok(Some("this kernel makes no netkit devices".to_owned()));
        }
        let lacks = self
            .needs
            .iter()
            .find(|need| missing.iter().any(|missing| missing == *need));
        Ok(lacks.map(|module| format!("this kernel has no module {module}")))
    }

    fn run(&self) -> Result<i32> {
        let mut command = Command::new(self.program);
        command.args(&self.arguments).stdin(Stdio::null());
        command.envs([
            ("PATH", "/bin:/sbin"),
            ("HOME", "/root"),
            ("KPX_BIN", "/bin/kpx"),
            ("RUST_BACKTRACE", "0"),
        ]);
        let status = command
            .status()
            .with_context(|| format!("run {}", self.program))?;
        Ok(status.code().unwrap_or(-1))
    }
}

fn report(what: &str) {
    println!("kpx-guest: {what}");
}
