//! The harness of the tests that need a kernel.

pub mod agent;
pub mod apiserver;
pub mod bench;
pub mod capture;
pub mod cgroup;
pub mod control;
pub mod echo;
pub mod exposition;
pub mod kernel;
pub mod kernel_tables;
pub mod kube_rules;
pub mod lab;
pub mod load;
pub mod netns;
pub mod pod;
pub mod programs;
pub mod reference;
pub mod soak;
pub mod text;
