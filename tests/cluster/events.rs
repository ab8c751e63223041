//! Events of kpx, its use of the Node object, and its relation to the kernel's connection tracking.
//! The fixture is one node with an API server at its loopback address.

mod connections;
mod fixture;
mod lifecycle;
mod sysctls;
mod told;
