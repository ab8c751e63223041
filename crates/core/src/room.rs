//! The room of the maps that Services fill, and the rows that take it.

use std::collections::BTreeMap;

use proxy_common::names::{FamilyMaps, IPV4, IPV6};

/// The rows in each of the maps that Services fill, in the order of [`maps`].
pub(crate) type Rows = [usize; MAPS];
pub(crate) const MAPS: usize = 6;
const SLOTS: usize = 2;
const TABLES: usize = 4;

/// The most tables of places in a family. Each takes 8 KiB in the kernel and as much in the agent,
/// where the other rows take some tens of bytes.
const TABLES_MOST: usize = 8_192;

/// Returns the names of the maps that Services fill, in the order of [`Rows`].
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

/// The rows that Services of one family may take in each map; the default is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room(pub(crate) Rows);

impl Default for Room {
    fn default() -> Self {
        Self([usize::MAX; MAPS])
    }
}

impl Room {
    /// Takes the entries of the maps, by name. A part stays free, because a change puts some rows
    /// before it removes others.
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

    /// Returns the number of slots.
    pub(crate) fn slots(&self) -> usize {
        self.0[SLOTS]
    }

    /// Returns true if there is room for these rows, apart from tables of places.
    pub(crate) fn holds(&self, rows: &Rows) -> bool {
        without_tables(*rows)
            .iter()
            .zip(self.0)
            .all(|(rows, room)| *rows <= room)
    }

    /// Returns true if there is room for another port's tables of places beside these rows.
    pub(crate) fn holds_tables(&self, rows: &Rows, most: usize) -> bool {
        rows[TABLES] + 2 <= self.0[TABLES].min(most)
    }
}

#[cfg(test)]
impl Room {
    /// Returns room for so many rows in each map.
    pub(crate) fn of_rows(rows: usize) -> Self {
        Self([rows; MAPS])
    }
}

/// Returns the rows of what is served without tables of places.
pub(crate) fn without_tables(mut rows: Rows) -> Rows {
    rows[TABLES] = 0;
    rows
}

pub(crate) fn add(to: &mut Rows, rows: &Rows) {
    to.iter_mut().zip(rows).for_each(|(to, rows)| *to += rows);
}
