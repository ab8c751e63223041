//! Marks the ends (address and port) of flows, in rounds: see [`proxy_common::ways`]. Each sweep is
//! a round, because it visits all flows.

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{Array, Map};
use proxy_common::addr::Addr;
use proxy_common::flow::{Flow, FlowKey, Hook};
use proxy_common::names;
use proxy_common::ways::{FIRST_CELL, ROUND, ROWS, Row, cell_row};

use crate::sys::map_walk::Rows;

/// The maximum number of marked cells at which a round ends. With more marks, few packets would
/// skip the look-up, and the agent would write many rows.
const MOST: usize = ROWS as usize / 2;

pub(crate) struct Ends {
    rows: Rows<u32, Row>,
    round: Row,
    has_ended: bool,
    /// False if programs of another load may open flows: older versions do not set marks.
    is_alone: bool,
    /// A bit set of the cells (by row) seen in this round.
    met: Vec<u64>,
}

impl Ends {
    pub(crate) fn new(ebpf: &Ebpf) -> Result<Self> {
        let name = names::WAYS;
        let Some(map @ Map::Array(data)) = ebpf.map(name) else {
            anyhow::bail!("no array {name} in the BPF object")
        };
        let rows = Rows::new(data).with_context(|| format!("open {name}"))?;
        let round = Array::<_, Row>::try_from(map)?
            .get(&ROUND, 0)
            .with_context(|| format!("read {name}"))?;
        let met = vec![0; (ROWS as usize).div_ceil(64)];
        let mut this = Self {
            rows,
            round,
            has_ended: true,
            is_alone: true,
            met,
        };
        this.mark_all()?;
        Ok(this)
    }

    /// Marks every end: a predecessor may have opened flows without marks, or exited within a
    /// round.
    fn mark_all(&mut self) -> Result<()> {
        const NEW: Row = Row {
            first: 0,
            second: 0,
        };
        if self.round == NEW {
            return Ok(());
        }
        let Row { first, .. } = self.round;
        let rows: Vec<u32> = (FIRST_CELL..ROWS).collect();
        self.put(&rows, &vec![Row { first, second: 0 }; rows.len()])?;
        self.write_round(Row {
            first,
            second: first.wrapping_sub(1) & 0xff,
        })
    }

    /// Prevents further rounds from ending, so marks stay valid as long as the programs.
    pub(crate) fn share(&mut self) {
        self.is_alone = false;
    }

    /// Marks every end permanently: the next agent may load programs that do not set marks while
    /// some of this load's programs are still attached.
    pub(crate) fn leave(&mut self) -> Result<()> {
        self.share();
        self.mark_all()
    }

    /// Begins a round, or repeats a round that has not ended. Call this before visiting any flow.
    pub(crate) fn begin(&mut self) -> Result<()> {
        self.met.fill(0);
        if self.has_ended {
            let round = Row {
                first: (self.round.first + 1) & 0xff,
                ..self.round
            };
            self.write_round(round)?;
            self.has_ended = false;
        }
        Ok(())
    }

    pub(crate) fn meet<A: Addr>(&mut self, key: &FlowKey<A>, flow: &Flow<A>) {
        if key.hook() != Hook::ANCHOR {
            let row = cell_row(&flow.marked_end(key)) as usize;
            self.met[row / 64] |= 1 << (row % 64);
        }
    }

    /// Ends the round. Call this after visiting all flows that existed when the round began.
    pub(crate) fn end(&mut self) -> Result<()> {
        let count: usize = self.met.iter().map(|bits| bits.count_ones() as usize).sum();
        if !self.is_alone || count > MOST {
            return Ok(());
        }
        let is_met = |row: &u32| self.met[*row as usize / 64] >> (row % 64) & 1 != 0;
        let rows: Vec<u32> = (0..ROWS).filter(is_met).collect();
        self.put(
            &rows,
            &vec![
                Row {
                    first: self.round.first,
                    second: 0
                };
                rows.len()
            ],
        )?;
        self.write_round(Row {
            second: self.round.first.wrapping_sub(1) & 0xff,
            ..self.round
        })?;
        self.has_ended = true;
        Ok(())
    }

    fn write_round(&mut self, round: Row) -> Result<()> {
        self.put(&[ROUND], &[round])?;
        self.round = round;
        Ok(())
    }

    fn put(&mut self, rows: &[u32], values: &[Row]) -> Result<()> {
        self.rows
            .put(rows, values)
            .map_err(|stopped| stopped.error)
            .with_context(|| format!("write {}", names::WAYS))
    }
}
