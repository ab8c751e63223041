//! The stable forms of an agent's answers, and the code that every client of an agent shares.
//! Fields of a form may be added, and no field is renamed or removed. The agent's own state is in
//! proxy-agent.
#![forbid(unsafe_code)]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

mod build;
mod connect;
mod event;
mod flow;
mod mode;
mod service;
mod sums;

pub mod age;
pub mod client;
pub mod counts;
pub mod flow_args;
pub mod history;
pub mod limit;
pub mod list;
pub mod object_name;
pub mod output;
pub mod page;
pub mod rates;
pub mod reach;
mod reason;
pub mod select_args;
pub mod status;

pub use build::{frontend_names, view, views};
pub use connect::{ConnectView, bucket_bounds, latency, quantile, secs};
pub use event::EventView;
pub use flow::{FlowService, FlowView, STATES};
pub use history::{HistoryView, SeriesView, ServiceSeriesView, UdpPortView};
pub use mode::Mode;
pub use proxy_core::selector::Selector;
pub use proxy_core::udp::UdpOutcomes;
pub use reason::reason_parser;
pub use service::{BackendView, FrontendView, NameView, Names, PortCounts, PortView, ServiceView};
pub use sums::{PortSums, port_sums};

/// The default run directory, with the socket that answers `kpx status`.
pub const RUN_DIR: &str = "/run/kpx";

/// The default address of the name server in host mode: a loopback address, unreachable for other
/// machines, on which no other process listens by default.
pub const DNS_ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 153)), 53);

/// Returns the path of the agent's socket in its run directory.
pub fn socket(run_dir: &std::path::Path) -> std::path::PathBuf {
    run_dir.join("kpx.sock")
}
