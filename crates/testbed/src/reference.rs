//! The meaning of a Service in plain words: random clusters and packets, and their outcome. It
//! knows neither the agent's model nor its tables, nor the programs.

pub mod cluster;
pub mod endpoints;
pub mod facts;
pub mod frame;
pub mod generate;
pub mod model;
pub mod node;
pub mod place;
pub mod slices;
pub mod weights;
