//! The pure path from a Kubernetes object to a map row: Input -> Store -> Model -> Tables -> diff
//! -> Change. The crate has no I/O and no clock. Modules are in reading order.
#![forbid(unsafe_code)]

// Kubernetes objects.
pub mod compact;
pub mod input;
pub mod ip_family;
pub mod selector;
pub mod store;

// Their meaning on this node.
pub mod model;
pub mod pods;

// Backend health and lost nodes.
pub mod health;
pub mod loss;

// Counts.
pub mod udp;

// Map rows.
pub mod diff;
mod room;
pub mod shares;
pub mod tables;

// The incrementally updated whole.
pub mod desired;

#[cfg(any(test, feature = "test"))]
pub mod builders;
#[cfg(test)]
mod random;
