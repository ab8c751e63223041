//! Changes of a node while kpx runs: devices come and go, other programs undo kpx's work,
//! kube-proxy precedes or follows kpx.

pub(crate) mod fixture;
mod kube_proxy;
pub(crate) mod links;
mod migration;
mod names;
pub(crate) mod neighbours;
mod pods;
mod refusals;
mod repairs;
mod stacked;
mod tunnel;
