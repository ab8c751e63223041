//! What the kernel says of the kernel programs: are they accepted, how much work is that, how near are the limits.

mod stack;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use aya::Ebpf;
use aya::programs::SchedClassifier;
use aya_obj::Object;

use crate::shell;

/// A program that takes longer to be verified than this makes kpx slow to start, and is close to refusal.
const MAX_LOAD: Duration = Duration::from_millis(500);

/// Loads every program of an object, attached to nothing, and prints a line for each.
pub(crate) fn run(object: &Path) -> Result<()> {
    let prefix = shell::root_prefix().context("the kernel programs are built, but cannot be verified")?;
    let [program, args @ ..] = prefix else { return programs(object) };
    let mut command = Command::new(program);
    command.args(args).arg(std::env::current_exe().context("find this very program")?).arg("verify").arg(object);
    shell::run(command)
}

fn programs(object: &Path) -> Result<()> {
    let bytes = fs::read(object).with_context(|| format!("read {}", object.display()))?;
    let mut parsed = Object::parse(&bytes).with_context(|| format!("parse {}", object.display()))?;
    let stacks = stack::bytes(&mut parsed).with_context(|| format!("link {}", object.display()))?;
    let mut ebpf = Ebpf::load(&bytes).context("make the maps of the kernel programs")?;
    let mut bad = Vec::new();
    let mut programs: Vec<_> = ebpf.programs_mut().collect();
    programs.sort_by_key(|(name, _)| *name);
    println!("{:<12} {:>9} {:>9} {:>12}", "program", "verified", "stack", "to load");
    for (name, program) in programs {
        let program: &mut SchedClassifier = program.try_into().with_context(|| format!("program {name}"))?;
        let started = cpu_time()?;
        if let Err(error) = program.load() {
            bad.push(format!("the kernel refuses {name}: {error:?}"));
            continue;
        }
        let took = cpu_time()?.saturating_sub(started);
        let verified = program.info()?.verified_instruction_count();
        let verified = verified.map_or_else(|| "?".to_owned(), |count| count.to_string());
        println!("{name:<12} {verified:>9} {:>7} B {:>9} ms", stacks[name], took.as_millis());
        if took > MAX_LOAD {
            bad.push(format!("{name} takes {} ms to load, over {} ms", took.as_millis(), MAX_LOAD.as_millis()));
        }
    }
    println!("Limits: 1000000 instructions verified (\"?\": this kernel does not tell), {} B of stack.", stack::LIMIT);
    println!("The stack is read from the object: the deepest chain of calls, each frame as old kernels round it.");
    if bad.is_empty() { Ok(()) } else { bail!(bad.join("\n")) }
}

/// How long this thread has run: what else the machine does is not the programs' fault.
fn cpu_time() -> Result<Duration> {
    let stat = fs::read_to_string("/proc/thread-self/schedstat").context("read /proc/thread-self/schedstat")?;
    let nanoseconds = stat.split_whitespace().next().context("/proc/thread-self/schedstat is empty")?;
    ensure!(nanoseconds != "0", "the kernel does not count this thread's time");
    Ok(Duration::from_nanos(nanoseconds.parse()?))
}
