//! The capacity of the Service maps, and the rows that use it.

use std::collections::BTreeMap;

use proxy_common::names::{FamilyMaps, IPV4, IPV6};

/// The number of rows in each Service map, in the order of [`maps`].
pub(crate) type Rows = [usize; MAPS];
pub(crate) const MAPS: usize = 6;
const SLOTS: usize = 2;
const TABLES: usize = 4;

/// The maximum number of look-up tables in a family. Each takes 8 KiB in the kernel and 8 KiB in
/// the agent; other rows take some tens of bytes.
const TABLES_MOST: usize = 8_192;

/// Returns the names of the Service maps, in the order of [`Rows`].
pub(crate) fn maps(family: &FamilyMaps) -> [&'static str; MAPS] {
    [
        family.frontends,
        family.services,
        family.slots,
        family.endpoints,
        family.maglev,
        family.source_ranges,
    ]
}

/// The maximum rows of one family in each map. The default is unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room(pub(crate) Rows);

impl Default for Room {
    fn default() -> Self {
        Self([usize::MAX; MAPS])
    }
}

impl Room {
    /// Derives the capacity from the maps' `max_entries`, by map name. One sixteenth stays free,
    /// because a change adds some rows before it removes others.
    pub fn of(max_entries: &BTreeMap<String, u32>) -> Self {
        let entries = |name: &str| {
            max_entries
                .get(name)
                .map_or(usize::MAX, |entries| (entries - entries / 16) as usize)
        };
        let [v4, v6] = [IPV4, IPV6].map(|family| maps(&family).map(entries));
        let mut rows: Rows = std::array::from_fn(|map| v4[map].min(v6[map]));
        rows[TABLES] = rows[TABLES].min(TABLES_MOST);
        Self(rows)
    }

    pub(crate) fn slots(&self) -> usize {
        self.0[SLOTS]
    }

    /// Returns true if these rows fit, not counting look-up tables.
    pub(crate) fn holds(&self, rows: &Rows) -> bool {
        without_tables(*rows)
            .iter()
            .zip(self.0)
            .all(|(rows, room)| *rows <= room)
    }

    /// Returns true if another port's look-up tables (one for each set) fit.
    pub(crate) fn holds_tables(&self, rows: &Rows, most: usize) -> bool {
        rows[TABLES] + 2 <= self.0[TABLES].min(most)
    }
}

#[cfg(test)]
impl Room {
    pub(crate) fn of_rows(rows: usize) -> Self {
        Self([rows; MAPS])
    }
}

pub(crate) fn without_tables(mut rows: Rows) -> Rows {
    rows[TABLES] = 0;
    rows
}

pub(crate) fn add(to: &mut Rows, rows: &Rows) {
    to.iter_mut().zip(rows).for_each(|(to, rows)| *to += rows);
}
