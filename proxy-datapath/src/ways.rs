//! The agent's words to the fast path: when the programs have to ask the routes again, and how long they may open whole connections.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{Array, MapData};
use proxy_common::names;
use proxy_common::ways::{Row, TOLD};

use super::clock::boot_secs;
use super::maps::take;

/// The agent's row of `WAYS`.
pub struct FastPathWays {
    map: Array<MapData, Row>,
    row: Row,
}

impl FastPathWays {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self> {
        // Flows remember the epochs of a predecessor.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut this = Self { map: take(ebpf, names::WAYS)?, row: Row { first: now.subsec_nanos(), second: 0 } };
        this.write()?;
        Ok(this)
    }

    /// Begins another epoch: the programs ask the routes again.
    pub fn begin_epoch(&mut self) -> Result<()> {
        self.row.first = self.row.first.wrapping_add(1);
        self.write()
    }

    /// Lets the programs open whole connections past the stack for so many seconds from now on, or no longer.
    pub fn open_for(&mut self, secs: Option<u32>) -> Result<()> {
        let until = match secs {
            Some(secs) => boot_secs()? + secs,
            None => 0,
        };
        if self.row.second == until {
            return Ok(());
        }
        // Open flows that the programs have judged in this second are judged again.
        if until == 0 {
            self.row.first = self.row.first.wrapping_add(1);
        }
        self.row.second = until;
        self.write()
    }

    fn write(&mut self) -> Result<()> {
        self.map.set(TOLD, self.row, 0).with_context(|| format!("write {}", names::WAYS))
    }
}
