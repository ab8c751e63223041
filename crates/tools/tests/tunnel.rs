//! The ways of a host outside of the cluster: every one yields a figure, by the means that it
//! names. How fast is another matter.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tools::bench::Mode;
use tools::tunnel::{Found, MODES, Options, Way, run, summarise};

fn measure(kubectl: &str) -> Result<Vec<Found>> {
    let mut all = Vec::new();
    let options = Options {
        rounds: 1,
        slice: Duration::from_millis(10),
        seed: 1,
        kubectl: kubectl.into(),
    };
    run(&options, &mut |found| {
        all.push(found);
        Ok(())
    })?;
    Ok(all)
}

/// Checks that each of these ways was measured in each mode.
fn are_measured(ways: &[Way], found: &[Found]) -> Result<()> {
    let samples: Vec<_> = found.iter().filter_map(Found::sample).cloned().collect();
    let cells = summarise(&samples);
    ensure!(
        cells.len() == ways.len() * MODES.len(),
        "{:?}",
        cells.keys()
    );
    for way in ways {
        for mode in MODES {
            let cell = cells
                .get(&(*way, mode))
                .with_context(|| format!("{way}, {mode}"))?;
            ensure!(
                cell.rate.median > 0.0 && cell.ratio.median > 0.0,
                "{way}, {mode}: {cell:?}"
            );
            ensure!(
                cell.latency.is_empty() == (mode == Mode::TcpStream),
                "{way}, {mode}: {:?}",
                cell.latency
            );
        }
    }
    Ok(())
}

#[test]
fn every_way_of_a_host_outside_yields_a_figure() -> Result<()> {
    let found = measure("kubectl")?;
    are_measured(&Way::ALL, &found)?;
    ensure!(
        found
            .iter()
            .any(|found| matches!(found, Found::Kubectl(version) if version.starts_with('v'))),
        "{found:?}"
    );
    Ok(())
}

#[test]
fn benchmark_tells_of_a_missing_kubectl_and_measures_the_rest() -> Result<()> {
    let found = measure("/no/such/kubectl")?;
    are_measured(&[Way::Route, Way::NodePort, Way::Tunnel], &found)?;
    let skipped = found.iter().find_map(|found| match found {
        Found::Skipped { way, why } => Some((*way, why.as_str())),
        Found::Sample(_) | Found::Kubectl(_) => None,
    });
    assert_eq!(
        skipped,
        Some((
            Way::Kubectl,
            "/no/such/kubectl: No such file or directory (os error 2)"
        ))
    );
    Ok(())
}
