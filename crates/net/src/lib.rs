//! The node's network: devices, routes, rules, filters, sockets, parameters. Modules in reading
//! order. No module contains Services.
#![deny(unsafe_code)]

// Kernel queries: sockets and files.
pub mod kernel;
pub mod lock;
mod netlink;
mod raw;
pub mod sysctl;

// Devices.
mod far_end;
pub mod link;
pub mod role;
mod watch;
mod way_watch;

// The anchor, a veth pair for the node's own packets to Services.
pub mod addr;
pub mod anchor;
pub mod tunnel;

// Routes and rules.
pub mod fib;
pub mod foreign_rule;
pub mod next_hop;
pub mod pod_route;
pub mod route;
mod route_watch;
pub mod rule;
mod rule_changes;
mod rule_watch;

// Netfilter, filters, sockets.
pub mod conntrack;
pub mod filter;
pub mod ipset;
pub mod ipvs;
pub mod listeners;
pub mod netfilter;
pub mod nft;
pub mod sock_diag;
pub mod xfrm;

// Changes to the host.
pub mod changes;
mod ports;

pub use netlink::{Handle, connect, namespace, on_own_thread};
pub use route_watch::{WatchedNets, watch_routes};
pub use rule_watch::{JudgedRules, RuleState, watch_rules};
pub use watch::{LinkEvent, watch};
pub use way_watch::watch_ways;
