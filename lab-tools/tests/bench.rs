//! The benchmark itself: every kind of cell yields a figure, by the means that it names. How fast is another matter.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Result, ensure};
use lab_tools::bench::{Fixture, Listener, Mode, Options, Path, Sample, Selection, Skipped, Variant, run, summarise};
use lab_tools::openers::openers;
use testbed::lab::{Lab, Layout};

/// So short that all cells take seconds.
const SLICE: Duration = Duration::from_millis(10);

#[derive(Default)]
struct Heard {
    samples: Vec<Sample>,
    skipped: Vec<Skipped>,
}

impl Listener for Heard {
    fn sample(&mut self, sample: Sample) -> Result<()> {
        self.samples.push(sample);
        Ok(())
    }

    fn skipped(&mut self, skipped: Skipped) -> Result<()> {
        self.skipped.push(skipped);
        Ok(())
    }

    fn progress(&mut self, _what: &str) {}
}

fn measure(selection: Selection) -> Result<Heard> {
    let mut heard = Heard::default();
    let options = Options { selection, rounds: 1, slice: SLICE, kube_proxy: None };
    run(&options, &mut heard)?;
    Ok(heard)
}

#[test]
fn every_combination_yields_a_figure() -> Result<()> {
    let variants = vec![Variant::IptablesLegacy, Variant::IptablesNft, Variant::Nftables, Variant::Kpx];
    let heard = measure(Selection { services: vec![1], variants: variants.clone(), ..Selection::default() })?;
    let cells = summarise(&heard.samples);
    for path in Path::ALL {
        let modes: BTreeSet<Mode> = cells.keys().filter(|key| key.path == path).map(|key| key.mode).collect();
        ensure!(modes.len() == if path == Path::Local { 6 } else { 3 }, "{path}: {modes:?}");
        for mode in modes {
            let of = |key: &&lab_tools::bench::Key| key.path == path && key.mode == mode;
            let found: BTreeSet<Variant> = cells.keys().filter(of).map(|key| key.variant).collect();
            ensure!(found.len() == variants.len() + 1, "{path}, {mode}: {found:?}");
        }
    }
    for (key, cell) in &cells {
        ensure!(cell.rounds == 1 && cell.rate.median > 0.0 && cell.ratio.median > 0.0, "{key:?}: {cell:?}");
    }
    Ok(())
}

#[test]
fn benchmark_names_what_it_skips() -> Result<()> {
    let selection = Selection {
        services: vec![1],
        paths: vec![Path::Local],
        modes: vec![Mode::TcpRr],
        variants: vec![Variant::KubeProxyNftables],
    };
    let heard = measure(selection)?;
    assert_eq!(heard.skipped.iter().map(|skipped| skipped.variant).collect::<Vec<_>>(), [Variant::KubeProxyNftables]);
    assert_eq!(heard.samples.iter().map(|sample| sample.variant).collect::<Vec<_>>(), [Variant::Direct]);
    Ok(())
}

#[test]
fn nodes_of_routable_pods_track_nothing() -> Result<()> {
    let lab = Lab::start(Layout::Routed)?;
    let fixture = Fixture::start(&lab, Variant::Direct, 1, None)?;
    ensure!(fixture.prove(Path::Routable).is_err(), "a node that masquerades tracks what it forwards");
    fixture.stop_masquerading()?;
    fixture.prove(Path::Routable)
}

#[test]
fn openers_are_measured_on_one_cpu_and_on_two() -> Result<()> {
    for row in openers(1)? {
        ensure!(row.alone.len() == 2 && row.together.len() == 1 && row.scaling() > 0.0, "{row:?}");
    }
    Ok(())
}
