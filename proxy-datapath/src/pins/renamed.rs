//! Maps whose name has changed within a layout. A pin takes the new name, and the map stays.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use proxy_common::names::{IPV4, IPV6};

use super::names;

/// The maps that had another name in this layout, with the old name first. The programs that still run keep using them.
const RENAMED: [(&str, &str); 2] = [("NURSERY4", IPV4.half_open), ("NURSERY6", IPV6.half_open)];

/// Gives maps their new names. A map that is made again in place of a renamed one forgets its half-open flows: they
/// would fill the table of flows, and no queue would name them.
pub(super) fn rename(maps: &Path) -> Result<()> {
    for name in names(maps)? {
        let Some(new) = new_name(&name) else { continue };
        let (from, to) = (maps.join(&name), maps.join(new));
        fs::rename(&from, &to).with_context(|| format!("rename {} to {}", from.display(), to.display()))?;
    }
    Ok(())
}

/// Returns the new name of a map, or of one that is about to replace it: `NURSERY4-65536`.
fn new_name(name: &str) -> Option<String> {
    let (map, entries) = name.split_once('-').map_or((name, None), |(map, entries)| (map, Some(entries)));
    let (_, new) = RENAMED.iter().find(|(old, _)| *old == map)?;
    Some(entries.map_or_else(|| (*new).to_owned(), |entries| format!("{new}-{entries}")))
}

/// Returns the name that a map had before this release.
pub(super) fn old_name(name: &str) -> Option<&'static str> {
    RENAMED.iter().find(|(_, new)| *new == name).map(|(old, _)| *old)
}
