//! kpx and an API server in network namespaces, and the API server alone.

mod apiserver;
mod apiserver_faults;
mod apiserver_kubectl;
mod deploy;
mod events;
mod faults;
mod guard;
mod http;
mod lost_nodes;
mod node_object;
mod objects;
