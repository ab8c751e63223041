//! Measures the cost of Services for packets, between clients and servers in network namespaces, in
//! comparison with kube-proxy's rules.
//!
//! Every figure is a ratio to [`Variant::Direct`], without Services, in the same round, because a
//! machine's speed varies from moment to moment.

mod cell;
mod counters;
mod cpu;
mod datagrams;
mod fixture;
pub(crate) mod kube_proxy;
mod latency;
mod many;
mod open;
mod order;
mod plan;
mod policies;
mod proof;
mod rounds;
mod services;
mod summary;
mod traffic;

pub use self::cell::{Mode, Path, Variant};
pub use self::counters::EVENTS;
pub use self::fixture::Fixture;
pub use self::kube_proxy::{NFTABLES_SINCE, minor};
pub use self::latency::Latency;
pub(crate) use self::order::Order;
pub use self::plan::{MANY_SERVICES, Selection};
pub use self::rounds::{Listener, Options, Sample, Skipped, run};
pub use self::summary::{Key, Spread, Summary, summarise};
pub(crate) use self::traffic::pin;
pub use self::traffic::{Slice, Work};
