//! The agent's words to the fast path: when the programs have to ask the routes again, and how long they may open whole connections.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{Array, MapData};
use nix::time::{ClockId, clock_gettime};
use proxy_common::names;
use proxy_common::ways::Ways;

use super::maps::take;

/// The row of `WAYS`.
pub struct FastPathWays {
    map: Array<MapData, Ways>,
    row: Ways,
}

impl FastPathWays {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self> {
        // Flows remember the epochs of a predecessor.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut this = Self { map: take(ebpf, names::WAYS)?, row: Ways { epoch: now.subsec_nanos(), opens_until: 0 } };
        this.write()?;
        Ok(this)
    }

    /// Begins another epoch: the programs ask the routes again.
    pub fn begin_epoch(&mut self) -> Result<()> {
        self.row.epoch = self.row.epoch.wrapping_add(1);
        self.write()
    }

    /// Lets the programs open whole connections past the stack for so many seconds from now on, or no longer.
    pub fn open_for(&mut self, secs: Option<u32>) -> Result<()> {
        let until = match secs {
            Some(secs) => {
                let now = clock_gettime(ClockId::CLOCK_BOOTTIME).context("read the time since boot")?;
                u32::try_from(now.tv_sec()).context("the time since boot")? + secs
            }
            None => 0,
        };
        if self.row.opens_until == until {
            return Ok(());
        }
        // Open flows that the programs have judged in this second are judged again.
        if until == 0 {
            self.row.epoch = self.row.epoch.wrapping_add(1);
        }
        self.row.opens_until = until;
        self.write()
    }

    fn write(&mut self) -> Result<()> {
        self.map.set(0, self.row, 0).with_context(|| format!("write {}", names::WAYS))
    }
}
