//! Reserves the source ports that the programs use, so the kernel does not assign them to sockets.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::ops::RangeInclusive;

use anyhow::{Context, Result};
use proxy_common::flow::SOURCE_PORT_FIRST;

use super::sysctl;

/// The range from which the kernel assigns ports, for both families.
const RANGE: &str = "ipv4/ip_local_port_range";
/// The ports in that range that the kernel does not assign.
const RESERVED: &str = "ipv4/ip_local_reserved_ports";

/// The default node ports (`--service-node-port-range` of the API server). A socket with such a
/// port would receive packets only from peers to which it has sent.
const NODE_PORTS: RangeInclusive<u16> = 30_000..=32_767;

/// Returns kpx's source ports and the node ports that the kernel could assign to sockets.
pub(super) fn missing() -> Result<BTreeSet<u16>> {
    let range = sysctl::read(RANGE)?.unwrap_or_default();
    let before = reserved()?;
    Ok(given(&range)
        .into_iter()
        .filter(|port| !before.contains(port))
        .collect())
}

/// Returns kpx's source ports and the node ports within a range in the kernel's format.
fn given(range: &str) -> BTreeSet<u16> {
    let ends: Vec<u16> = range
        .split_whitespace()
        .map_while(|end| end.parse().ok())
        .collect();
    let [first, last] = ends[..] else {
        return BTreeSet::new();
    };
    (SOURCE_PORT_FIRST..=u16::MAX)
        .chain(NODE_PORTS)
        .filter(|port| (first..=last).contains(port))
        .collect()
}

pub(super) fn reserve(ports: &BTreeSet<u16>) -> Result<()> {
    sysctl::write(
        RESERVED,
        &text(&reserved()?.union(ports).copied().collect()),
    )
}

/// Releases the ports that kpx reserved. Other programs' reservations stay.
pub(super) fn release(ports: &BTreeSet<u16>) -> Result<()> {
    sysctl::write(
        RESERVED,
        &text(&reserved()?.difference(ports).copied().collect()),
    )
}

fn reserved() -> Result<BTreeSet<u16>> {
    let ranges = sysctl::read(RESERVED)?.unwrap_or_default();
    parse(&ranges).with_context(|| format!("read sysctl net/{RESERVED}: {ranges}"))
}

/// Parses ports in the form `8080,30000-30010`.
pub(super) fn parse(ranges: &str) -> Result<BTreeSet<u16>> {
    let mut ports = BTreeSet::new();
    for range in ranges.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        ports.extend(first.trim().parse::<u16>()?..=last.trim().parse()?);
    }
    Ok(ports)
}

/// Formats ports as the kernel does; empty if there are no ports.
pub(super) fn text(ports: &BTreeSet<u16>) -> String {
    let mut text = String::new();
    let mut ports = ports.iter().copied().peekable();
    while let Some(first) = ports.next() {
        let mut last = first;
        while let Some(next) = ports.next_if(|next| Some(*next) == last.checked_add(1)) {
            last = next;
        }
        let comma = if text.is_empty() { "" } else { "," };
        let written = if first == last {
            write!(text, "{comma}{first}")
        } else {
            write!(text, "{comma}{first}-{last}")
        };
        written.expect("a string takes all of it");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_get_neither_node_ports_nor_the_programs() {
        assert_eq!(text(&given("32768\t60999\n")), "");
        assert_eq!(text(&given("1024\t65535\n")), "30000-32767,61000-65535");
        assert_eq!(text(&given("32000\t61001\n")), "32000-32767,61000-61001");
        assert_eq!(text(&given("nonsense")), "");
    }

    #[test]
    fn ranges_keep_the_kernels_format() {
        for ranges in ["", "8080", "8080,30000-30010", "1-3,5-6,65535", "0-65535"] {
            assert_eq!(text(&parse(ranges).unwrap()), ranges);
        }
        assert_eq!(text(&parse("5,1-3,4,6").unwrap()), "1-6");
        assert!(parse("1-x").is_err());
    }
}
