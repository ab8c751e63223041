//! Packets one after the other, to a node in one state of its cluster.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use testbed::reference::generate::{self, dice};

use crate::bed::Bed;
use crate::corpus;
use crate::model::{Got, Model, Sent, hex};
use crate::steps::Step;

/// Packets between two looks at the counters: reading them costs as much as many packets.
const UNCOUNTED: u32 = 64;

pub(crate) struct Session<'a> {
    bed: &'a mut Bed,
    pub(crate) model: Model,
    uncounted: u32,
    counts_each: bool,
    pub(crate) tally: Tally,
}

/// How often each thing has happened.
pub(crate) type Tally = BTreeMap<&'static str, u64>;

/// A packet ran over the end of a second, so that nobody knows what time its flow remembers.
#[derive(Debug)]
pub(crate) struct Blurred;

impl<'a> Session<'a> {
    pub(crate) fn start(bed: &'a mut Bed, world: u64, counts_each: bool) -> Result<Self> {
        let world = generate::world(&mut dice(world));
        bed.forget()?;
        bed.enter(&world)?;
        bed.counted()?;
        let model = Model::new(world, bed.is_fast);
        Ok(Self { bed, model, uncounted: 0, counts_each, tally: Tally::new() })
    }

    /// What a packet became. The outer error is a difference.
    pub(crate) fn step(&mut self, step: &Step) -> Result<Result<Option<Got>, Blurred>> {
        match step {
            Step::Age(secs) => {
                self.bed.age(*secs)?;
                self.model.age(*secs);
            }
            Step::Endpoints(seed) => {
                let mut world = self.model.world().clone();
                generate::change_endpoints(&mut dice(*seed), &mut world);
                self.bed.enter(&world)?;
                self.model.set_world(world);
            }
            Step::Packet(sent) => return self.packet(sent).map(|got| got.map(Some)),
        }
        Ok(Ok(None))
    }

    fn packet(&mut self, sent: &Sent) -> Result<Result<Got, Blurred>> {
        let (got, second) = self.bed.run(sent)?;
        let Some(second) = second else { return Ok(Err(Blurred)) };
        let bed = &*self.bed;
        let judged = self.model.judge(sent, &got, second, &|table, proto, src, dst| bed.chosen(table, proto, src, dst));
        judged.with_context(|| {
            let (line, became) = (corpus::packet(sent), hex(&got.frame));
            format!("{line} became {:?} mark={:#x} {became}", got.verdict, got.mark)
        })?;
        self.uncounted += 1;
        if self.counts_each || self.uncounted == UNCOUNTED {
            self.compare_counts()?;
        }
        Ok(Ok(got))
    }

    pub(crate) fn finish(&mut self) -> Result<()> {
        self.compare_counts()?;
        self.bed.compare_flows(&self.model)
    }

    fn compare_counts(&mut self) -> Result<()> {
        self.uncounted = 0;
        let counted = self.bed.counted().context("read the counters")?;
        let wanted = &mut self.model.counts;
        ensure!(counted == *wanted, "what was counted is\n{counted:?}\nand should be\n{wanted:?}");
        wanted.events.iter().for_each(|(event, n)| *self.tally.entry(event.name()).or_default() += n);
        wanted.reasons.iter().for_each(|(reason, n)| *self.tally.entry(reason.name()).or_default() += n);
        wanted.events.clear();
        wanted.reasons.clear();
        Ok(())
    }
}
