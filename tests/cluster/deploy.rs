//! The contents of `deploy/`: manifests and chart as their tools render them, and kpx in the pods
//! that they describe.

mod chart;
mod cluster;
mod confined;
mod connectivity;
mod drop_in;
mod manifests;
mod migration;
mod own;
mod pages;
mod plugin;
mod redirect;
mod render;
mod settings;
mod swapped;
