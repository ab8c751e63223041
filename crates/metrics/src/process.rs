//! The metrics of this process, as in Prometheus' own client libraries.

use std::fmt;

use jiff::Timestamp;
use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::{SysconfVar, sysconf};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use tracing::debug;

#[derive(Debug)]
pub(super) struct Process {
    started: Timestamp,
}

/// The resource usage from `/proc/self`.
#[derive(Debug)]
struct Usage {
    cpu_seconds: f64,
    virtual_bytes: u64,
    resident_bytes: u64,
    open_files: u64,
    max_files: u64,
}

impl Process {
    pub(super) fn started_now() -> Self {
        Self {
            started: Timestamp::now(),
        }
    }
}

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let started = self.started.as_duration().as_secs_f64();
        let mut gauge = |name: &str, help: &str, value: f64| {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)
        };
        gauge(
            "process_start_time_seconds",
            "When this process started, in seconds since 1970.",
            started,
        )?;
        let usage = match Usage::read() {
            Ok(usage) => usage,
            // Export the remaining metrics if /proc is missing.
            Err(error) => {
                debug!(%error, "read /proc/self");
                return Ok(());
            }
        };
        #[expect(
            clippy::cast_precision_loss,
            reason = "Prometheus knows no other numbers"
        )]
        for (name, help, value) in [
            (
                "process_virtual_memory_bytes",
                "Virtual memory of this process.",
                usage.virtual_bytes as f64,
            ),
            (
                "process_resident_memory_bytes",
                "Memory of this process that is resident.",
                usage.resident_bytes as f64,
            ),
            (
                "process_open_fds",
                "File descriptors that are open.",
                usage.open_files as f64,
            ),
            (
                "process_max_fds",
                "File descriptors that may be open.",
                usage.max_files as f64,
            ),
        ] {
            gauge(name, help, value)?;
        }
        let cpu = ConstCounter::new(usage.cpu_seconds);
        let help =
            "Time that this process has spent on processors, its own and the kernel's for it.";
        cpu.encode(encoder.encode_descriptor(
            "process_cpu_seconds",
            help,
            None,
            cpu.metric_type(),
        )?)
    }
}

impl Usage {
    fn read() -> anyhow::Result<Self> {
        let system = |name| anyhow::Ok(sysconf(name)?.unwrap_or(1));
        let stat = std::fs::read_to_string("/proc/self/stat")?;
        // The second field is the program's name in parentheses, with arbitrary characters.
        let fields: Vec<&str> = stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .collect();
        // Field numbers of proc(5), where the third field is the state.
        let field = |number: usize| {
            Ok::<u64, anyhow::Error>(
                fields
                    .get(number - 3)
                    .copied()
                    .unwrap_or_default()
                    .parse()?,
            )
        };
        let ticks = field(14)? + field(15)?;
        #[expect(
            clippy::cast_precision_loss,
            reason = "seconds with a fraction are wanted"
        )]
        let cpu_seconds = ticks as f64 / system(SysconfVar::CLK_TCK)? as f64;
        Ok(Self {
            cpu_seconds,
            virtual_bytes: field(23)?,
            resident_bytes: field(24)? * u64::try_from(system(SysconfVar::PAGE_SIZE)?)?,
            open_files: std::fs::read_dir("/proc/self/fd")?.count() as u64,
            max_files: getrlimit(Resource::RLIMIT_NOFILE)?.0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_of_this_process_is_read_from_proc() {
        let usage = Usage::read().unwrap();
        assert!(
            usage.cpu_seconds >= 0.0 && usage.cpu_seconds < 100_000.0,
            "{usage:?}"
        );
        assert!(
            usage.resident_bytes > 1_000_000 && usage.resident_bytes < usage.virtual_bytes,
            "{usage:?}"
        );
        assert!(
            usage.open_files > 2 && usage.open_files < usage.max_files,
            "{usage:?}"
        );
    }
}
