//! The lab of kpx's tests, benchmarks and demo: network namespaces, servers, an API server, and kpx
//! itself.

pub mod agent;
pub mod apiserver;
pub mod browser;
pub mod capture;
pub mod cases;
pub mod cgroup;
pub mod conntrack;
pub mod echo;
pub mod exposition;
pub mod flow_table;
pub mod http;
pub mod kept_lines;
pub mod kernel;
pub mod kernel_tables;
pub mod lab;
pub mod limits;
pub mod mounts;
pub mod netns;
#[cfg(feature = "pod")]
pub mod pod;
#[cfg(feature = "packets")]
pub mod reference;
pub mod rights;
#[cfg(feature = "packets")]
pub mod rows;
pub mod rtnl;
pub mod served_lab;
pub mod stranger;
#[cfg(feature = "packets")]
pub mod test_run;
#[cfg(feature = "packets")]
pub mod text;
pub mod wall_clock;
pub mod watched_lab;
pub mod watched_node;
