//! Socket load balancing, with real sockets: the programs are attached to a cgroup that this
//! process alone is in.

mod aborted;
mod fixture;
mod pins;
mod pods;
mod tcp;
mod udp;
