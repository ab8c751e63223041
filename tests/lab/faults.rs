//! Faults of the machine under a running kpx: a stopped or OOM-killed process, maps without memory,
//! a full disk, no file descriptors, missing pins or BPF file system, IPv6 that goes and comes.

mod conntrack;
mod kernel;
mod memory;
mod mounts;
mod process;
mod rtnl;
