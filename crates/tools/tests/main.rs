//! Short runs of this crate's programs: each needs root, network namespaces and kpx.

mod bench;
mod demo;
mod soak;
