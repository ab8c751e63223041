//! Removes maps of earlier versions that this layout's programs do not use.

use std::path::Path;

use anyhow::Result;

use super::{names, remove_pin};

/// The half-open queues from before per-CPU rings, under both of their names, and the tables of TCP
/// sockets from before socket storage.
const RETIRED: [&str; 6] = [
    "HALF_OPEN4",
    "HALF_OPEN6",
    "NURSERY4",
    "NURSERY6",
    "TCP_SOCKETS4",
    "TCP_SOCKETS6",
];

/// Removes the pins of retired maps and of their resized copies, such as `HALF_OPEN4-65536`.
///
/// Half-open flows that only a retired queue lists cannot be evicted; they expire within a minute.
/// For sockets in a retired table, `getpeername` returns the backend.
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
