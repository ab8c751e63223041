//! The changes of rows since the last round. Pure.
//!
//! The bytes of a round have a limit: what is left over follows in the next rounds. Services that
//! fail or have just recovered come first, and a share of the round stays for the rest. Within both
//! groups Services take turns, so a busy node delays numbers and loses none.

use std::collections::HashMap;

use super::{Digest, Round, Row, RowCounts, RowFailures};

/// The maximum number of shapes of a round; the first round has all.
const SHAPES: usize = 1_024;
/// The maximum number of rows of a round whose numbers changed.
const COUNTS: usize = 256;
/// The part of them that failing Services leave to the rest.
const CALM: usize = COUNTS / 4;

/// What a reader has been sent.
#[derive(Debug, Default)]
pub struct Sent {
    numbers: HashMap<(String, String), u32>,
    services: HashMap<u32, Known>,
    next: u32,
    urgent: Turns,
    calm: Turns,
}

/// A group of Services that take turns.
#[derive(Debug, Default)]
struct Turns {
    /// The number of the Service with which the next turn begins.
    next: u32,
}

/// The numbers of a row that differ from those last sent.
struct Change {
    number: u32,
    counts: RowCounts,
    /// True if the Service fails, or was last sent as failing.
    is_urgent: bool,
}

#[derive(Debug)]
struct Known {
    /// The last shape and numbers that were sent; `None` while they wait.
    digest: Option<Digest>,
    counts: RowCounts,
    /// True if the Service is in the current rows.
    is_here: bool,
}

impl Sent {
    /// Returns what changed, and remembers it as sent.
    pub fn round(&mut self, rows: impl IntoIterator<Item = Row>) -> Round {
        let is_first = self.next == 0;
        let shapes = if is_first { usize::MAX } else { SHAPES };
        let mut round = Round::default();
        for known in self.services.values_mut() {
            known.is_here = false;
        }
        let mut changed = Vec::new();
        for row in rows {
            round.services += 1;
            let (number, known) = self.known(&row);
            let digest = Digest::of(&row.shape);
            if known.digest != Some(digest) {
                if round.shapes.len() < shapes {
                    known.digest = Some(digest);
                    round.shapes.push((number, digest));
                } else {
                    round.more = true;
                }
            }
            let counts = row.numbers();
            // Numbers of a Service without a shape would mean nothing.
            if known.digest.is_some() && known.counts != counts {
                changed.push(Change {
                    number,
                    counts,
                    is_urgent: fails(&counts) || fails(&known.counts),
                });
            }
        }
        self.services.retain(|number, known| {
            if !known.is_here {
                round.gone.push(*number);
            }
            known.is_here
        });
        round.gone.sort_unstable();
        let gone = &round.gone;
        self.numbers
            .retain(|_, number| gone.binary_search(number).is_err());
        round.more |= changed.len() > COUNTS;
        round.counts = self.choose(changed);
        for (number, counts) in &round.counts {
            if let Some(known) = self.services.get_mut(number) {
                known.counts = *counts;
            }
        }
        round
    }

    fn known(&mut self, row: &Row) -> (u32, &mut Known) {
        let name = (row.shape.namespace.clone(), row.shape.name.clone());
        let next = &mut self.next;
        let number = *self.numbers.entry(name).or_insert_with(|| {
            *next = next.wrapping_add(1);
            *next
        });
        let known = self.services.entry(number).or_insert_with(|| Known {
            digest: None,
            counts: RowCounts::default(),
            is_here: true,
        });
        known.is_here = true;
        (number, known)
    }

    /// Returns the numbers for this round.
    fn choose(&mut self, changed: Vec<Change>) -> Vec<(u32, RowCounts)> {
        let (urgent, calm): (Vec<_>, Vec<_>) =
            changed.into_iter().partition(|change| change.is_urgent);
        let urgent = self.urgent.take(urgent, COUNTS - calm.len().min(CALM));
        let calm = self.calm.take(calm, COUNTS - urgent.len());
        let chosen = urgent.into_iter().chain(calm);
        chosen
            .map(|change| (change.number, change.counts))
            .collect()
    }
}

impl Turns {
    /// Returns as many changes as there are places, from the Service on whose turn it is.
    fn take(&mut self, mut changes: Vec<Change>, places: usize) -> Vec<Change> {
        changes.sort_by_key(|change| (change.number < self.next, change.number));
        changes.truncate(places);
        if let Some(last) = changes.last() {
            self.next = last.number.wrapping_add(1);
        }
        changes
    }
}

