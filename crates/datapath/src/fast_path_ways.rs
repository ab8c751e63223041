//! The agent's words to the fast path: when the programs have to ask the routes again, and how long
//! they may open whole connections.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{Array, MapData};
use proxy_common::names;
use proxy_common::ways::{Row, TOLD};

use super::clock::boot_secs;
use super::maps::take;

/// The agent's row of `WAYS`. Clones are handles on the same row.
#[derive(Clone)]
pub struct FastPathWays(Arc<Mutex<Told>>);

struct Told {
    map: Array<MapData, Row>,
    row: Row,
}

impl FastPathWays {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self> {
        // Flows remember the epochs of a predecessor.
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let told = Told {
            map: take(ebpf, names::WAYS)?,
            row: Row {
                first: now.subsec_nanos(),
                second: 0,
            },
        };
        let this = Self(Arc::new(Mutex::new(told)));
        this.lock().write()?;
        Ok(this)
    }

    /// Begins another epoch: the programs ask the routes and networks again.
    pub fn begin_epoch(&self) -> Result<()> {
        let mut told = self.lock();
        told.row.first = told.row.first.wrapping_add(1);
        told.write()
    }

    /// Lets the programs open whole connections past the stack for so many seconds from now on, or
    /// no longer.
    pub fn open_for(&self, secs: Option<u32>) -> Result<()> {
        let until = match secs {
            Some(secs) => boot_secs()? + secs,
            None => 0,
        };
        let mut told = self.lock();
        if told.row.second == until {
            return Ok(());
        }
        // Open flows that the programs have judged in this second are judged again.
        if until == 0 {
            told.row.first = told.row.first.wrapping_add(1);
        }
        told.row.second = until;
        told.write()
    }

    fn lock(&self) -> MutexGuard<'_, Told> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Told {
    fn write(&mut self) -> Result<()> {
        self.map
            .set(TOLD, self.row, 0)
            .with_context(|| format!("write {}", names::WAYS))
    }
}
