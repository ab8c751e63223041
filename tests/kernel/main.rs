//! Tables of packets (`rows/*.packets`), which the programs translate by BPF_PROG_TEST_RUN, for
//! both families.
//!
//! Each row names the hook, the input packet, the verdict, the output packet, and all counters that
//! grow.

mod bypass;
mod counts;
mod ends;
mod fast;
mod fast_fixture;
mod fixture;
mod flows;
mod foreign_nat;
mod forgery;
mod fragments;
mod frames;
mod frontends;
mod half_open;
mod handover;
mod icmp;
mod limits;
mod lost;
mod meetings;
mod monitor;
mod offload;
mod opened;
mod options;
mod packets;
mod policy;
mod reference;
mod reuse;
mod sctp;
mod shares;
mod silent;
mod slow_path;
mod stack;
mod sweep;
mod verdicts;
mod ways;
