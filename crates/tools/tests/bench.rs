//! The benchmark: every kind of cell yields a figure by its stated means. The tests do not judge
//! speed.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use testbed::lab::{Lab, Layout};
use tools::bench::{
    Fixture, Listener, MANY_SERVICES, Mode, Options, Path, Sample, Selection, Skipped, Variant,
    run, summarise,
};
use tools::scale::{self, By, Figure, Found, Keep, Section, What};

/// Short enough that all cells take seconds.
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
    let options = Options {
        selection,
        rounds: 1,
        slice: SLICE,
        age: Duration::ZERO,
        seed: 1,
        kube_proxy: None,
        // The plan's 10,000 take long to set up.
        services_at_most: Some(100),
    };
    run(&options, &mut heard)?;
    Ok(heard)
}

#[test]
fn every_path_yields_a_figure() -> Result<()> {
    let variants = vec![Variant::Nftables, Variant::Kpx, Variant::KpxOff];
    let heard = measure(Selection {
        services: vec![1],
        variants: variants.clone(),
        ..Selection::default()
    })?;
    let cells = summarise(&heard.samples);
    for path in Path::ALL.into_iter().filter(|path| *path != Path::Overlay) {
        let modes: BTreeSet<Mode> = cells
            .keys()
            .filter(|key| key.path == path)
            .map(|key| key.mode)
            .collect();
        ensure!(modes.len() == 4, "{path}: {modes:?}");
        for mode in modes {
            let of = |key: &&tools::bench::Key| key.path == path && key.mode == mode;
            let found: BTreeSet<Variant> = cells.keys().filter(of).map(|key| key.variant).collect();
            ensure!(found.len() == 4, "{path}, {mode}: {found:?}");
        }
    }
    for (key, cell) in &cells {
        ensure!(
            cell.rounds == 1 && cell.rate.median > 0.0 && cell.ratio.median > 0.0,
            "{key:?}: {cell:?}"
        );
        ensure!(
            cell.latency.is_empty() == (key.mode == Mode::TcpStream),
            "{key:?}: {:?}",
            cell.latency
        );
    }
    Ok(())
}

#[test]
fn every_mode_yields_a_figure() -> Result<()> {
    let variants = vec![Variant::IptablesLegacy, Variant::IptablesNft, Variant::Kpx];
    let services = vec![MANY_SERVICES];
    let heard = measure(Selection {
        services,
        paths: vec![Path::Local],
        variants,
        ..Selection::default()
    })?;
    let cells = summarise(&heard.samples);
    ensure!(cells.len() == 10 * 4, "{:?}", cells.keys());
    Ok(())
}

#[test]
fn pods_behind_a_bridge_reach_those_of_another_node() -> Result<()> {
    let paths = vec![Path::Overlay];
    let variants = vec![Variant::Kpx];
    let heard = measure(Selection {
        paths,
        variants,
        modes: vec![Mode::TcpRr],
        ..Selection::default()
    })?;
    assert_eq!(summarise(&heard.samples).len(), 2);
    Ok(())
}

#[test]
fn sockets_of_pods_are_translated_in_one_lab() -> Result<()> {
    let paths = vec![Path::Local];
    let services = vec![MANY_SERVICES];
    let variants = vec![Variant::KpxSocketAll, Variant::KpxOff];
    let heard = measure(Selection {
        services,
        paths,
        variants,
        modes: vec![Mode::TcpCrr],
        ..Selection::default()
    })?;
    assert_eq!(summarise(&heard.samples).len(), 3);
    Ok(())
}

#[test]
fn benchmark_names_what_it_skips() -> Result<()> {
    let selection = Selection {
        services: vec![MANY_SERVICES],
        paths: vec![Path::Local],
        modes: vec![Mode::TcpRr],
        variants: vec![Variant::KubeProxyNftables],
        ..Selection::default()
    };
    let heard = measure(selection)?;
    assert_eq!(
        heard
            .skipped
            .iter()
            .map(|skipped| skipped.variant)
            .collect::<Vec<_>>(),
        [Variant::KubeProxyNftables]
    );
    assert_eq!(
        heard
            .samples
            .iter()
            .map(|sample| sample.variant)
            .collect::<Vec<_>>(),
        [Variant::Direct]
    );
    Ok(())
}

#[test]
fn nodes_of_routable_pods_track_nothing() -> Result<()> {
    let lab = Lab::start(Layout::Routed)?;
    let fixture = Fixture::start(&lab, Variant::Direct, 1, None)?;
    ensure!(
        fixture.prove(Path::Routable).is_err(),
        "a node that masquerades tracks what it forwards"
    );
    fixture.stop_masquerading()?;
    fixture.prove(Path::Routable)
}

#[derive(Default)]
struct Kept(Vec<Figure>);

impl Keep for Kept {
    fn figure(&mut self, figure: Figure) -> Result<()> {
        self.0.push(figure);
        Ok(())
    }

    fn progress(&mut self, _what: &str) {}
}

fn small(sections: &[Section], beside: &[By]) -> scale::Options {
    scale::Options {
        sections: sections.to_vec(),
        sizes: vec![(20, 3)],
        beside: beside.to_vec(),
        limit: Duration::from_secs(60),
        duration: Duration::from_millis(200),
        may_be_ended: false,
        calm: Duration::from_millis(200),
        agents: 1,
        per_second: 200,
        warm_up: Duration::from_millis(200),
        first_services: vec![10, 20],
        first_connections: 20,
        kube_proxy: None,
    }
}

