//! Keeps programs and maps in the kernel after the agent exits.

use anyhow::Result;
use proxy_net::changes::Changes;

use super::pins::{KeptMaps, Pins};

/// What keeps programs and maps in the kernel while no agent runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PersistenceKind {
    /// Pins in the host's BPF file system.
    Pins,
    /// Pins in a BPF file system that may belong to the host or to this container.
    Unknown,
    /// clsact filters, through which the next agent finds the maps. The pins disappear with this
    /// agent's container.
    Filters,
    /// Programs are detached when the agent exits; a restart is a gap.
    Nothing,
}

impl PersistenceKind {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pins => "pins",
            Self::Unknown => "unknown",
            Self::Filters => "filters",
            Self::Nothing => "nothing",
        }
    }
}

/// The pins and recorded changes that keep programs on their devices after the agent exits.
pub struct Persistence {
    pub pins: Pins,
    pub changes: Changes,
    kept: Option<KeptMaps>,
}

impl Persistence {
    pub fn new(pins: Pins, changes: Changes) -> Self {
        Self {
            pins,
            changes,
            kept: None,
        }
    }

    pub(crate) fn keep_maps(&mut self) -> Result<()> {
        self.kept = Some(KeptMaps::open(&self.pins)?);
        Ok(())
    }

    /// Restores pins of maps that another program removed. Returns the number of restored pins.
    pub(crate) fn restore_pins(&self) -> Result<u64> {
        self.kept.as_ref().map_or(Ok(0), KeptMaps::restore)
    }
}
