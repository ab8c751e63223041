//! Where objects come from, a cluster's API server or files, and what is told there: Events.
//! Modules in reading order.
#![forbid(unsafe_code)]

// The sources.
pub mod kubernetes;
mod manifests;
mod source;

// The parts that sources share.
pub mod document;
mod needed;
pub mod requests;
pub mod watches;

// Problems, and Events.
pub mod events;
pub mod health;
pub mod journal;

// The nodes that no watch tells of.
pub mod nodes;

pub use source::Source;
