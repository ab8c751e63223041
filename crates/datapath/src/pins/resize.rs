//! Replaces maps by maps of another size. The new maps get the entries while programs still use the
//! old maps. When all programs use the new maps, later changes are copied. After a crash at any
//! point the next start finds both maps and continues.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use aya::Pod;
use aya::maps::lpm_trie::LpmTrie;
use aya::maps::{HashMap, Map, MapData, MapError};
use proxy_common::addr::{Addr4, Addr6};
use proxy_common::balance::{Affinity, AffinityKey};
use proxy_common::connect::Connects;
use proxy_common::device::{Device, OwnAddr};
use proxy_common::flow::{Flow, FlowKey};
use proxy_common::fragment::{FragmentKey, Ports};
use proxy_common::frontend::{
    Backend, Endpoint, EndpointKey, Frontend, FrontendKey, Maglev, Service, SetKey, SlotKey,
    SourceRange,
};
use proxy_common::names;
use proxy_common::service_counts::ServiceCounts;
use tracing::{info, warn};

use super::{PinPath, remove_pin};
use crate::maps::FamilyNames;
use crate::sizes::is_full;

/// The bpf(2) flag to create a row only if it does not exist.
const NO_EXIST: u64 = 1;

/// The maps of a load that receive entries of other maps.
pub(crate) struct Resize(Vec<PinPath>);

impl Resize {
    pub(crate) fn new(pins: Vec<PinPath>) -> Self {
        Self(
            pins.into_iter()
                .filter(|pin| !pin.sources.is_empty() || pin.target != pin.path)
                .collect(),
        )
    }

    /// Copies the entries. Call this when the new maps exist, and again when all programs use the
    /// new maps.
    pub(crate) fn copy(&self) -> Result<()> {
        for pin in &self.0 {
            for source in &pin.sources {
                let left_out = copy(
                    &pin.name,
                    &Pair {
                        from: source,
                        to: &pin.target,
                    },
                );
                let left_out = left_out.with_context(|| format!("copy {}", source.display()))?;
                info!(map = pin.name, from = %source.display(), left_out, "resized");
                if left_out > 0 {
                    warn!(
                        map = pin.name,
                        left_out, "the new map is too small for the entries of the old map"
                    );
                }
            }
        }
        Ok(())
    }

    pub(crate) fn finish(self) -> Result<()> {
        for pin in self.0 {
            if pin.target != pin.path {
                let renamed = fs::rename(&pin.target, &pin.path);
                renamed.with_context(|| format!("rename {}", pin.target.display()))?;
            }
            for source in pin.sources.iter().filter(|source| **source != pin.path) {
                remove_pin(source)?;
            }
        }
        Ok(())
    }
}

struct Pair<'a> {
    from: &'a Path,
    to: &'a Path,
}

/// Copies a map. Returns the number of entries that did not fit.
fn copy(name: &str, pair: &Pair<'_>) -> Result<usize> {
    if name == names::DEVICES {
        return entries::<u32, Device>(pair, keep);
    }
    let copied = family::<Addr4>(name, pair).or_else(|| family::<Addr6>(name, pair));
    // `None`: an array of a fixed size, or a table that fills by itself.
    copied.unwrap_or(Ok(0))
}

/// Copies a map by the method in its row of `proxy_common::maps`.
macro_rules! copied {
    (keep, $pair:ident, $key:ty, $value:ty) => {
        Some(entries::<$key, $value>($pair, keep))
    };
    (more_passed, $pair:ident, $key:ty, $value:ty) => {
        Some(entries::<$key, $value>($pair, more_passed))
    };
    (networks, $pair:ident, $key:ty, $value:ty) => {
        Some(networks::<$key>($pair))
    };
    ($other:ident, $($rest:tt)*) => {
        None
    };
}

macro_rules! family {
    ($($(#[$doc:meta])* $field:ident: $v4:ident $v6:ident: $map:ident<$($part:ty),+> = $size:expr, $flags:expr, $how:ident;)+) => {
        /// Copies a map of this family. Returns `None` for other maps and for maps that need no
        /// copy.
        fn family<A: FamilyNames>(name: &str, pair: &Pair<'_>) -> Option<Result<usize>> {
            match name {
                $(_ if name == A::MAPS.$field => copied!($how, pair, $($part),+),)+
                _ => None,
            }
        }
    };
}
proxy_common::family_maps!(family);

fn keep<V>(_old: &V, _new: &V) -> bool {
    false
}

/// Returns true if the old programs have processed more packets of the flow since its copy than the
/// new programs.
fn more_passed<A: FamilyNames>(old: &Flow<A>, new: &Flow<A>) -> bool {
    old != new && old.passed.packets >= new.passed.packets && old.last_secs >= new.last_secs
}

fn entries<K: Pod + Ord, V: Pod>(
    pair: &Pair<'_>,
    is_newer: impl Fn(&V, &V) -> bool,
) -> Result<usize> {
    let from: HashMap<_, K, V> = open(pair.from)?;
    let mut to: HashMap<_, K, V> = open(pair.to)?;
    let mut left_out = 0;
    // Read the keys first: programs delete entries during the copy, and a deletion restarts the
    // kernel's iteration.
    let keys = from
        .keys()
        .collect::<Result<std::collections::BTreeSet<K>, _>>()?;
    for key in keys {
        let Some(old) = crate::flows::read(&from, &key)? else {
            continue;
        };
        let flags = match crate::flows::read(&to, &key)? {
            Some(new) if is_newer(&old, &new) => 0,
            Some(_) => continue,
            None => NO_EXIST,
        };
        left_out += usize::from(!is_put(to.insert(key, old, flags))?);
    }
    Ok(left_out)
}

fn networks<K: Pod>(pair: &Pair<'_>) -> Result<usize> {
    let from: LpmTrie<_, K, u32> = open(pair.from)?;
    let mut to: LpmTrie<_, K, u32> = open(pair.to)?;
    let mut left_out = 0;
    for row in from.iter() {
        let (key, value) = row?;
        left_out += usize::from(!is_put(to.insert(&key, value, 0))?);
    }
    Ok(left_out)
}

/// Returns false if the map was full.
fn is_put(result: Result<(), MapError>) -> Result<bool> {
    const EEXIST: i32 = 17;
    match result {
        Err(error) if is_full(&error) => Ok(false),
        Err(MapError::SyscallError(error)) => match error.io_error.raw_os_error() {
            // A program created the entry first.
            Some(EEXIST) => Ok(true),
            _ => Err(error.into()),
        },
        result => Ok(result.map(|()| true)?),
    }
}

fn open<M: TryFrom<Map, Error = MapError>>(pin: &Path) -> Result<M> {
    Ok(M::try_from(Map::from_map_data(MapData::from_pin(pin)?)?)?)
}
