//! The targets, and the figures found.

use lab_tools::bench::{Key, Mode, Path, Spread, Variant};

use super::Cells;
use super::figures::{grouped, markdown, spread};

/// A variant's rate is at least so many times that of another, with each of these numbers of Services.
#[derive(Clone, Copy)]
struct Target {
    variant: Variant,
    base: Variant,
    path: Path,
    mode: Mode,
    at_least: f64,
    /// Where we want to end.
    aim: Option<f64>,
    services: &'static [usize],
}

const EVERY: &[usize] = &[1, 1_000, 10_000, 50_000];

const fn target(variant: Variant, base: Variant, path: Path, mode: Mode, at_least: f64) -> Target {
    Target { variant, base, path, mode, at_least, aim: None, services: EVERY }
}

impl Target {
    const fn aim(self, aim: f64) -> Self {
        Self { aim: Some(aim), ..self }
    }

    const fn services(self, services: &'static [usize]) -> Self {
        Self { services, ..self }
    }
}

use Mode::{TcpCrr, TcpRr, TcpStream};
use Path::{Host, Local, Routable};
use Variant::{Control, Direct, IptablesLegacy, Kpx, KpxFast, KpxSocket, Nftables};

const TARGETS: [Target; 11] = [
    target(Kpx, Direct, Local, TcpCrr, 0.92).aim(0.97),
    target(Kpx, Nftables, Local, TcpCrr, 1.05),
    target(Kpx, IptablesLegacy, Local, TcpCrr, 4.0).services(&[10_000]),
    target(Kpx, Direct, Local, TcpRr, 0.95).aim(0.98),
    target(Kpx, Nftables, Local, TcpRr, 1.03),
    target(Kpx, Direct, Local, TcpStream, 0.95),
    target(KpxFast, Direct, Local, TcpCrr, 1.0),
    target(KpxFast, Direct, Local, TcpRr, 1.12),
    target(KpxFast, Direct, Local, TcpStream, 1.0),
    target(KpxSocket, Direct, Host, TcpRr, 0.99),
    target(KpxSocket, Direct, Host, TcpCrr, 0.97),
];

/// A row for each target and number of Services, then how figures change with that number.
pub(super) fn table(cells: &Cells) -> String {
    let header = ["", "Services", "must reach", "found", ""].map(str::to_owned);
    // Pods on a node must reach the same targets whether the node masquerades or not.
    let routable =
        TARGETS.iter().filter(|target| target.path == Local).map(|target| Target { path: Routable, ..*target });
    let targets: Vec<_> = TARGETS.into_iter().chain(routable).collect();
    let rows: Vec<_> =
        targets.iter().flat_map(|target| target.services.iter().filter_map(|n| row(target, *n, cells))).collect();
    let growth = ["", "1 → 50,000 Services", "spread of direct, again", ""].map(str::to_owned);
    let variants =
        [(Kpx, TcpCrr), (Kpx, TcpRr), (Kpx, TcpStream), (KpxFast, TcpCrr), (KpxFast, TcpRr), (KpxFast, TcpStream)];
    let grown: Vec<_> = [Local, Routable]
        .into_iter()
        .flat_map(|path| variants.map(|(variant, mode)| change(variant, path, mode, cells)))
        .flatten()
        .collect();
    format!("{}\n\n{}", markdown(&header, &rows), markdown(&growth, &grown))
}

/// `None` where that was not measured.
fn row(target: &Target, services: usize, cells: &Cells) -> Option<Vec<String>> {
    let &Target { variant, base, path, mode, at_least, aim, .. } = target;
    let cell = |variant| cells.get(&Key { services, path, mode, variant });
    let found = cell(variant)?.against(cell(base)?)?;
    let aim = aim.map(|aim| format!(" (aim {aim:.2})")).unwrap_or_default();
    Some(vec![
        format!("{variant} : {base}, {path}, {mode}"),
        if services == 1 { "alone".to_owned() } else { grouped(services as u64) },
        format!("{at_least:.2}{aim}"),
        spread(&found),
        verdict(found.median >= at_least),
    ])
}

/// Tells if a ratio to direct is another with many Services, by more than two equal labs differ.
fn change(variant: Variant, path: Path, mode: Mode, cells: &Cells) -> Option<Vec<String>> {
    let cell = |services, variant| Some(&cells.get(&Key { services, path, mode, variant })?.ratio);
    let (few, many) = (cell(1, variant)?, cell(50_000, variant)?);
    let width = |spread: &Spread| spread.high - spread.low;
    let noise = f64::max(width(cell(1, Control)?), width(cell(50_000, Control)?));
    let change = many.median - few.median;
    Some(vec![
        format!("{variant}, {path}, {mode}"),
        format!("{:.2} → {:.2} ({change:+.2})", few.median, many.median),
        format!("{noise:.2}"),
        verdict(change >= -noise),
    ])
}

fn verdict(reached: bool) -> String {
    if reached { "reached" } else { "**not reached**" }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use lab_tools::bench::{Sample, summarise};

    fn cells(kpx: u64, many: u64) -> Cells {
        let amounts = [
            (1, Direct, 100),
            (1, Control, 98),
            (1, Kpx, kpx),
            (50_000, Direct, 100),
            (50_000, Control, 103),
            (50_000, Kpx, many),
        ];
        let (path, mode) = (Local, TcpRr);
        let sample = |(services, variant, amount)| {
            (0..2).map(move |round| Sample {
                services,
                path,
                mode,
                variant,
                round,
                amount,
                seconds: 1.0,
                cpu_seconds: 1.0,
            })
        };
        summarise(&amounts.into_iter().flat_map(sample).collect::<Vec<_>>())
    }

    #[test]
    fn report_names_missed_targets() {
        let target = &TARGETS[3];
        assert_eq!(row(target, 1, &cells(95, 95)).unwrap()[4], "reached");
        assert_eq!(row(target, 1, &cells(94, 95)).unwrap()[4], "**not reached**");
        assert_eq!(row(target, 10_000, &cells(95, 95)), None);
        assert_eq!(change(Kpx, Local, TcpRr, &cells(95, 95)).unwrap()[3], "reached");
        assert_eq!(change(Kpx, Local, TcpRr, &cells(95, 90)).unwrap()[3], "**not reached**");
    }
}
