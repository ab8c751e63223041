//! The runs of the section `scale`. Each measures some parts, and replaces what earlier runs found
//! of these.

use std::collections::BTreeSet;

use tools::scale::{Figure, Part};

use super::scale::{Figures, words};
use super::with_notes;
use crate::record::Record;

pub(super) struct Run<'a> {
    records: &'a [Record],
    /// The figures that no later run replaces.
    pub(super) figures: Figures<'a>,
}

/// Returns the runs with figures that no later run replaces, the earliest first.
pub(super) fn left<'a>(records: &'a [Record]) -> Vec<Run<'a>> {
    let mut replaced = BTreeSet::new();
    let mut runs = Vec::new();
    let of_machine = records.chunk_by(|_, next| !matches!(next, Record::Machine(_)));
    for records in of_machine.collect::<Vec<_>>().into_iter().rev() {
        let figure = |record: &'a Record| {
            if let Record::Figure(figure) = record {
                Some(figure)
            } else {
                None
            }
        };
        let mut figures: Vec<&Figure> = records.iter().filter_map(figure).collect();
        figures.retain(|figure| !replaced.contains(&figure.part()));
        replaced.extend(figures.iter().map(|figure| figure.part()));
        if !figures.is_empty() {
            runs.push(Run {
                records,
                figures: Figures(figures),
            });
        }
    }
    runs.reverse();
    runs
}

impl Run<'_> {
    /// Returns the machine, and what the run said of itself.
    pub(super) fn head(&self) -> String {
        with_notes(self.records)
    }

    fn parts(&self) -> String {
        let parts: BTreeSet<_> = self.figures.0.iter().map(|figure| figure.part()).collect();
        let words = |part| match part {
            Part::Cluster(services, endpoints) => words((services, endpoints)),
            Part::First => "first packets by number of Services".to_owned(),
            Part::Fan => "what one API server sends".to_owned(),
        };
        parts.into_iter().map(words).collect::<Vec<_>>().join("; ")
    }
}

/// Returns the machines, each with the parts that it measured if there is more than one run.
pub(super) fn machines(runs: &[Run<'_>]) -> String {
    match runs {
        [run] => run.head(),
        runs => runs
            .iter()
            .map(|run| format!("For {}:\n\n{}", run.parts(), run.head()))
            .collect::<Vec<_>>()
            .join("\n\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tools::scale::{By, Found, What};

    /// Returns a run: its machine's memory in GiB, and its figures by size and kind.
    fn run(memory: u32, figures: &[(u32, u32, What, f64)]) -> Vec<Record> {
        let machine = format!(
            r#"{{"machine":{{"processor":"P","cpus":1,"memory_gib":{memory},"kernel":"K","kpx":"","iptables":"","nft":"","date":"D"}}}}"#
        );
        let figure = |&(services, endpoints, what, value): &(u32, u32, What, f64)| {
            Record::Figure(Figure {
                by: By::Kpx,
                services,
                endpoints,
                what,
                found: Found::Value(value),
            })
        };
        [serde_json::from_str(&machine).unwrap()]
            .into_iter()
            .chain(figures.iter().map(figure))
            .collect()
    }

    #[test]
    fn later_run_replaces_the_parts_that_it_measured() {
        let records = [
            run(
                1,
                &[
                    (1_000, 50, What::Programmed, 1.0),
                    (1_000, 50, What::Resident, 2.0),
                ],
            ),
            run(
                2,
                &[
                    (5_000, 50, What::Programmed, 3.0),
                    (9, 1, What::FirstP50, 4.0),
                    (8, 1, What::FirstP50, 4.5),
                ],
            ),
            run(
                3,
                &[
                    (1_000, 50, What::Programmed, 5.0),
                    (9, 1, What::FirstP50, 6.0),
                    (9, 1, What::Programmed, 7.0),
                ],
            ),
        ];
        let records = records.concat();
        let runs = left(&records);
        let figures = Figures::of(&runs);
        let value = |services, endpoints, what| figures.value(By::Kpx, (services, endpoints), what);
        assert_eq!(value(1_000, 50, What::Programmed), Some(5.0));
        assert_eq!(
            value(1_000, 50, What::Resident),
            None,
            "the later run did not find it"
        );
        assert_eq!(value(5_000, 50, What::Programmed), Some(3.0));
        assert_eq!(
            [9, 8].map(|services| value(services, 1, What::FirstP50)),
            [Some(6.0), None]
        );
        assert_eq!(value(9, 1, What::Programmed), Some(7.0));
        let machines = machines(&runs);
        let expected = "For 5,000 Services × 50 = 250,000 endpoints:\n\nD: P, 1 CPUs, 2 GiB; Linux K; ; ; \n\n\
            For 9 Services × 1 = 9 endpoints; 1,000 Services × 50 = 50,000 endpoints; first packets by number of Services:\n\n\
            D: P, 1 CPUs, 3 GiB; Linux K; ; ; ";
        assert_eq!(machines, expected);
    }

    #[test]
    fn machine_of_one_run_stands_alone() {
        let records = run(4, &[(1_000, 50, What::Programmed, 1.0)]);
        assert_eq!(
            machines(&left(&records)),
            "D: P, 1 CPUs, 4 GiB; Linux K; ; ; "
        );
    }
}
