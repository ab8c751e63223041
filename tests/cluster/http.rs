//! The answers of kpx over the network: health, metrics, and the paths beside them.

mod answers;
mod crowds;
mod fixture;
mod listeners;
mod series;
mod unhealthy;
