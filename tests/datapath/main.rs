//! What the programs do to packets: tables of packets, run through BPF_PROG_TEST_RUN, for both families alike.
//!
//! Every row names the program, the packet that goes in, the verdict, the packet that comes out, and all that is counted.

mod counts;
mod fast;
mod fast_bed;
mod flows;
mod forgery;
mod fragments;
mod frames;
mod frontends;
mod guests;
mod icmp;
mod lab;
mod limits;
mod meetings;
mod monitor;
mod nursery;
mod offload;
mod options;
mod policy;
#[path = "../reference/mod.rs"]
mod reference;
mod reuse;
mod sctp;
mod stack;
mod sweep;
mod verdicts;
