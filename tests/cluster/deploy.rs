//! The contents of `deploy/`: manifests and chart as rendered by their tools, and kpx in their
//! pods.

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
