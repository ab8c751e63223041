//! The load of the machine's CPUs.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::unistd::{SysconfVar, sysconf};

/// The length of a tick of `/proc/stat`, in milliseconds: the kernel's `USER_HZ` is 100 on all
/// architectures of kpx.
const TICK_MILLIS: u64 = 10;

/// A time, and the idle time of all CPUs until then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Busy {
    at: Instant,
    idle: Duration,
}

impl Busy {
    pub(super) fn now() -> Result<Self> {
        const PATH: &str = "/proc/stat";
        let text = fs::read_to_string(PATH).with_context(|| format!("read {PATH}"))?;
        Ok(Self {
            at: Instant::now(),
            idle: idle(&text).with_context(|| format!("no idle time in {PATH}"))?,
        })
    }

    /// Returns the CPU time since then, of all CPUs and for all work. The kernel measures idle time
    /// precisely, and estimates the rest by ticks.
    pub(super) fn since(self) -> Result<Duration> {
        let now = Self::now()?;
        Ok(((now.at - self.at) * count()?).saturating_sub(now.idle.saturating_sub(self.idle)))
    }
}

/// Returns the number of online CPUs, including those on which this thread may not run.
pub(super) fn count() -> Result<u32> {
    let cpus = sysconf(SysconfVar::_NPROCESSORS_ONLN)?.context("the number of CPUs is unknown")?;
    Ok(u32::try_from(cpus)?)
}

/// Parses the first line, the sum of all CPUs: user, nice, system, idle, iowait and so on, in
/// ticks.
fn idle(text: &str) -> Option<Duration> {
    let mut columns = text
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_whitespace()
        .skip(3);
    let mut ticks = || columns.next()?.parse::<u64>().ok();
    Some(Duration::from_millis((ticks()? + ticks()?) * TICK_MILLIS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_is_idle_and_waiting() {
        let text = "cpu  1 2 3 400 50 6 7 8 9 10\ncpu0 1 2 3 200 50 6 7 8 9 10\n";
        assert_eq!(idle(text), Some(Duration::from_millis(4500)));
        assert_eq!(idle("cpu0 1 2 3 4 5\n"), None);
    }

    #[test]
    fn work_takes_time() {
        let busy = Busy::now().unwrap();
        let started = Instant::now();
        while started.elapsed() < Duration::from_millis(200) {
            std::hint::spin_loop();
        }
        // Other processes may add to this thread's CPU time.
        assert!(busy.since().unwrap() >= Duration::from_millis(50));
    }
}
