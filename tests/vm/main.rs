//! kpx on a kernel that `cargo xtask vmtest` boots. Most machines lack the features that these
//! tests need.

mod check;
mod dsr;
mod ipvs;
mod lines;
#[path = "../reachability/plain.rs"]
mod plain;
