//! The first table: what kpx's users get, one row for each path.

use tools::bench::{Key, MANY_SERVICES, Mode, Path, Variant};

use super::Cells;
use super::figures::{grouped, machine, markdown};
use super::plots::OVERVIEW;
use crate::record::Record;

/// The figures in a cell, from left to right.
pub(super) const MODES: [Mode; 4] = [Mode::TcpCrr, Mode::TcpRr, Mode::TcpStream, Mode::UdpRr];
/// Those in a cell of the second table, about a connection's first second.
const YOUNG: [Mode; 2] = [Mode::TcpRrYoung, Mode::UdpRrYoung];

/// A row: its name in short, the path, and the variant of kpx in the first column.
pub(super) const ROWS: [(&str, Path, Variant); 9] = [
    (
        "pod → pod, same node, untracked",
        Path::Routable,
        Variant::Kpx,
    ),
    ("pod → pod, same node, tracked", Path::Local, Variant::Kpx),
    ("the same, Calico's chains", Path::Calico, Variant::Kpx),
    (
        "the same, kube-router's chains",
        Path::KubeRouter,
        Variant::Kpx,
    ),
    (
        "the same without chains, `--socket-lb all`",
        Path::Local,
        Variant::KpxSocketAll,
    ),
    ("pod → pod of another node", Path::Remote, Variant::Kpx),
    ("node → its own pod", Path::Host, Variant::Kpx),
    (
        "outside → node port, backend there",
        Path::Outside,
        Variant::Kpx,
    ),
    (
        "outside → node port, backend elsewhere",
        Path::OutsideRemote,
        Variant::Kpx,
    ),
];

/// The tables, how they were measured, and how far two equal labs differ in the first.
pub(super) fn text(records: &[Record], cells: &Cells) -> String {
    let services = grouped(MANY_SERVICES as u64);
    let heading = format!(
        "Median ratios to *direct* (no Services at all), {services} Services: TCP connect/request/response · TCP request/response · TCP \
         stream · UDP request/response. Above 1 is faster than *direct*. All but the first go over connections that have been \
         open for seconds."
    );
    let young = table(cells, &YOUNG).map(|table| {
        format!("In a connection's first second: TCP request/response · UDP request/response.\n\n{table}")
    });
    let drawing = format!("![ratios to direct by path](performance/{OVERVIEW})");
    let open = table(cells, &MODES).unwrap_or_default();
    let parts = [
        Some(heading),
        Some(open),
        young,
        Some(noise(cells)),
        Some(machine(records)),
        Some(drawing),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join("\n\n")
}

/// Returns nothing if no cell of it was measured.
fn table(cells: &Cells, modes: &[Mode]) -> Option<String> {
    let header = ["", "kpx", "kpx, shortcuts off", "nftables", "limit"].map(str::to_owned);
    let row = |&(name, path, variant): &(&str, Path, Variant)| {
        let is_measured = |mode| ratio(cells, path, mode, variant).is_some();
        let others = [Variant::KpxOff, Variant::Nftables, Variant::Limit];
        // Beside a flag of kpx, others have the figures of the same path without it.
        let other = |other| {
            if variant == Variant::Kpx {
                cell(cells, path, other, modes)
            } else {
                String::new()
            }
        };
        let figures = [cell(cells, path, variant, modes)]
            .into_iter()
            .chain(others.map(other))
            .collect();
        modes
            .iter()
            .copied()
            .any(is_measured)
            .then(|| [vec![name.to_owned()], figures].concat())
    };
    let rows: Vec<_> = ROWS.iter().filter_map(row).collect();
    (!rows.is_empty()).then(|| markdown(&header, &rows))
}

fn cell(cells: &Cells, path: Path, variant: Variant, modes: &[Mode]) -> String {
    let ratios: Vec<_> = modes
        .iter()
        .map(|mode| ratio(cells, path, *mode, variant))
        .collect();
    if ratios.iter().all(Option::is_none) {
        return "–".to_owned();
    }
    let text =
        |ratio: Option<f64>| ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.2}"));
    ratios.into_iter().map(text).collect::<Vec<_>>().join(" · ")
}

pub(super) fn ratio(cells: &Cells, path: Path, mode: Mode, variant: Variant) -> Option<f64> {
    Some(
        cells
            .get(&Key {
                services: MANY_SERVICES,
                path,
                mode,
                variant,
            })?
            .ratio
            .median,
    )
}

/// Says between which figures the second lab without Services lies, in these cells.
fn noise(cells: &Cells) -> String {
    let all = ROWS
        .iter()
        .flat_map(|(_, path, _)| MODES.map(|mode| ratio(cells, *path, mode, Variant::Control)));
    let (low, high) = all
        .flatten()
        .fold((f64::MAX, f64::MIN), |(low, high), ratio| {
            (low.min(ratio), high.max(ratio))
        });
    if low > high {
        return "A second lab without Services was not measured, so the noise is not known."
            .to_owned();
    }
    format!(
        "A second lab without Services has {low:.2} to {high:.2} in these cells: that is the noise."
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Run;
    use tools::bench::{Latency, Sample, summarise};

    fn samples(path: Path, mode: Mode, rates: &[(Variant, u64)]) -> Vec<Sample> {
        let sample = |&(variant, amount): &(Variant, u64)| Sample {
            services: MANY_SERVICES,
            path,
            mode,
            variant,
            round: 0,
            amount,
            seconds: 1.0,
            cpu_seconds: 1.0,
            latency: Latency::default(),
            counted: None,
        };
        rates.iter().map(sample).collect()
    }

    #[test]
    fn table_shows_measured_rows() {
        use Variant::{Control, Direct, Kpx, KpxOff, Limit, Nftables};
        let rates = [
            (Direct, 100),
            (Control, 98),
            (Kpx, 105),
            (KpxOff, 91),
            (Nftables, 93),
            (Limit, 110),
        ];
        let crr = samples(Path::Local, Mode::TcpCrr, &rates);
        let rr = samples(
            Path::Local,
            Mode::TcpRr,
            &[(Direct, 100), (Kpx, 118), (Variant::KpxSocketAll, 99)],
        );
        let young = samples(Path::Local, Mode::UdpRrYoung, &[(Direct, 100), (Kpx, 94)]);
        let cells = summarise(&[crr, rr, young].concat());
        let row = "| pod → pod, same node, tracked | 1.05 · 1.18 · – · – | 0.91 · – · – · – | 0.93 · – · – · – | 1.10 · – · – · – |";
        let run = Record::Run(Run {
            is_quick: true,
            rounds: 31,
            slice_ms: 20,
            seed: 1,
        });
        let text = text(&[run], &cells);
        let rows: Vec<_> = text.lines().filter(|line| line.starts_with("| ")).collect();
        let flag = "| the same without chains, `--socket-lb all` | – · 0.99 · – · – |  |  |  |";
        let first_second = "| pod → pod, same node, tracked | – · 0.94 | – | – | – |";
        assert_eq!(rows[1..], [row, flag, rows[0], first_second]);
        assert!(text.contains("has 0.98 to 0.98 in these cells"), "{text}");
        assert!(
            text.contains("A quick run: 31 rounds, slices of 20 ms, seed 1.\n"),
            "{text}"
        );
    }
}
