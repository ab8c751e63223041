//! Verifies the kernel programs: the kernel must accept them within the limits.

mod cycle;
mod stack;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use aya::programs::{Program, ProgramError, ProgramInfo};
use aya::{Ebpf, EbpfLoader};
use aya_obj::Object;
use proxy_common::names;

use crate::shell;

/// The limit on verified instructions: a larger program slows the start of kpx, and a kernel may
/// soon refuse it.
const MAX_VERIFIED: u32 = 240_000;

/// Loads every program of an object without attaching it, and prints a line for each.
pub(crate) fn run(object: &Path) -> Result<()> {
    let prefix =
        shell::root_prefix().context("the kernel programs are built, but cannot be verified")?;
    let [program, args @ ..] = prefix else {
        return programs(object);
    };
    let mut command = Command::new(program);
    command
        .args(args)
        .arg(std::env::current_exe().context("find this very program")?)
        .arg("verify")
        .arg(object);
    shell::run(command)
}

/// Checks the object for constructs that old kernels refuse and this machine's kernel may accept.
pub(crate) fn is_fit_for_old_kernels(object: &Path) -> Result<()> {
    let bytes = fs::read(object).with_context(|| format!("read {}", object.display()))?;
    let mut parsed =
        Object::parse(&bytes).with_context(|| format!("parse {}", object.display()))?;
    cycle::check(&mut parsed).with_context(|| format!("{} is not for Linux 5.10", object.display()))
}

fn programs(object: &Path) -> Result<()> {
    let bytes = fs::read(object).with_context(|| format!("read {}", object.display()))?;
    let mut parsed =
        Object::parse(&bytes).with_context(|| format!("parse {}", object.display()))?;
    let stacks = stack::bytes(&mut parsed).with_context(|| format!("link {}", object.display()))?;
    let mut bad = Vec::new();
    println!(
        "{:<20} {:>9} {:>9} {:>12}",
        "program", "verified", "stack", "to load"
    );
    for (fast_path, hands_over, title) in [
        (0_u32, 0_u32, "without --fast-path:"),
        (1, 0, "with --fast-path:"),
        (1, 1, "with --fast-path and --external-forwarding dsr:"),
    ] {
        println!("{title}");
        let mut loader = EbpfLoader::new();
        // All socket options are set, so that the verifier follows all branches.
        loader.override_global(names::SOCKET_FLAGS, &u32::MAX, true);
        let ebpf = loader
            .override_global(names::FAST_PATH, &fast_path, true)
            .override_global(names::HANDS_OVER, &hands_over, true)
            .load(&bytes);
        load_all(
            &mut ebpf.context("make the maps of the kernel programs")?,
            &stacks,
            &mut bad,
        )?;
    }
    println!(
        "Limits: 1000000 instructions verified (\"?\": not reported by this kernel), {} B of stack.",
        stack::LIMIT
    );
    println!(
        "The stack is read from the object: the deepest chain of calls, each frame as old kernels round it."
    );
    if bad.is_empty() {
        Ok(())
    } else {
        bail!(bad.join("\n"))
    }
}

fn load_all(ebpf: &mut Ebpf, stacks: &BTreeMap<String, u32>, bad: &mut Vec<String>) -> Result<()> {
    let mut programs: Vec<_> = ebpf.programs_mut().collect();
    programs.sort_by_key(|(name, _)| *name);
    for (name, program) in programs {
        let started = cpu_time()?;
        let info = match load(program) {
            Ok(info) => info,
            Err(error) => {
                bad.push(format!("the kernel refuses {name}: {error:?}"));
                continue;
            }
        };
        let took = cpu_time()?.saturating_sub(started);
        let verified = info.verified_instruction_count();
        let verified = verified.map_or_else(|| "?".to_owned(), |count| count.to_string());
        println!(
            "{name:<20} {verified:>9} {:>7} B {:>9} ms",
            stacks[name],
            took.as_millis()
        );
        if stacks[name] > stack::LIMIT {
            bad.push(format!(
                "{name} takes {} B of stack, over {} B",
                stacks[name],
                stack::LIMIT
            ));
        }
        if let Some(count) = info
            .verified_instruction_count()
            .filter(|&count| count > MAX_VERIFIED)
        {
            bad.push(format!(
                "{name} takes {count} instructions to verify, over {MAX_VERIFIED}"
            ));
        }
    }
    Ok(())
}

fn load(program: &mut Program) -> Result<ProgramInfo, ProgramError> {
    match program {
        Program::SchedClassifier(program) => program.load().and_then(|()| program.info()),
        Program::CgroupSockAddr(program) => program.load().and_then(|()| program.info()),
        Program::SockOps(program) => program.load().and_then(|()| program.info()),
        _ => Err(ProgramError::UnexpectedProgramType),
    }
}

/// Returns this thread's CPU time, which does not depend on the machine's load.
fn cpu_time() -> Result<Duration> {
    let stat = fs::read_to_string("/proc/thread-self/schedstat")
        .context("read /proc/thread-self/schedstat")?;
    let nanoseconds = stat
        .split_whitespace()
        .next()
        .context("/proc/thread-self/schedstat is empty")?;
    ensure!(
        nanoseconds != "0",
        "the kernel does not count this thread's time"
    );
    Ok(Duration::from_nanos(nanoseconds.parse()?))
}
