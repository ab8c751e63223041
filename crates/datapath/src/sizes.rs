//! Determines the maps' sizes in entries, and names the flag to raise when a map is full.

use std::collections::BTreeMap;

use aya::maps::MapError;
use procfs::{Current as _, Meminfo};
use proxy_common::addr::Addr4;
use proxy_common::flow::Flow;
use proxy_common::half_open::all_places;
use proxy_common::names;
use tracing::debug;

/// The sizes of each family's maps, as the operator sets them. `None` means a size by the machine's
/// memory, or the object's size if the memory is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// The number of flows. Each flow takes two or four entries.
    pub flows: Option<u32>,
    /// The number of frontends and service ports, and of the rows kept for them.
    pub services: Option<u32>,
    /// The number of backends. A backend counts once for each set of each service port that
    /// contains it.
    pub endpoints: Option<u32>,
    /// The memory of this machine, in bytes.
    pub memory: Option<u64>,
}

/// The wanted size of a map, in entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MapSize {
    pub(super) entries: u32,
    /// True if the operator gave no size. A larger existing map then keeps its size, so a machine
    /// with less memory loses no entry.
    pub(super) or_more: bool,
}

/// The flags that set these sizes.
const SERVICES: &str = "--service-table-size";
const ENDPOINTS: &str = "--endpoint-table-size";

/// How a table grows with the machine's memory.
struct Growth {
    /// The bytes of memory per entry.
    bytes: u64,
    min: u64,
    max: u64,
}

/// The kernel allocates flow tables when they are created, so they get only a part of memory: 0.5 %
/// in each family.
const FLOWS: Growth = Growth {
    bytes: 64 << 10,
    min: 1 << 17,
    max: 1 << 20,
};
/// The kernel preallocates these tables' hashes, and one table's rows: up to 0.3 % of memory in
/// each family.
///
/// 56 KiB instead of 64 KiB, because `MemTotal` is less than the installed memory: with 16 GiB,
/// 100,000 Services with one port fit. Flow tables cost more and get no such allowance.
const OF_SERVICES: Growth = Growth {
    bytes: 56 << 10,
    min: 1 << 16,
    max: 1 << 18,
};
/// The kernel preallocates only the hashes: 0.1 % of memory in each family. With 16 GiB, 250,000
/// endpoints fit.
const OF_ENDPOINTS: Growth = Growth {
    bytes: 28 << 10,
    min: 1 << 18,
    max: 1 << 20,
};

impl Sizes {
    /// Adds this machine's memory, which determines the sizes that the operator did not set.
    pub fn of_this_machine(self) -> Self {
        let memory = Meminfo::current()
            .inspect_err(|error| debug!(%error, "cannot read the machine's memory"));
        Self {
            memory: memory.ok().map(|memory| memory.mem_total),
            ..self
        }
    }

    /// Returns the sizes of maps that differ from the object's sizes.
    pub(super) fn map_sizes(self) -> BTreeMap<&'static str, MapSize> {
        let size = |given: Option<u32>, growth: &Growth| {
            let derived = || {
                Some(MapSize {
                    entries: growth.entries(self.memory?),
                    or_more: true,
                })
            };
            given.map(MapSize::exactly).or_else(derived)
        };
        let [flows, of_services, of_endpoints] = [
            size(self.flows, &FLOWS),
            size(self.services, &OF_SERVICES),
            size(self.endpoints, &OF_ENDPOINTS),
        ];
        let half_open = flows.map(|flows| MapSize {
            entries: all_places(half_open_places(flows.entries)),
            ..flows
        });
        let of_family = |maps: names::FamilyMaps| {
            let services = [
                maps.frontends,
                maps.services,
                maps.maglev,
                maps.source_ranges,
                maps.service_counts,
                maps.cursors,
            ];
            let endpoints = [maps.slots, maps.endpoints];
            let services = services.map(|name| (name, of_services));
            let endpoints = endpoints.map(|name| (name, of_endpoints));
            [(maps.flows, flows), (maps.half_open, half_open)]
                .into_iter()
                .chain(services)
                .chain(endpoints)
        };
        let all = [names::IPV4, names::IPV6].into_iter().flat_map(of_family);
        all.filter_map(|(name, size)| Some((name, size?))).collect()
    }
}

