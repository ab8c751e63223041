//! The line from an object to a row of a map: Input -> Store -> Model -> Tables -> diff -> Change.
//! Values in, values out: nothing here asks a kernel, a server or a clock. Modules in reading
//! order.
#![forbid(unsafe_code)]

// The objects.
pub mod compact;
pub mod input;
pub mod ip_family;
pub mod selector;
pub mod store;

// Their meaning on this node.
pub mod model;
pub mod pods;

// Which backends are silent, and which have gone with their nodes.
pub mod health;
pub mod loss;

// The rows.
pub mod diff;
mod room;
pub mod shares;
pub mod tables;

// All of that, kept up to date.
pub mod desired;

#[cfg(any(test, feature = "test"))]
pub mod builders;
#[cfg(test)]
mod random;
