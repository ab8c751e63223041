//! A sequence of packets to a node, while its cluster changes.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use testbed::reference::cluster::Cluster;
use testbed::reference::generate::{self, dice};
use testbed::reference::weights;

use crate::corpus;
use crate::fast::Fast;
use crate::fixture::Fixture;
use crate::model::{Got, Model, Sent, hex};
use crate::steps::Step;
use crate::stranger::Witness;

/// Packets between two readings of the counters, which cost as much as many packets.
const UNCOUNTED: u32 = 64;

pub(crate) struct Session<'a> {
    fixture: &'a mut Fixture,
    pub(crate) model: Model,
    uncounted: u32,
    counts_each: bool,
    pub(crate) results: Results,
}

/// The numbers of outcomes by name.
pub(crate) type Results = BTreeMap<&'static str, u64>;

/// A packet crossed the end of a second, so the time in its flow is ambiguous, or came just as a
/// backend's timeout expired.
#[derive(Debug)]
pub(crate) struct Blurred;

impl<'a> Session<'a> {
    pub(crate) fn start(fixture: &'a mut Fixture, cluster: u64, counts_each: bool) -> Result<Self> {
        let cluster = generate::cluster(&mut dice(cluster));
        fixture.forget()?;
        let fast = fixture.set_fast(Fast::OTHERS, &cluster)?;
        fixture.counted()?;
        let model = Model::new(cluster, fast, fixture.room);
        Ok(Self {
            fixture,
            model,
            uncounted: 0,
            counts_each,
            results: Results::new(),
        })
    }

    /// Sends a packet and compares its outcome. The outer error is a difference.
    pub(crate) fn step(&mut self, step: &Step) -> Result<Result<Option<Got>, Blurred>> {
        match step {
            Step::Age(secs) => {
                self.fixture.age(*secs)?;
                self.model.age(*secs);
                self.model.answered.extend(self.fixture.answer()?);
            }
            Step::Endpoints(seed) => {
                self.change(|cluster| generate::change_endpoints(&mut dice(*seed), cluster))?
            }
            Step::Weights(seed) => {
                self.change(|cluster| weights::give(&mut dice(*seed), cluster))?;
                *self.results.entry("weights").or_default() += 1;
            }
            Step::Fast(fast) => {
                self.model.fast = self.fixture.set_fast(*fast, self.model.cluster())?
            }
            Step::Packet(sent) => return self.packet(sent).map(|got| got.map(Some)),
            Step::Stranger(pretence) => {
                let witness = Witness::before(&self.model, pretence);
                let Ok(got) = self.packet(&pretence.sent)? else {
                    return Ok(Err(Blurred));
                };
                *self.results.entry(pretence.name()).or_default() += 1;
                if witness.watches_established() {
                    *self
                        .results
                        .entry("established_beside_strangers")
                        .or_default() += 1;
                }
                witness
                    .after(&self.model, &got)
                    .with_context(|| corpus::packet(&pretence.sent))?;
                return Ok(Ok(Some(got)));
            }
        }
        Ok(Ok(None))
    }

    fn change(&mut self, change: impl FnOnce(&mut Cluster)) -> Result<()> {
        let mut cluster = self.model.cluster().clone();
        change(&mut cluster);
        self.fixture.enter(&cluster)?;
        self.model.set_world(cluster);
        Ok(())
    }

    fn packet(&mut self, sent: &Sent) -> Result<Result<Got, Blurred>> {
        let is_in_doubt = self.model.is_in_doubt(sent);
        let (got, second) = self.fixture.run(sent)?;
        let Some(second) = second.filter(|_| !is_in_doubt) else {
            return Ok(Err(Blurred));
        };
        let fixture = &*self.fixture;
        let judged = self
            .model
            .judge(sent, &got, second, &|table, proto, src, dst| {
                fixture.chosen(table, proto, src, dst)
            });
        judged.with_context(|| {
            let line = corpus::packet(sent);
            let became = hex(&got.frame);
            format!(
                "{line} became {:?} mark={:#x} {became}",
                got.verdict, got.mark
            )
        })?;
        self.uncounted += 1;
        if self.counts_each || self.uncounted == UNCOUNTED {
            self.compare_counts()?;
        }
        Ok(Ok(got))
    }

    pub(crate) fn finish(&mut self) -> Result<()> {
        self.compare_counts()?;
        self.fixture.compare_flows(&self.model)
    }

    fn compare_counts(&mut self) -> Result<()> {
        self.uncounted = 0;
        let counted = self.fixture.counted().context("read the counters")?;
        let wanted = &mut self.model.counts;
        ensure!(
            counted == *wanted,
            "what was counted is\n{counted:?}\nand should be\n{wanted:?}"
        );
        wanted
            .events
            .iter()
            .for_each(|(event, n)| *self.results.entry(event.name()).or_default() += n);
        wanted
            .reasons
            .iter()
            .for_each(|(reason, n)| *self.results.entry(reason.name()).or_default() += n);
        wanted.events.clear();
        wanted.reasons.clear();
        Ok(())
    }
}
