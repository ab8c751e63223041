//! The ways of `kpx_limit`, which a benchmark writes.

use aya_ebpf::macros::map;
use aya_ebpf::maps::HashMap;
use proxy_common::limit::{LimitKey, LimitWay};

use super::live::{Find, Live, part};

/// The ways of a few Services.
const WAYS_MAX: u32 = 64;

#[map]
static LIMIT: HashMap<LimitKey, LimitWay> = HashMap::with_max_entries(WAYS_MAX, 0);

/// Returns the way at `key`, and counts a packet of that length on it.
#[inline(always)]
pub fn limit_way(key: &LimitKey, bytes: u32) -> Option<LimitWay> {
    let live: Live<LimitWay> = LIMIT.find(key)?;
    part!(live.packets).update(|count| count.wrapping_add(1));
    part!(live.bytes).update(|count| count.wrapping_add(bytes.into()));
    Some(live.copy())
}
