//! Faults of the machine under a running kpx: a process that stands still or is ended for its memory, a full disk, no file
//! descriptors, pins that are gone, IPv6 that goes and comes.

mod cgroup;
mod kernel;
mod process;
