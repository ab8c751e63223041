//! The programs of this crate in short: each needs root, network namespaces and kpx.

mod bench;
mod demo;
mod soak;
