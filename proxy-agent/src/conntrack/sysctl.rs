//! Applies kube-proxy's conntrack settings (`KubeProxyConfiguration.conntrack`).
//!
//! The size of the table is global to the machine, and only the initial network namespace can set
//! it. All other settings belong to this network namespace.

use std::collections::BTreeMap;
use std::time::Duration;
use std::{fs, io};

use anyhow::{Context, Error, Result};
use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;
use proxy_common::flow::Timeouts;
use tracing::{debug, info, warn};

use proxy_net::changes::Changes;
use proxy_net::sysctl;
use proxy_source::events::Events;

const MAX: &str = "netfilter/nf_conntrack_max";
/// The file with the number of buckets of the hash table, for all namespaces.
const HASH_SIZE: &str = "/sys/module/nf_conntrack/parameters/hashsize";

/// The settings of the kernel's conntrack, which sees each flow translated. `None` keeps the
/// kernel's value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conntrack {
    pub max_per_core: Option<u32>,
    pub min: Option<u32>,
    pub tcp_established_timeout: Option<Duration>,
    pub tcp_close_wait_timeout: Option<Duration>,
    pub tcp_be_liberal: bool,
    pub udp_timeout: Option<Duration>,
    pub udp_stream_timeout: Option<Duration>,
}

/// Sets the kernel's parameters. A failed write is reported, and the agent serves without it.
pub fn apply(settings: &Conntrack, changes: &Changes, events: &Events) {
    if let Some(max) = max(settings, processors())
        && let Err(error) = set_max(max, changes)
    {
        warn!(
            error = format!("{error:#}"),
            "the limits of conntrack are unchanged"
        );
        if is_read_only(&error) {
            events.sysctls_read_only(&error);
        }
    }
    for (key, value) in timeouts(settings) {
        match write(key, value, changes) {
            Ok(()) => {}
            Err(error) => warn!(
                error = format!("{error:#}"),
                "a setting of conntrack is unchanged"
            ),
        }
    }
}

/// Returns the idle timeouts of flows: the operator's, else the kernel's current values. The
/// kernel's timeout of UDP streams, two minutes by default, is raised to the programs' default.
pub fn flow_timeouts(settings: &Conntrack) -> Timeouts {
    let default = Timeouts::DEFAULT;
    let established = settings.tcp_established_timeout;
    let half_closed = settings.tcp_close_wait_timeout;
    let stream =
        || secs_as_they_stand("udp_timeout_stream").map(|secs| secs.max(default.udp_stream));
    Timeouts {
        tcp_established: secs(established)
            .or_else(|| secs_as_they_stand("tcp_timeout_established"))
            .unwrap_or(default.tcp_established),
        tcp_half_closed: secs(half_closed)
            .or_else(|| secs_as_they_stand("tcp_timeout_close_wait"))
            .unwrap_or(default.tcp_half_closed),
        udp: secs(settings.udp_timeout)
            .or_else(|| secs_as_they_stand("udp_timeout"))
            .unwrap_or(default.udp),
        udp_stream: secs(settings.udp_stream_timeout)
            .or_else(stream)
            .unwrap_or(default.udp_stream),
    }
}

/// Returns the operator's timeout in seconds. `None` if unset or 0: the kernel's timeout applies.
fn secs(set: Option<Duration>) -> Option<u32> {
    set.filter(|time| time.as_secs() > 0)
        .map(|time| u32::try_from(time.as_secs()).unwrap_or(u32::MAX))
}

/// Returns the kernel's timeout in seconds. `None` if there is no conntrack.
fn secs_as_they_stand(name: &str) -> Option<u32> {
    sysctl::read(&format!("netfilter/nf_conntrack_{name}"))
        .ok()
        .flatten()?
        .trim()
        .parse()
        .ok()
}

/// Returns the kernel parameters that [`apply`] sets, by key.
pub fn wanted(settings: &Conntrack) -> BTreeMap<&'static str, String> {
    let max = max(settings, processors()).map(|max| (MAX, u64::from(max)));
    timeouts(settings)
        .chain(max)
        .map(|(key, value)| (key, value.to_string()))
        .collect()
}

/// Returns the maximum number of entries of all families: a number per processor, with a minimum.
/// `None` keeps the kernel's value.
fn max(settings: &Conntrack, processors: u32) -> Option<u32> {
    let per_core = settings.max_per_core.filter(|per_core| *per_core > 0)?;
    Some(
        per_core
            .saturating_mul(processors)
            .max(settings.min.unwrap_or_default()),
    )
}

