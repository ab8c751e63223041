//! Events of kpx, its use of the Node object, and its use of the kernel's conntrack. The fixture is
//! one node with an API server at its loopback address.

mod connections;
mod fixture;
mod lifecycle;
mod reported;
mod sysctls;
