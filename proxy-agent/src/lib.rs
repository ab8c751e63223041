//! The agent of kpx. The modules are in reading order: from the cluster's objects to the kernel's
//! maps.
#![forbid(unsafe_code)]

// The pipeline: Source -> Input -> Store -> Model -> Tables -> diff -> Change -> Maps.
pub mod agent;
pub mod monitor;

// The node.
pub mod conntrack;
pub mod node;

// The interfaces for other programs.
pub mod control;
pub mod health_check;
pub mod healthz;
pub mod history;
mod http_server;
pub mod liveness;
pub mod metrics_server;
pub mod names;
pub mod ui;

// The command line.
mod all;
mod choices;
pub mod cli;
pub mod config;
mod files;
pub mod leftovers;
pub mod lost_nodes;
pub mod pod_sockets;
pub mod privileges;
pub mod run;
pub mod settings;
pub mod tunnel;
