//! The reference model: random clusters and packets, and the outcome that a Service's definition
//! requires. Independent of the agent's model and tables and of the programs.

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
