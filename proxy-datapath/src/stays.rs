//! What outlives the agent, and by which means.

use proxy_net::changes::Changes;

use super::pins::Pins;

/// What keeps programs and maps in the kernel while no agent runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeper {
    /// Pins in a BPF file system of the host's.
    Pins,
    /// Filters of clsact, by which the next agent finds the maps: the pins go with this agent's container.
    Filters,
    /// All ends with the agent, and a restart is a gap.
    Nothing,
}

impl Keeper {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pins => "pins",
            Self::Filters => "filters",
            Self::Nothing => "nothing",
        }
    }
}

/// What it takes for programs to stay on their devices when the agent ends.
pub struct Stays {
    pub pins: Pins,
    pub changes: Changes,
}
