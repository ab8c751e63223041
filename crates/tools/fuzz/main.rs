//! Compares the programs with a model on single packets, intact or damaged: verdict, bytes, mark,
//! counters, flows. Every other cluster has the fast path with random settings: see [`fast::Fast`].
//!
//! `KPX_SEED` repeats a run: the seed is printed at the start, and a difference comes with the seed
//! of its session. `KPX_FUZZ_SECS` sets the duration. A minimised difference is written to
//! `corpus/`, which every test repeats. `KPX_FUZZ_KEEP`, a seed, adds the beginning of its session.

mod corpus;
mod craft;
mod fast;
mod fixture;
mod floods;
mod kernel_log;
mod liberal;
mod model;
mod mutate;
mod run;
mod session;
mod steps;
mod stranger;
