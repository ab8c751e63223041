//! kpx and the kernel in network namespaces.

mod backend_health;
mod causes;
mod churn;
mod devices;
mod fast;
mod faults;
mod flood;
mod host;
mod latency;
mod monitor;
mod monitoring;
mod namespaces;
mod net;
mod node;
mod pins;
mod redirect;
mod socket;
mod tables;
mod trace;
mod ui;
