//! kpx's agent. Modules in reading order: from what the cluster says to what the kernel holds.
#![forbid(unsafe_code)]

// The line: Source -> Input -> Store -> Model -> Tables -> diff -> Change -> Maps.
pub mod agent;
pub mod monitor;

// The node.
pub mod conntrack;
pub mod node;

// What others ask the agent.
pub mod control;
pub mod health_check;
pub mod healthz;
mod http_server;
pub mod liveness;
pub mod metrics;
pub mod metrics_server;
pub mod ui;

// The command line.
mod all;
mod choices;
pub mod cli;
pub mod config;
mod files;
pub mod leftovers;
pub mod privileges;
pub mod run;
pub mod settings;
pub mod status;
pub mod top;
pub mod trace;
pub mod view;
