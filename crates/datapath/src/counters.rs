//! Reads the programs' counters.

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{MapData, PerCpuArray};
use proxy_common::counter::{Counter, Event, Reason};
use proxy_common::names;

use crate::maps::take;

/// The programs' counters, which start at zero with each load.
pub struct Counters(PerCpuArray<MapData, u64>);

impl Counters {
    pub(crate) fn new(ebpf: &mut Ebpf) -> Result<Self> {
        Ok(Self(take(ebpf, names::COUNTERS)?))
    }

    pub fn events(&self) -> Result<Vec<(Event, u64)>> {
        Event::ALL
            .iter()
            .map(|event| Ok((*event, self.sum((*event).into())?)))
            .collect()
    }

    pub fn event(&self, event: Event) -> Result<u64> {
        self.sum(event.into())
    }

    pub fn reasons(&self) -> Result<Vec<(Reason, u64)>> {
        Reason::ALL
            .iter()
            .map(|reason| Ok((*reason, self.sum((*reason).into())?)))
            .collect()
    }

    fn sum(&self, counter: Counter) -> Result<u64> {
        let values = self.0.get(&counter.index(), 0).context("read COUNTERS")?;
        Ok(values.iter().sum())
    }
}