/// Returns timeouts in seconds, and whether conntrack is liberal towards TCP. A setting of 0 keeps
/// the kernel's value.
fn timeouts(settings: &Conntrack) -> impl Iterator<Item = (&'static str, u64)> {
    let secs = |time: Option<Duration>| time.map_or(0, |time| time.as_secs());
    let values = [
        (
            "netfilter/nf_conntrack_tcp_timeout_established",
            secs(settings.tcp_established_timeout),
        ),
        (
            "netfilter/nf_conntrack_tcp_timeout_close_wait",
            secs(settings.tcp_close_wait_timeout),
        ),
        (
            "netfilter/nf_conntrack_tcp_be_liberal",
            u64::from(settings.tcp_be_liberal),
        ),
        (
            "netfilter/nf_conntrack_udp_timeout",
            secs(settings.udp_timeout),
        ),
        (
            "netfilter/nf_conntrack_udp_timeout_stream",
            secs(settings.udp_stream_timeout),
        ),
    ];
    values.into_iter().filter(|(_, value)| *value > 0)
}

/// Sets the number of entries and grows the hash table with it: four entries per bucket.
fn set_max(max: u32, changes: &Changes) -> Result<()> {
    write(MAX, u64::from(max), changes)?;
    let size = match fs::read_to_string(HASH_SIZE) {
        Ok(size) => size,
        // The module is missing, or built into the kernel.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("read {HASH_SIZE}")),
    };
    let now = size.trim().parse::<u32>().unwrap_or_default();
    let want = max / 4;
    if now >= want {
        return Ok(());
    }
    fs::write(HASH_SIZE, want.to_string())
        .with_context(|| format!("set {HASH_SIZE} to {want}, it is {now}"))?;
    info!(old = now, value = want, "conntrack hash size set");
    Ok(())
}

/// Writes a parameter, unless the kernel tracks no connections.
fn write(key: &str, value: u64, changes: &Changes) -> Result<()> {
    if sysctl::read(key)?.is_none() {
        debug!(key, "the kernel tracks no connections");
        return Ok(());
    }
    changes.set_sysctl(key, &value.to_string())
}

/// Returns the number of processors that this process may use, as Go counts them for kube-proxy.
fn processors() -> u32 {
    let usable = sched_getaffinity(Pid::from_raw(0)).unwrap_or_default();
    let count = (0..CpuSet::count())
        .filter(|cpu| usable.is_set(*cpu).unwrap_or_default())
        .count();
    u32::try_from(count).unwrap_or(u32::MAX).max(1)
}

fn is_read_only(error: &Error) -> bool {
    let io = error.downcast_ref::<io::Error>();
    io.is_some_and(|error| {
        matches!(
            error.kind(),
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_grows_with_the_processors() {
        let cases = [
            ("nothing is asked for", None, Some(131_072), None),
            ("0 leaves it", Some(0), Some(131_072), None),
            ("the least", Some(32_768), Some(131_072), Some(131_072)),
            (
                "more than the least",
                Some(65_536),
                Some(131_072),
                Some(196_608),
            ),
            ("no least", Some(10), None, Some(30)),
            ("too many", Some(u32::MAX), None, Some(u32::MAX)),
        ];
        for (name, max_per_core, min, want) in cases {
            assert_eq!(
                max(
                    &Conntrack {
                        max_per_core,
                        min,
                        ..Conntrack::default()
                    },
                    3
                ),
                want,
                "{name}"
            );
        }
    }

    #[test]
    fn only_requested_settings_are_written() {
        assert_eq!(timeouts(&Conntrack::default()).count(), 0);
        let settings = Conntrack {
            tcp_established_timeout: Some(Duration::from_secs(86_400)),
            tcp_close_wait_timeout: Some(Duration::from_secs(3_600)),
            tcp_be_liberal: true,
            udp_timeout: Some(Duration::ZERO),
            udp_stream_timeout: Some(Duration::from_secs(120)),
            ..Conntrack::default()
        };
        let values: Vec<_> = timeouts(&settings)
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        let want = [
            "netfilter/nf_conntrack_tcp_timeout_established=86400",
            "netfilter/nf_conntrack_tcp_timeout_close_wait=3600",
            "netfilter/nf_conntrack_tcp_be_liberal=1",
            "netfilter/nf_conntrack_udp_timeout_stream=120",
        ];
        assert_eq!(values, want);
    }

    #[test]
    fn flows_are_kept_as_long_as_the_operator_has_conntrack_keep_them() {
        let hours = |hours: u64| Some(Duration::from_secs(hours * 3_600));
        let settings = Conntrack {
            tcp_established_timeout: hours(96),
            tcp_close_wait_timeout: hours(12),
            udp_timeout: Some(Duration::from_secs(10)),
            udp_stream_timeout: Some(Duration::from_secs(60)),
            ..Conntrack::default()
        };
        let want = Timeouts {
            tcp_established: 345_600,
            tcp_half_closed: 43_200,
            udp: 10,
            udp_stream: 60,
        };
        assert_eq!(flow_timeouts(&settings), want);
    }
}
