//! Boots a kernel, and reads its console to the end.

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::debian::Kernel;
use super::report::{Guest, Report};
use crate::arch::Arch;

/// The number of console lines printed if a guest stops early.
const TAIL: usize = 40;
/// The kernel's command line, which disables slow features.
const COMMAND_LINE: &str = "loglevel=1 panic=-1 mitigations=off nokaslr net.ifnames=0";

/// The emulated machine of an architecture.
pub(super) struct Machine {
    pub(super) emulator: &'static str,
    /// All packages of the emulator, so that apt changes no other package.
    pub(super) packages: &'static [&'static str],
    name: &'static str,
    /// The emulated processor, where the processor itself does not run the guest.
    processor: &'static str,
    /// The architecture's part of the kernel's command line.
    command_line: &'static str,
}

impl Machine {
    pub(super) fn of(arch: Arch) -> Self {
        match arch {
            Arch::Amd64 => Self {
                emulator: "qemu-system-x86_64",
                packages: &[
                    "qemu-system-x86",
                    "qemu-system-common",
                    "qemu-system-data",
                    "seabios",
                ],
                name: "pc",
                // Without the flags for block copies. Emulated byte by byte, such instructions took
                // three quarters of a guest's time for loading the kernel programs.
                processor: "max,-erms,-fsrm,-fsrs,-fsrc,-fzrm",
                command_line: "console=ttyS0 tsc=reliable no_timer_check",
            },
            Arch::Arm64 => Self {
                emulator: "qemu-system-aarch64",
                packages: &["qemu-system-arm", "qemu-system-common", "qemu-system-data"],
                name: "virt",
                // A processor of today's clouds. It signs no pointers, which costs most to emulate.
                processor: "neoverse-n1",
                command_line: "console=ttyAMA0",
            },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Accelerator {
    /// The emulation in software, which works everywhere.
    Tcg,
    /// The processor itself, if it and this machine's kernel support virtualisation.
    Kvm,
}

impl Accelerator {
    /// Returns KVM if the processor supports it for this architecture. On other processors KVM may
    /// start without an error, but no guest runs.
    pub(super) fn best(arch: Arch) -> Self {
        let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let has = |flag| {
            flags
                .lines()
                .any(|line| line.starts_with("flags") && line.split(' ').any(|word| word == flag))
        };
        let usable = fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .is_ok();
        if usable && arch.is_native() && (has("vmx") || has("svm")) {
            Self::Kvm
        } else {
            Self::Tcg
        }
    }

    /// Returns the emulator's arguments. Software emulation is slow, and slower on a busy machine.
    /// The guest's clock therefore counts instructions, one per nanosecond, and skips idle time, so
    /// that load on the machine does not exceed the tests' deadlines.
    fn arguments(self, machine: &Machine) -> Vec<&'static str> {
        match self {
            Self::Tcg => vec![
                "-accel",
                "tcg,thread=single",
                "-icount",
                "shift=0,sleep=off",
                "-smp",
                "1",
                "-cpu",
                machine.processor,
            ],
            Self::Kvm => vec!["-accel", "kvm", "-cpu", "host", "-smp", "2"],
        }
    }
}

/// The default memory of a guest in GiB.
pub(super) const MEMORY_GIB: u32 = 4;

/// Boots a guest until it ends or its time is over. The file `log` gets the console's output.
pub(super) fn boot(
    accelerator: Accelerator,
    memory_gib: u32,
    kernel: &Kernel,
    initramfs: &Path,
    log: &Path,
    limit: Duration,
) -> Result<Report> {
    let machine = Machine::of(kernel.arch);
    let mut command = Command::new(machine.emulator);
    command.args(accelerator.arguments(&machine)).args([
        "-machine",
        machine.name,
        "-m",
        &format!("{memory_gib}G"),
        "-nodefaults",
        "-display",
        "none",
    ]);
    let command_line = format!("{COMMAND_LINE} {}", machine.command_line);
    command.args(["-no-reboot", "-serial", "stdio", "-append", &command_line]);
    command
        .arg("-kernel")
        .arg(&kernel.image)
        .arg("-initrd")
        .arg(initramfs);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let started = Instant::now();
    let mut child = command
        .spawn()
        .with_context(|| format!("run {}", machine.emulator))?;
    let (sender, lines) = mpsc::channel();
    let console = child.stdout.take().context("the console is piped")?;
    let errors = child
        .stderr
        .take()
        .context("the emulator's errors are piped")?;
    let mut kept = fs::File::create(log).with_context(|| format!("create {}", log.display()))?;
    thread::scope(|scope| {
        let readers = sender.clone();
        scope.spawn(move || send_lines(console, &readers));
        scope.spawn(move || send_lines(errors, &sender));
        let mut guest = Guest::default();
        let mut tail = VecDeque::new();
        let mut trouble = None;
        loop {
            match lines.recv_timeout(limit.saturating_sub(started.elapsed())) {
                Ok(line) => {
                    writeln!(kept, "{line}").with_context(|| format!("write {}", log.display()))?;
                    guest.take(&line, started.elapsed());
                    tail.push_back(line);
                    if tail.len() > TAIL {
                        tail.pop_front();
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    trouble = Some(format!("no end after {} s", limit.as_secs()));
                    child.kill().context("end the emulator")?;
                    break;
                }
            }
        }
        child.wait().context("wait for the emulator")?;
        Ok(guest.finish(started.elapsed(), trouble, tail.make_contiguous()))
    })
}

fn send_lines(from: impl std::io::Read, to: &mpsc::Sender<String>) {
    for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line)
            .trim_end_matches('\r')
            .to_owned();
        if to.send(line).is_err() {
            return; // The reader has ended.
        }
    }
}
