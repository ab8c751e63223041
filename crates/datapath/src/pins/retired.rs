//! Maps of earlier versions that no program of this layout uses any more.

use std::path::Path;

use anyhow::Result;

use super::{names, remove_pin};

/// The queues that were the half-open queue before each CPU had a ring, under both of their names;
/// the tables of TCP sockets before each socket kept what it dialled.
const RETIRED: [&str; 6] = [
    "HALF_OPEN4",
    "HALF_OPEN6",
    "NURSERY4",
    "NURSERY6",
    "TCP_SOCKETS4",
    "TCP_SOCKETS6",
];

/// Removes the pins of such maps, and of those that were about to replace them: `HALF_OPEN4-65536`.
///
/// The half-open flows that only a retired queue names make no room for others. They go with their
/// time, a minute at most. To the sockets of a retired table, `getpeername` shows their backends.
pub(crate) fn remove(maps: &Path) -> Result<()> {
    let is_retired = |name: &&String| {
        name.split('-')
            .next()
            .is_some_and(|map| RETIRED.contains(&map))
    };
    names(maps)?
        .iter()
        .filter(is_retired)
        .try_for_each(|name| remove_pin(&maps.join(name)))
}
