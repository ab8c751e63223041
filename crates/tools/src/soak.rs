//! Operators' actions on a busy node, and their effect on clients.
//!
//! A scenario builds its own lab, puts load on it, injects the fault repeatedly and reports the
//! observations. The same functions make the short tests and the long runs of `cargo xtask soak`.

mod devices;
mod endpoints;
mod fixture;
mod flood;
mod idle;
mod kpx;
mod memory;
mod outage;
mod ports;
mod report;
mod restart;
mod rules;
mod tenants;

use std::time::Duration;

pub use self::devices::devices;
pub use self::endpoints::endpoints;
pub use self::flood::flood;
pub use self::idle::idle;
pub use self::outage::outage;
pub use self::ports::ports;
pub use self::report::Report;
pub use self::restart::{restart, upgrade};
pub use self::rules::rules;
pub use self::tenants::{Greed, Room, tenants};

/// The place of kpx.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// A process of the node, with the node's BPF file system.
    #[default]
    Node,
    /// In kubeadm's DaemonSet for kube-proxy, with kpx's image: a container without the node's BPF
    /// file system.
    SwappedPod,
}

/// The size of a run.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    pub place: Place,
    /// New connections per second.
    pub rate: u32,
    /// The minimum number of faults.
    pub rounds: u32,
    /// The minimum duration, with more faults if necessary.
    pub at_least: Duration,
}
