//! Reads the programs' records of single packets while a client watches.

use std::os::fd::{AsRawFd, RawFd};

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{Array, MapData, PerCpuArray, RingBuf};
use proxy_common::addr::{Addr4, Addr6};
use proxy_common::cpu::Cpu;
use proxy_common::monitor::{Record, WATCHED_PER_SECOND};
use proxy_common::names;
use proxy_common::pod::from_bytes;

use super::maps::take;

/// The programs' packet records, and the switch that enables them. The file descriptor is readable
/// when there are records.
pub struct Monitor {
    ring: RingBuf<MapData>,
    watched: Array<MapData, u32>,
    cpus: PerCpuArray<MapData, Cpu>,
}

/// A record of an IPv4 or IPv6 packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnyRecord {
    V4(Record<Addr4>),
    V6(Record<Addr6>),
}

impl Monitor {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self> {
        let ring = take(ebpf, names::MONITOR)?;
        let watched = take(ebpf, names::WATCHED)?;
        Ok(Self {
            ring,
            watched,
            cpus: take(ebpf, names::CPUS)?,
        })
    }

    /// Enables or disables the records, and discards unread records.
    pub fn watch(&mut self, on: bool) -> Result<()> {
        let per_second = if on { WATCHED_PER_SECOND } else { 0 };
        self.watched
            .set(0, per_second, 0)
            .with_context(|| format!("write {}", names::WATCHED))?;
        while self.record().is_some() {}
        Ok(())
    }

    /// Returns the next record; `None` if there is none.
    pub fn record(&mut self) -> Option<AnyRecord> {
        loop {
            let item = self.ring.next()?;
            if let Some(record) = from_bytes(&item) {
                return Some(AnyRecord::V4(record));
            }
            if let Some(record) = from_bytes(&item) {
                return Some(AnyRecord::V6(record));
            }
        }
    }

    /// Returns the number of packets without a record (there were too many) since the programs were
    /// loaded.
    pub fn lost(&self) -> Result<u64> {
        let cpus = self
            .cpus
            .get(&0, 0)
            .with_context(|| format!("read {}", names::CPUS))?;
        Ok(cpus.iter().map(|cpu| cpu.lost).sum())
    }
}

impl AsRawFd for Monitor {
    fn as_raw_fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }
}
