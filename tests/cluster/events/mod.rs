//! What kpx tells the cluster, what it takes a Node object for, and how it gets on with the kernel's own connection
//! tracking: one node, with an API server at its loopback address.

mod connections;
mod fixture;
mod lifecycle;
mod sysctls;
mod told;
