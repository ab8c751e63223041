//! The actions of an operator on a busy node, and their effect on clients.
//!
//! A scenario builds a lab of its own, puts load on it, injects the fault again and again and says
//! what was seen. The same functions make the short tests and the long runs of `cargo xtask soak`.

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

/// Where kpx runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// A process of the node, with the node's BPF file system.
    #[default]
    Node,
    /// In kubeadm's DaemonSet for kube-proxy, with kpx's image: a container without the node's BPF
    /// file system.
    SwappedPod,
}

/// How much of it.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    pub place: Place,
    /// New connections a second.
    pub rate: u32,
    /// How often the fault is injected.
    pub rounds: u32,
    /// It is injected more often if that is over before so long.
    pub at_least: Duration,
}
