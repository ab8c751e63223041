//! The source of objects, an API server or files, and Events for the API server. Modules are in
//! reading order.
#![forbid(unsafe_code)]

// The sources.
pub mod kubernetes;
mod manifests;
mod source;

// The shared parts.
pub mod document;
mod needed;
pub mod requests;
pub mod watches;

// Problems and Events.
pub mod events;
pub mod health;
pub mod journal;

// Look-ups of nodes, which no watch covers.
pub mod nodes;

// The nodes that hand over packets of external clients.
pub mod peers;

pub use source::Source;
