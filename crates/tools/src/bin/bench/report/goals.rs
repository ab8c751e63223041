//! The goals, and the figures found.

use tools::bench::{Key, MANY_SERVICES, Mode, Path, Spread, Variant};

use super::Cells;
use super::figures::markdown;
use super::overview::MODES;

/// A variant's rate is at least so many times that of another, in each mode of the first table;
/// nothing where there is no goal.
struct Goal {
    path: Path,
    variant: Variant,
    base: Variant,
    at_least: [Option<f64>; 4],
}

const fn goal(path: Path, variant: Variant, base: Variant, at_least: [Option<f64>; 4]) -> Goal {
    Goal {
        path,
        variant,
        base,
        at_least,
    }
}

/// Requests and answers over UDP have the goal of those over TCP.
const fn each(crr: f64, rr: f64, stream: f64) -> [Option<f64>; 4] {
    [Some(crr), Some(rr), Some(stream), Some(rr)]
}

use Path::{Calico, Host, KubeRouter, Local, Outside, OutsideRemote, Remote, Routable};
use Variant::{Direct, Kpx, KpxOff, KpxSocketAll, Limit, Nftables};

const AS_NFTABLES: [Option<f64>; 4] = each(1.0, 1.0, 1.0);
const NEAR_LIMIT: [Option<f64>; 4] = each(0.97, 0.97, 0.97);

const GOALS: [Goal; 19] = [
    goal(Routable, Kpx, Direct, each(1.0, 1.1, 1.03)),
    goal(Routable, Kpx, Limit, NEAR_LIMIT),
    goal(Routable, KpxOff, Direct, each(0.92, 0.95, 0.97)),
    goal(Local, Kpx, Direct, each(1.05, 1.18, 1.03)),
    goal(Local, Kpx, Limit, NEAR_LIMIT),
    goal(Local, KpxOff, Nftables, AS_NFTABLES),
    goal(Calico, Kpx, Direct, each(0.98, 1.1, 1.0)),
    goal(Calico, KpxOff, Nftables, AS_NFTABLES),
    goal(KubeRouter, Kpx, Direct, each(0.98, 1.1, 1.0)),
    goal(KubeRouter, KpxOff, Nftables, AS_NFTABLES),
    goal(
        Local,
        KpxSocketAll,
        Direct,
        [Some(0.98), Some(1.0), None, None],
    ),
    goal(Remote, Kpx, Direct, each(0.99, 1.05, 1.0)),
    goal(Remote, KpxOff, Nftables, AS_NFTABLES),
    goal(Host, Kpx, Direct, each(0.97, 0.99, 1.0)),
    goal(
        Host,
        KpxOff,
        Direct,
        [Some(0.88), Some(0.92), None, Some(0.92)],
    ),
    goal(
        Outside,
        Kpx,
        Direct,
        [Some(1.0), Some(1.06), None, Some(1.06)],
    ),
    goal(Outside, KpxOff, Nftables, AS_NFTABLES),
    goal(
        OutsideRemote,
        Kpx,
        Direct,
        [Some(0.98), Some(1.03), None, Some(1.03)],
    ),
    goal(OutsideRemote, KpxOff, Nftables, AS_NFTABLES),
];

/// A row for each path and pair of variants that was measured.
pub(super) fn table(cells: &Cells) -> String {
    let header: Vec<_> = ["".to_owned(), "compared".to_owned()]
        .into_iter()
        .chain(MODES.map(|mode| mode.to_string()))
        .collect();
    let rows: Vec<_> = GOALS.iter().filter_map(|goal| row(goal, cells)).collect();
    markdown(&header, &rows)
}

fn row(goal: &Goal, cells: &Cells) -> Option<Vec<String>> {
    let found = MODES.map(|mode| found(goal, mode, cells));
    if found.iter().all(Option::is_none) {
        return None;
    }
    let cell = |(found, at_least): (Option<Spread>, Option<f64>)| match (found, at_least) {
        (Some(found), Some(at_least)) => judged(&found, at_least),
        (Some(found), None) => format!("{:.2}", found.median),
        (None, _) => "–".to_owned(),
    };
    let names = [
        goal.path.to_string(),
        format!("{} : {}", goal.variant, goal.base),
    ];
    Some(
        names
            .into_iter()
            .chain(found.into_iter().zip(goal.at_least).map(cell))
            .collect(),
    )
}

fn found(goal: &Goal, mode: Mode, cells: &Cells) -> Option<Spread> {
    let cell = |variant| {
        cells.get(&Key {
            services: MANY_SERVICES,
            path: goal.path,
            mode,
            variant,
        })
    };
    cell(goal.variant)?.repeated(cell(goal.base)?)
}

/// The median decides. Where a shorter run would have found the other, the verdict says so.
fn judged(found: &Spread, at_least: f64) -> String {
    let verdict = match (
        found.median >= at_least,
        found.low >= at_least,
        found.high >= at_least,
    ) {
        (true, true, _) => "reached",
        (true, false, _) => "reached, not in every part",
        (false, _, true) => "**not reached**, but in some part",
        (false, _, false) => "**not reached**",
    };
    format!(
        "{:.2} ({:.2}–{:.2}) ≥ {at_least:.2}: {verdict}",
        found.median, found.low, found.high
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use tools::bench::{Latency, Sample, summarise};

    fn cells(kpx: &[u64]) -> Cells {
        let sample = |variant, round, amount| Sample {
            services: MANY_SERVICES,
            path: Local,
            mode: Mode::TcpRr,
            variant,
            round,
            amount,
            seconds: 1.0,
            cpu_seconds: 1.0,
            latency: Latency::default(),
            counted: None,
        };
        let of = |(round, amount): (usize, &u64)| {
            [sample(Direct, round, 100), sample(Kpx, round, *amount)]
        };
        summarise(&kpx.iter().enumerate().flat_map(of).collect::<Vec<_>>())
    }

    fn verdict(kpx: &[u64]) -> String {
        let goal = goal(Local, Kpx, Direct, each(1.05, 1.18, 1.03));
        row(&goal, &cells(kpx)).unwrap()[3]
            .split_once(": ")
            .unwrap()
            .1
            .to_owned()
    }

    #[test]
    fn median_decides_and_parts_doubt() {
        assert_eq!(verdict(&[120; 10]), "reached");
        assert_eq!(verdict(&[110; 10]), "**not reached**");
        assert_eq!(
            verdict(&[110, 110, 120, 120, 120, 120, 120, 120, 120, 120]),
            "reached, not in every part"
        );
        assert_eq!(
            verdict(&[120, 120, 110, 110, 110, 110, 110, 110, 110, 110]),
            "**not reached**, but in some part"
        );
    }

    #[test]
    fn table_leaves_unmeasured_goals_out() {
        let table = table(&cells(&[118; 5]));
        let rows: Vec<_> = table.lines().skip(2).collect();
        assert_eq!(rows.len(), 1, "{table}");
        assert!(
            rows[0].contains("| kpx : direct | – | 1.18 (1.18–1.18) ≥ 1.18: reached | – | – |"),
            "{table}"
        );
    }
}