/// Returns the number of half-open flows that fit into a flow table of `flows` entries.
pub(super) fn half_open_places(flows: u32) -> u32 {
    (flows / Flow::<Addr4>::ENTRIES_MAX).max(1)
}

impl MapSize {
    pub(super) fn exactly(entries: u32) -> Self {
        Self {
            entries,
            or_more: false,
        }
    }

    /// Returns the size of a map, given the sizes of existing maps.
    pub(super) fn beside(self, there: impl Iterator<Item = u32>) -> u32 {
        let largest = there.max().filter(|_| self.or_more);
        largest.unwrap_or(0).max(self.entries)
    }
}

impl Growth {
    fn entries(&self, memory: u64) -> u32 {
        let entries = (memory / self.bytes).clamp(self.min, self.max);
        // The kernel rounds the number of buckets up to a power of two.
        1 << entries.ilog2()
    }
}

/// Returns the error for a refused write to one of the agent's tables. The error for a full map
/// names the flag that enlarges the map.
pub(super) fn refused(error: MapError, name: &str) -> anyhow::Error {
    if !is_full(&error) {
        return anyhow::Error::from(error).context(format!("write {name}"));
    }
    let is_of_endpoints = [names::IPV4, names::IPV6]
        .iter()
        .any(|maps| [maps.slots, maps.endpoints].contains(&name));
    let flag = if is_of_endpoints { ENDPOINTS } else { SERVICES };
    anyhow::Error::from(error).context(format!("{name} is full: start kpx with a larger {flag}"))
}

/// Returns true if the map is full. Hash maps report E2BIG, LPM tries ENOSPC.
pub(super) fn is_full(error: &MapError) -> bool {
    const E2BIG: i32 = 7;
    const ENOSPC: i32 = 28;
    matches!(error, MapError::SyscallError(error) if matches!(error.io_error.raw_os_error(), Some(E2BIG | ENOSPC)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn tables_grow_with_the_machine_up_to_a_limit() {
        let sizes = |growth: Growth| {
            let memory = [
                GIB / 2,
                4 * GIB,
                8 * GIB,
                14 * GIB - 1,
                14 * GIB,
                16 * GIB,
                31 * GIB,
                64 * GIB,
                1024 * GIB,
            ];
            memory.map(|memory| growth.entries(memory).ilog2())
        };
        assert_eq!(sizes(FLOWS), [17, 17, 17, 17, 17, 18, 18, 20, 20]);
        assert_eq!(sizes(OF_SERVICES), [16, 16, 17, 17, 18, 18, 18, 18, 18]);
        assert_eq!(sizes(OF_ENDPOINTS), [18, 18, 18, 18, 19, 19, 20, 20, 20]);
    }

    #[test]
    fn a_given_size_counts_for_the_maps_of_both_families() {
        let sizes = Sizes {
            flows: Some(4_096),
            services: Some(100),
            ..Sizes::default()
        };
        let of_maps = sizes.map_sizes();
        let entries =
            ["FLOWS4", "HALF_OPEN_RING6", "SERVICES6", "CURSORS4"].map(|name| of_maps[name]);
        assert_eq!(entries, [4_096, 1_280, 100, 100].map(MapSize::exactly));
        assert!(!of_maps.contains_key("SLOTS4"));
    }

    #[test]
    fn only_a_derived_size_lets_a_larger_map_stay() {
        let of_maps = Sizes {
            services: Some(100),
            memory: Some(16 * GIB),
            ..Sizes::default()
        }
        .map_sizes();
        assert_eq!(all_places(half_open_places(1 << 18)), 5 << 14);
        let beside = |name: &str, there: &[u32]| of_maps[name].beside(there.iter().copied());
        assert_eq!(
            ["FLOWS4", "HALF_OPEN_RING4"].map(|name| beside(name, &[])),
            [1 << 18, 5 << 14]
        );
        assert_eq!(beside("FLOWS6", &[9, 1 << 20]), 1 << 20);
        assert_eq!(beside("SLOTS4", &[1 << 18]), 1 << 19);
        assert_eq!(beside("SERVICES4", &[1 << 20]), 100);
    }
}
