//! Keeps programs and maps in force after the agent's end.

use anyhow::Result;
use proxy_net::changes::Changes;

use super::pins::{KeptMaps, Pins};

/// The means that keep programs and maps in the kernel while no agent runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PersistenceKind {
    /// Pins in a BPF file system of the host's.
    Pins,
    /// Pins in a BPF file system that may be the host's, or this container's alone.
    Unknown,
    /// Filters of clsact, by which the next agent finds the maps: the pins go with this agent's
    /// container.
    Filters,
    /// All ends with the agent, and a restart is a gap.
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

/// The pins and recorded changes by which programs stay on their devices when the agent ends.
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

    /// Holds the pinned maps open from now on.
    pub(crate) fn keep_maps(&mut self) -> Result<()> {
        self.kept = Some(KeptMaps::open(&self.pins)?);
        Ok(())
    }

    /// Makes pins of maps again that another program has removed. Returns their number.
    pub(crate) fn restore_pins(&self) -> Result<u64> {
        self.kept.as_ref().map_or(Ok(0), KeptMaps::restore)
    }
}
