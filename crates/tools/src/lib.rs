//! Benchmarks and long runs in the lab, as functions for this crate's programs and its short tests.

#[cfg(feature = "bench")]
pub mod bench;
#[cfg(feature = "bench")]
pub mod control;
#[cfg(feature = "bench")]
pub mod kube_rules;
#[cfg(feature = "soak")]
pub mod load;
#[cfg(feature = "bench")]
pub mod scale;
#[cfg(feature = "soak")]
pub mod soak;
