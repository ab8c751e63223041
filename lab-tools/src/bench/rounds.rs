//! Rounds: in each, every variant is measured once in every mode, one right after the other.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::fixture::{self, Fixture};
use super::{Mode, Path, Selection, Variant};
use testbed::lab::{Lab, Layout};

#[derive(Clone, Debug)]
pub struct Options {
    pub selection: Selection,
    pub rounds: usize,
    /// How long each variant is measured in each round.
    pub slice: Duration,
    /// The real one, if it is there.
    pub kube_proxy: Option<PathBuf>,
}

/// The yield of one slice of time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    pub services: usize,
    pub path: Path,
    pub mode: Mode,
    pub variant: Variant,
    pub round: usize,
    /// In the mode's unit.
    pub amount: u64,
    pub seconds: f64,
    /// The time of all CPUs.
    pub cpu_seconds: f64,
}

/// A variant that could not be run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    pub variant: Variant,
    pub why: String,
}

/// The receiver of a run's samples, as it goes on.
pub trait Listener {
    fn sample(&mut self, sample: Sample) -> Result<()>;
    fn skipped(&mut self, skipped: Skipped) -> Result<()>;
    /// Shows progress to a reader who waits.
    fn progress(&mut self, what: &str);
}

pub fn run(options: &Options, listener: &mut impl Listener) -> Result<()> {
    let mut skipped = Vec::new();
    for services in options.selection.services() {
        let mut variants = Vec::new();
        let paths = options.selection.paths(services);
        for variant in paths.flat_map(|path| options.selection.variants(services, path)) {
            if variants.contains(&variant) {
                continue;
            }
            let Some(why) = fixture::obstacle(variant, services, options.kube_proxy.as_deref())? else {
                variants.push(variant);
                continue;
            };
            let skip = Skipped { variant, why };
            if !skipped.contains(&skip) {
                skipped.push(skip.clone());
                listener.skipped(skip)?;
            }
        }
        among(options, services, &variants, listener)?;
    }
    Ok(())
}

/// All cells with that many Services, each variant in a lab of its own.
fn among(options: &Options, services: usize, variants: &[Variant], listener: &mut impl Listener) -> Result<()> {
    let labs: Vec<Lab> = variants.iter().map(|_| Lab::start(Layout::Routed)).collect::<Result<_>>()?;
    let start = |(lab, &variant)| {
        Fixture::start(lab, variant, services, options.kube_proxy.as_deref())
            .with_context(|| format!("{variant}, {services} services"))
    };
    listener.progress(&format!("{services} services: set up"));
    let fixtures: Vec<Fixture<'_>> = labs.iter().zip(variants).map(start).collect::<Result<_>>()?;
    for path in options.selection.paths(services) {
        let wanted = options.selection.variants(services, path);
        let fixtures: Vec<&Fixture<'_>> = fixtures.iter().filter(|fixture| wanted.contains(&fixture.variant)).collect();
        for fixture in &fixtures {
            if path == Path::Routable {
                fixture.stop_masquerading()?;
            }
            fixture.prove(path).with_context(|| format!("{}, {path}, {services} services", fixture.variant))?;
        }
        for round in 0..options.rounds {
            listener.progress(&format!("{services} services, {path}: round {} of {}", round + 1, options.rounds));
            for mode in options.selection.modes(services, path) {
                // No variant always follows the same other one.
                for fixture in (0..fixtures.len()).map(|nth| fixtures[(nth + round) % fixtures.len()]) {
                    let done = fixture.slice(path, options.slice).run(mode);
                    let done = done.with_context(|| format!("{}, {services} services", fixture.variant))?;
                    let (seconds, cpu_seconds) = (done.time.as_secs_f64(), done.cpu.as_secs_f64());
                    let (variant, amount) = (fixture.variant, done.amount);
                    listener.sample(Sample { services, path, mode, variant, round, amount, seconds, cpu_seconds })?;
                }
            }
        }
    }
    Ok(())
}
