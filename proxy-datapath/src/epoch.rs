//! Tells the programs that what they have asked the routes may have changed.

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{Array, MapData};
use proxy_common::names;

use super::maps::take;

/// The epoch of ways past the stack. The programs ask the routes again after each change of it.
pub struct Epoch {
    map: Array<MapData, u32>,
    number: u32,
}

impl Epoch {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self> {
        Ok(Self { map: take(ebpf, names::EPOCH)?, number: 0 })
    }

    /// Begins another epoch.
    pub fn advance(&mut self) -> Result<()> {
        self.number = self.number.wrapping_add(1);
        self.map.set(0, self.number, 0).with_context(|| format!("write {}", names::EPOCH))
    }
}
