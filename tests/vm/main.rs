//! kpx on a kernel as `cargo xtask vmtest` boots it: what it needs is not on every machine.

mod check;
mod ipvs;
mod lines;
#[path = "../reachability/plain.rs"]
mod plain;
