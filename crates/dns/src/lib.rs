//! A DNS server for the cluster's names (Kubernetes DNS-Based Service Discovery, version 1.1.0),
//! from the objects that kpx watches. It refuses every other name.

mod cluster_names;
mod message;
mod records;
mod server;
mod zone;

pub use cluster_names::{Cluster, Known, Wanted};
pub use message::{Transport, reply};
pub use server::Server;
pub use zone::{Subject, Zone};
