//! What kpx answers over the network: health, metrics, and their neighbours.

mod answers;
mod fixture;
mod listeners;
mod series;
mod unhealthy;
