//! Changes of a node beside kpx: devices come and go, others undo what kpx did, kube-proxy was
//! there or is to come.

pub(crate) mod fixture;
mod kube_proxy;
mod links;
mod migration;
mod names;
pub(crate) mod neighbours;
mod pods;
mod refusals;
mod repairs;
mod stacked;
mod tunnel;
