//! The harness of the tests that need a kernel.

pub mod agent;
pub mod apiserver;
pub mod bench;
pub mod capture;
pub mod echo;
pub mod exposition;
pub mod kernel_tables;
pub mod lab;
pub mod netns;
pub mod text;
