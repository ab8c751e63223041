//! Socket load balancing with real sockets. The programs are attached to a cgroup that contains
//! only this process.

mod aborted;
mod connections;
mod fixture;
mod pins;
mod pods;
mod tcp;
mod udp;
