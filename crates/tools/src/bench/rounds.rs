//! Rounds: each measures every variant in every mode once, in direct succession.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::fixture::{self, Fixture};
use super::open::Opened;
use super::order::Order;
use super::{Latency, Mode, Path, Selection, Variant, Work};
use testbed::agent::idle;
use testbed::lab::Lab;

#[derive(Clone, Debug)]
pub struct Options {
    pub selection: Selection,
    pub rounds: usize,
    /// The time per variant and round.
    pub slice: Duration,
    /// The minimum age of open connections.
    pub age: Duration,
    /// Determines the order of variants.
    pub seed: u64,
    /// The program of kube-proxy, if available.
    pub kube_proxy: Option<PathBuf>,
    /// The maximum number of Services to create for a cell; by default the number of its plan.
    pub services_at_most: Option<usize>,
}

/// The result of a slice.
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
    /// Of all CPUs.
    pub cpu_seconds: f64,
    #[serde(default, skip_serializing_if = "Latency::is_empty")]
    pub latency: Latency,
    /// See [`super::EVENTS`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counted: Option<[u64; 3]>,
}

impl Sample {
    pub fn of(
        services: usize,
        path: Path,
        mode: Mode,
        variant: Variant,
        round: usize,
        done: Work,
    ) -> Self {
        Self {
            services,
            path,
            mode,
            variant,
            round,
            amount: done.amount,
            seconds: done.time.as_secs_f64(),
            cpu_seconds: done.cpu.as_secs_f64(),
            latency: done.latency,
            counted: done.counted,
        }
    }
}

/// A variant that could not run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    pub variant: Variant,
    pub why: String,
}

/// Receives a run's samples as they are measured.
pub trait Listener {
    fn sample(&mut self, sample: Sample) -> Result<()>;
    fn skipped(&mut self, skipped: Skipped) -> Result<()>;
    /// Prints progress.
    fn progress(&mut self, what: &str);
}

pub fn run(options: &Options, listener: &mut impl Listener) -> Result<()> {
    let mut skipped = Vec::new();
    for services in options.selection.services() {
        let all: Vec<Path> = options.selection.paths(services).collect();
        for paths in all.chunk_by(|a, b| a.layout() == b.layout()) {
            let variants = runnable(options, services, paths, &mut skipped, listener)?;
            among(options, services, paths, &variants, listener)?;
        }
    }
    Ok(())
}

/// Returns the variants of these paths that can run here, and reports the others once.
fn runnable(
    options: &Options,
    services: usize,
    paths: &[Path],
    skipped: &mut Vec<Skipped>,
    listener: &mut impl Listener,
) -> Result<Vec<Variant>> {
    let mut variants = Vec::new();
    for variant in paths
        .iter()
        .flat_map(|path| options.selection.variants(services, *path))
    {
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
    Ok(variants)
}

/// Measures all cells of a layout's paths with a number of Services, each variant in its own lab.
fn among(
    options: &Options,
    services: usize,
    paths: &[Path],
    variants: &[Variant],
    listener: &mut impl Listener,
) -> Result<()> {
    let Some(layout) = paths.first().map(|path| path.layout()) else {
        return Ok(());
    };
    listener.progress(&format!("{services} services: set up"));
    let labs: Vec<Lab> = variants
        .iter()
        .map(|_| Lab::start(layout))
        .collect::<Result<_>>()?;
    let created = services.min(options.services_at_most.unwrap_or(services));
    let start = |(lab, &variant)| {
        Fixture::start(lab, variant, created, options.kube_proxy.as_deref())
            .with_context(|| format!("{variant}, {services} services"))
    };
    let fixtures: Vec<Fixture<'_>> = labs
        .iter()
        .zip(variants)
        .map(start)
        .collect::<Result<_>>()?;
    for &path in paths {
        let wanted = options.selection.variants(services, path);
        let fixtures: Vec<&Fixture<'_>> = fixtures
            .iter()
            .filter(|fixture| wanted.contains(&fixture.variant))
            .collect();
        fixtures
            .iter()
            .try_for_each(|fixture| fixture.prepare(path))?;
        if fixtures.iter().any(|fixture| fixture.variant.is_kpx()) {
            idle(fixture::SETTLE)?;
        }
        for fixture in &fixtures {
            fixture
                .prove(path)
                .with_context(|| format!("{}, {path}, {services} services", fixture.variant))?;
        }
        on(options, services, path, &fixtures, listener)?;
    }
    Ok(())
}

/// Measures all rounds of a path: first modes that open connections, then modes with open
/// connections.
fn on(
    options: &Options,
    services: usize,
    path: Path,
    fixtures: &[&Fixture<'_>],
    listener: &mut impl Listener,
) -> Result<()> {
    let (open, fresh): (Vec<Mode>, _) = options
        .selection
        .modes(services, path)
        .into_iter()
        .partition(|mode| mode.stays_open());
    // Open connections age while the other modes are measured.
    let mut opened = Opened::all(path, fixtures, &open)?;
    let mut order = Order::new(options.seed);
    for (modes, what) in [(fresh, "new connections"), (open, "open connections")] {
        if modes.iter().any(|mode| mode.stays_open()) {
            opened.ripen(options.age)?;
        }
        for round in 0..if modes.is_empty() { 0 } else { options.rounds } {
            listener.progress(&format!(
                "{services} services, {path}, {what}: round {} of {}",
                round + 1,
                options.rounds
            ));
            for &mode in modes.iter().filter(|mode| mode.is_due(round)) {
                for fixture in order.shuffled(fixtures) {
                    let done = opened.run(fixture, mode, options.slice);
                    let done = done.unwrap_or_else(|| fixture.run(path, options.slice, mode));
                    let done =
                        done.with_context(|| format!("{}, {services} services", fixture.variant))?;
                    listener.sample(Sample::of(
                        services,
                        path,
                        mode,
                        fixture.variant,
                        round,
                        done,
                    ))?;
                    opened.keep()?;
                }
            }
        }
    }
    Ok(())
}
