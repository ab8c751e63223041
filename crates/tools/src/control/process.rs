//! The resources of a process, from `/proc`.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::unistd::Pid;
use serde::Serialize;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Process(pub(crate) Pid);

/// In bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Memory {
    /// `VmRSS`.
    pub resident: u64,
    /// The part without a file.
    pub anonymous: u64,
    /// The peak, `VmHWM`.
    pub peak: u64,
}

impl Process {
    pub(crate) fn memory(self) -> Result<Memory> {
        let text = self.read("status")?;
        let field = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name))?;
            value
                .split_whitespace()
                .next()?
                .parse::<u64>()
                .ok()
                .map(|kilobytes| kilobytes << 10)
        };
        let field =
            |name: &str| field(name).with_context(|| format!("no {name} of process {}", self.0));
        Ok(Memory {
            resident: field("VmRSS:")?,
            anonymous: field("RssAnon:")?,
            peak: field("VmHWM:")?,
        })
    }

    /// Returns the CPU time of all threads, including ended threads.
    pub(crate) fn cpu(self) -> Result<Duration> {
        // Fields 14 and 15: user and system time.
        self.cpu_of(2)
    }

    /// Returns the same with waited-for children, such as tools.
    pub(crate) fn cpu_with_children(self) -> Result<Duration> {
        // Fields 16 and 17 are those of children.
        self.cpu_of(4)
    }

    /// Measures the share of a core, in percent, of it and its tools during `time`.
    pub(crate) fn share(self, time: Duration) -> Result<f64> {
        let before = self.cpu_with_children()?;
        let began = Instant::now();
        thread::sleep(time);
        let cpu = self.cpu_with_children()?.saturating_sub(before);
        Ok(100.0 * cpu.as_secs_f64() / began.elapsed().as_secs_f64())
    }

    /// Sums fields of `/proc/PID/stat` from the 14th on. Counting begins after the name, which may
    /// contain spaces.
    fn cpu_of(self, fields: usize) -> Result<Duration> {
        let text = self.read("stat")?;
        let (_, after) = text.rsplit_once(')').context("no name in /proc/PID/stat")?;
        let ticks = after
            .split_whitespace()
            .skip(11)
            .take(fields)
            .filter_map(|ticks| ticks.parse::<u64>().ok());
        Ok(Duration::from_millis(
            ticks.sum::<u64>() * 1_000 / CLOCK_TICKS,
        ))
    }

    /// Returns the exact CPU time of the live threads. The time of an ended thread is lost, so only
    /// short intervals can be measured.
    pub(crate) fn cpu_of_threads(self) -> Result<Duration> {
        let mut nanos = 0;
        for thread in fs::read_dir(self.path("task")).context("list threads")? {
            // A thread may end while its file is read.
            let Ok(text) = fs::read_to_string(thread?.path().join("schedstat")) else {
                continue;
            };
            nanos += text
                .split_whitespace()
                .next()
                .and_then(|nanos| nanos.parse::<u64>().ok())
                .unwrap_or(0);
        }
        Ok(Duration::from_nanos(nanos))
    }

    fn read(self, file: &str) -> Result<String> {
        let path = self.path(file);
        fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
    }

    fn path(self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.0))
    }
}

/// `USER_HZ`, part of the kernel's ABI.
const CLOCK_TICKS: u64 = 100;

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn time_of_children_counts_where_it_is_asked_for() -> Result<()> {
        let busy =
            "sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done'; echo; exec sleep 600";
        let mut child = Command::new("sh")
            .args(["-c", busy])
            .stdout(Stdio::piped())
            .spawn()?;
        let process = Process(Pid::from_raw(child.id().cast_signed()));
        let ended = child
            .stdout
            .take()
            .context("no output")?
            .read_exact(&mut [0]);
        let own = process.cpu();
        let both = process.cpu_with_children();
        child.kill()?;
        child.wait()?;
        ended?;
        let own = own?;
        let both = both?;
        assert!(
            both >= own + Duration::from_millis(20),
            "{both:?}, and without the child {own:?}"
        );
        Ok(())
    }
}
