//! Answers questions for names of the cluster (Kubernetes DNS-Based Service Discovery, version
//! 1.1.0) from the objects that kpx watches. Every other name is refused.

mod cluster_names;
mod message;
mod records;
mod server;
mod zone;

pub use cluster_names::{Cluster, Known, Wanted};
pub use message::{Transport, reply};
pub use server::Server;
pub use zone::{Subject, Zone};
