//! Compares the programs and the agent's tables with a plain model of a Service's meaning. On
//! random objects and random packets, both must agree.
//!
//! `KPX_SEED` repeats a run: it is printed at the start, and with a difference the seed of its
//! cluster alone.

mod affinity;
mod fixture;
mod outcomes;
mod pairs;
mod sequences;
