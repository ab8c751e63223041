//! The agent's controls of the fast path: the epoch (in a new epoch programs look up routes again),
//! and the deadline for opening flows that bypass the network stack.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{Array, MapData};
use proxy_common::names;
use proxy_common::ways::{Row, TOLD};

use super::clock::boot_secs;
use super::maps::take;

/// The agent's row of the map `WAYS`. Clones share the row.
#[derive(Clone)]
pub struct FastPathWays(Arc<Mutex<Written>>);

struct Written {
    map: Array<MapData, Row>,
    row: Row,
}

impl FastPathWays {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self> {
        // A new epoch must differ from a predecessor's, which flows have stored.
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let written = Written {
            map: take(ebpf, names::WAYS)?,
            row: Row {
                first: now.subsec_nanos(),
                second: 0,
            },
        };
        let this = Self(Arc::new(Mutex::new(written)));
        this.lock().write()?;
        Ok(this)
    }

    /// Begins a new epoch: the programs look up routes and networks again.
    pub fn begin_epoch(&self) -> Result<()> {
        let mut written = self.lock();
        written.row.first = written.row.first.wrapping_add(1);
        written.write()
    }

    /// Lets the programs open bypass connections for `secs` seconds from now. With `None` they
    /// stop.
    pub fn open_for(&self, secs: Option<u32>) -> Result<()> {
        let until = match secs {
            Some(secs) => boot_secs()? + secs,
            None => 0,
        };
        let mut written = self.lock();
        if written.row.second == until {
            return Ok(());
        }
        // With a new epoch, programs recheck even flows that they have checked in this second.
        if until == 0 {
            written.row.first = written.row.first.wrapping_add(1);
        }
        written.row.second = until;
        written.write()
    }

    fn lock(&self) -> MutexGuard<'_, Written> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Written {
    fn write(&mut self) -> Result<()> {
        self.map
            .set(TOLD, self.row, 0)
            .with_context(|| format!("write {}", names::WAYS))
    }
}
