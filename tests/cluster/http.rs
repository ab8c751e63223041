//! kpx's HTTP endpoints: health, metrics, and unknown paths.

mod answers;
mod crowds;
mod fixture;
mod listeners;
mod series;
mod unhealthy;