#[test]
fn large_clusters_are_measured_with_kpx_and_with_rules() -> Result<()> {
    let beside = [By::Nftables, By::IptablesLegacy, By::IptablesNft];
    let options = small(&[Section::Clusters, Section::First, Section::Fan], &beside);
    let mut kept = Kept::default();
    scale::run(&options, &mut kept)?;
    let found = |by, size: (u32, u32), what| {
        let is_it = |figure: &&Figure| {
            figure.by == by && (figure.services, figure.endpoints) == size && figure.what == what
        };
        kept.0.iter().find(is_it).map(|figure| figure.found.clone())
    };
    let is_positive = |by, size, what| {
        let found = found(by, size, what);
        let failed: Vec<_> = kept
            .0
            .iter()
            .filter(|figure| matches!(figure.found, Found::Failed(_)))
            .collect();
        ensure!(
            matches!(found, Some(Found::Value(value)) if value > 0.0),
            "{by}, {what}: {found:?}, {failed:?}"
        );
        Ok(())
    };
    for what in [
        What::Programmed,
        What::Resident,
        What::KernelMemory,
        What::SliMean,
        What::Change1000P99,
    ] {
        is_positive(By::Kpx, (20, 3), what)?;
    }
    let idle = found(By::Kpx, (20, 3), What::IdleCpu);
    ensure!(
        matches!(idle, Some(Found::Value(share)) if (0.0..100.0).contains(&share)),
        "{idle:?}"
    );
    for by in [By::Kpx].into_iter().chain(beside) {
        is_positive(by, (20, 3), What::Programmed)?;
        is_positive(by, (20, 3), What::FirstFollowsP50)?;
    }
    for by in [By::Kpx, By::Nftables, By::IptablesLegacy] {
        is_positive(by, (20, 1), What::FirstP99)?;
    }
    assert_eq!(
        found(By::Kpx, (20, 3), What::RestartLost),
        Some(Found::Value(0.0))
    );
    for what in [What::Fan1, What::FanUnfiltered, What::FanUnfilteredHeadless] {
        is_positive(By::Kpx, (200, 50), what)?;
    }
    let events = [
        (What::Fan1Events, 1.0),
        (What::FanHeadlessEvents, 0.0),
        (What::FanUnfilteredEvents, 1.0),
        (What::FanUnfilteredHeadlessEvents, 1.0),
    ];
    for (what, count) in events {
        assert_eq!(
            found(By::Kpx, (200, 50), what),
            Some(Found::Value(count)),
            "{what}"
        );
    }
    let of_headless = found(By::Kpx, (200, 50), What::FanHeadless);
    ensure!(
        matches!(of_headless, Some(Found::Value(bytes)) if bytes < 100.0),
        "no proxy asks for it: {of_headless:?}"
    );
    Ok(())
}

/// A folder for pins, removed with this value.
struct Pins(PathBuf);

impl Drop for Pins {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0); // Nothing may have been pinned.
    }
}

/// kpx takes the place of kube-proxy, whose flags it accepts: the tests have no kube-proxy.
#[test]
fn kube_proxy_is_measured_from_its_start_to_its_changes() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let pins = Pins(format!("/sys/fs/bpf/kpx-scale-{}", std::process::id()).into());
    let program = dir.path().join("kube-proxy");
    let run_dir = dir.path().join("run");
    let script = format!(
        "#!/bin/sh\n[ \"$1\" = --version ] && exec echo Kubernetes v1.36.0\n\
         exec {} run --run-dir {} --bpf-dir {} --metrics-bind-address= --healthz-bind-address= \"$@\"\n",
        testbed::agent::binary()?.display(),
        run_dir.display(),
        pins.0.display(),
    );
    fs::write(&program, script)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    let by = By::KubeProxyNftables;
    let options = scale::Options {
        kube_proxy: Some(program),
        ..small(&[Section::Clusters], &[by])
    };
    let mut kept = Kept::default();
    scale::run(&options, &mut kept)?;
    let of: Vec<_> = kept.0.iter().filter(|figure| figure.by == by).collect();
    for what in [
        What::Programmed,
        What::StartWait,
        What::StartCpu,
        What::PeakResident,
        What::StartBytes,
        What::FirstFollowsMax,
    ] {
        let found = of
            .iter()
            .find(|figure| figure.what == what)
            .and_then(|figure| figure.value());
        ensure!(found.is_some_and(|value| value > 0.0), "{what}: {of:?}");
    }
    Ok(())
}

#[test]
fn run_that_may_be_ended_says_so_before_each_cluster() -> Result<()> {
    let options = scale::Options {
        may_be_ended: true,
        ..small(&[Section::Clusters], &[By::Nftables])
    };
    let mut kept = Kept::default();
    scale::run(&options, &mut kept)?;
    for by in [By::Kpx, By::Nftables] {
        let of: Vec<_> = kept.0.iter().filter(|figure| figure.by == by).collect();
        ensure!(
            of[0].what == What::Programmed && of[0].found == Found::Unfinished,
            "{by}: {:?}",
            of[0]
        );
        let found = of
            .iter()
            .rfind(|figure| figure.what == What::Programmed)
            .and_then(|figure| figure.value());
        ensure!(found.is_some_and(|millis| millis > 0.0), "{by}: {of:?}");
    }
    Ok(())
}
