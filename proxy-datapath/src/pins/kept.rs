//! The maps behind the pins, held open. Another program may remove pins, and only what is pinned outlives the agent.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use aya::maps::MapData;

use super::{Pins, names};

/// The pinned maps, each with its path.
pub(crate) struct KeptMaps(Vec<(PathBuf, MapData)>);

impl KeptMaps {
    pub(crate) fn open(pins: &Pins) -> Result<Self> {
        let open = |name: String| {
            let path = pins.maps().join(name);
            let map = MapData::from_pin(&path).with_context(|| format!("open the pinned map {}", path.display()))?;
            Ok((path, map))
        };
        Ok(Self(names(&pins.maps())?.into_iter().map(open).collect::<Result<_>>()?))
    }

    /// Makes the pins again that are gone. Returns their number.
    pub(crate) fn restore(&self, pins: &Pins) -> Result<u64> {
        let gone: Vec<_> = self.0.iter().filter(|(path, _)| !path.exists()).collect();
        if gone.is_empty() {
            return Ok(0);
        }
        fs::create_dir_all(pins.maps()).with_context(|| format!("create {}", pins.maps().display()))?;
        pins.check_netns()?;
        for (path, map) in &gone {
            map.pin(path).with_context(|| format!("pin the map {}", path.display()))?;
        }
        Ok(gone.len() as u64)
    }
}