fn fails(counts: &RowCounts) -> bool {
    counts.3 != RowFailures::default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::Shape;
    use super::*;

    fn row(name: usize, ready: usize, opened: u64) -> Row {
        Row {
            shape: Shape {
                namespace: "shop".to_owned(),
                name: format!("web-{name}"),
                r#type: "ClusterIP".to_owned(),
                addresses: vec!["10.96.0.1".parse().unwrap()],
                ports: Vec::new(),
                ready,
                total: 3,
                conflicts: 0,
                endpoints: "aGVsbG8h".to_owned(),
            },
            flows: 0,
            open_flows: 0,
            counts: [opened, 0, 0, 0, 0],
            failures: None,
        }
    }

    /// A reader, who applies rounds.
    #[derive(Default)]
    struct Read(BTreeMap<u32, (Option<Digest>, RowCounts)>);

    impl Read {
        fn take(&mut self, round: &Round) {
            for (number, digest) in &round.shapes {
                self.0.entry(*number).or_default().0 = Some(*digest);
            }
            for (number, counts) in &round.counts {
                self.0.entry(*number).or_default().1 = *counts;
            }
            for number in &round.gone {
                self.0.remove(number);
            }
        }

        fn opened(&self) -> Vec<u64> {
            self.0.values().map(|(_, counts)| counts.2[0]).collect()
        }
    }

    #[test]
    fn idle_round_has_no_change_and_a_gone_service_is_named() {
        let mut sent = Sent::default();
        let mut read = Read::default();
        let first = sent.round([row(1, 3, 5), row(2, 3, 0)]);
        assert_eq!((first.shapes.len(), first.counts.len()), (2, 1));
        read.take(&first);
        let idle = sent.round([row(1, 3, 5), row(2, 3, 0)]);
        let nothing = Round {
            services: 2,
            ..Round::default()
        };
        assert_eq!(idle, nothing);
        let scaled = sent.round([row(1, 2, 5)]);
        assert_eq!(
            (scaled.shapes, scaled.gone),
            (vec![(1, Digest::of(&row(1, 2, 0).shape))], vec![2])
        );
        // A name that comes back is another Service.
        assert_eq!(sent.round([row(1, 2, 5), row(2, 3, 0)]).shapes[0].0, 3);
    }

    #[test]
    fn busy_node_sends_every_number_within_some_rounds_of_limited_size() {
        let services = 3 * COUNTS;
        let mut sent = Sent::default();
        let mut read = Read::default();
        read.take(&sent.round((0..services).map(|name| row(name, 3, 0))));
        for opened in 1..=4 {
            let round = sent.round((0..services).map(|name| row(name, 3, opened)));
            assert!(round.counts.len() <= COUNTS && round.more);
            assert!(serde_json::to_vec(&round).unwrap().len() < 64 << 10);
            read.take(&round);
        }
        // Each Service had its turn while all change.
        assert!(read.opened().iter().all(|opened| *opened > 0));
    }

    #[test]
    fn failing_service_comes_first() {
        let services = 3 * COUNTS;
        let rows = |opened: u64| {
            (0..services).map(move |name| Row {
                failures: (name == services - 1).then_some(RowFailures {
                    unserved: opened as f64,
                    failed: 0.0,
                }),
                ..row(name, 3, opened)
            })
        };
        let mut sent = Sent::default();
        sent.round(rows(0));
        for opened in 1..=3 {
            let round = sent.round(rows(opened));
            assert!((round.counts[0].1.3.unserved - opened as f64).abs() < f64::EPSILON);
        }
    }

    #[test]
    fn many_failing_services_starve_neither_each_other_nor_the_rest() {
        let failing = 3 * COUNTS;
        let rows = |opened: u64| {
            (0..failing + COUNTS).map(move |name| Row {
                failures: (name < failing).then_some(RowFailures {
                    unserved: opened as f64,
                    failed: 0.0,
                }),
                ..row(name, 3, opened)
            })
        };
        let mut sent = Sent::default();
        let mut read = Read::default();
        read.take(&sent.round(rows(0)));
        for opened in 1..=4 {
            let round = sent.round(rows(opened));
            assert_eq!(round.counts.len(), COUNTS);
            read.take(&round);
        }
        assert!(read.opened().iter().all(|opened| *opened > 0));
    }

    #[test]
    fn recovered_service_comes_before_calm_ones() {
        let services = 3 * COUNTS;
        let rows = |opened: u64, fails: bool| {
            (0..services).map(move |name| Row {
                failures: (fails && name == services - 1).then_some(RowFailures {
                    unserved: 1.0,
                    failed: 0.0,
                }),
                ..row(name, 3, opened)
            })
        };
        let mut sent = Sent::default();
        sent.round(rows(0, true));
        let recovered = sent.round(rows(1, false)).counts[0];
        assert_eq!(
            (recovered.0, recovered.1.3),
            (services as u32, RowFailures::default())
        );
    }

    #[test]
    fn change_of_all_shapes_takes_several_rounds() {
        let services = 2 * SHAPES + 1;
        let mut sent = Sent::default();
        let all = |ready| (0..services).map(move |name| row(name, ready, 0));
        assert_eq!(sent.round(all(3)).shapes.len(), services);
        let rounds: Vec<_> = (0..3).map(|_| sent.round(all(2))).collect();
        let sizes: Vec<_> = rounds.iter().map(|round| round.shapes.len()).collect();
        assert_eq!(sizes, [SHAPES, SHAPES, 1]);
        assert_eq!(
            [true, true, false].map(Some),
            [0, 1, 2].map(|at| Some(rounds[at].more))
        );
    }

    #[test]
    fn digest_keeps_its_form() {
        let digest = Digest::of(&row(1, 3, 0).shape);
        let text = serde_json::to_string(&digest).unwrap();
        assert_eq!(text.len(), 18);
        assert_eq!(serde_json::from_str::<Digest>(&text).unwrap(), digest);
        assert!(serde_json::from_str::<Digest>("\"short\"").is_err());
    }
}
