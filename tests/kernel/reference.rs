//! Compares the programs and the agent's tables with a plain reference model, on random objects and
//! random packets.
//!
//! `KPX_SEED` repeats a run. The test prints its seed at the start, and with a difference the seed
//! of that cluster.

mod affinity;
mod fixture;
mod outcomes;
mod pairs;
mod sequences;
