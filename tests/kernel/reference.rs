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

use std::env;

use anyhow::{Context, Result};

/// Returns the seed of the environment, or a new one, and prints it.
fn seed() -> Result<u64> {
    let seed = match env::var("KPX_SEED") {
        Ok(seed) => seed.parse().with_context(|| format!("KPX_SEED={seed}"))?,
        Err(_) => rand::random_range(0..1_000_000_000),
    };
    println!("KPX_SEED={seed}");
    Ok(seed)
}
