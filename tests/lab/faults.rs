//! Faults of the machine under a running kpx: a process that stands still or is ended for its
//! memory, maps without memory, a full disk, no file descriptors, pins and their file system that
//! are gone, IPv6 that goes and comes.

mod conntrack;
mod kernel;
mod memory;
mod mounts;
mod process;
mod rtnl;
