//! The rows of `WAYS`: the agent's settings for the fast path, and the marks of flows' ends. Both
//! share a map, because Linux allows a program 64 maps.
//!
//! An end is an address with a port. Most packets of a node belong to no flow, and a look-up in
//! `FLOWS` for each would be a hook's greatest cost. So each end of a flow has a mark in one of
//! [`CELLS`] cells, which many ends share. A packet of a flow has a marked end at each hook with an
//! entry of the flow:
//!
//! ```text
//!   kind           marked end
//!   DNAT, SNAT     source of the entry's packets
//!   UNSNAT, UNDNAT destination
//! ```
//!
//! A mark is the number of a round, in one byte, so that reads are never torn. Programs mark an end
//! before they create its entry. In each round the agent iterates over all flows and marks their
//! ends with the round's number. After that, marks of rounds before the previous round expire. A
//! flow's mark is never missing:
//!
//! - A program that read the previous round's number, and creates its entry after the iteration has
//!   passed, is still covered.
//! - A round ends only when all ends are marked. If an iteration fails, or no agent runs, marks
//!   stay, and packets look up `FLOWS` more often.
//! - The map outlives the agent, so the programs of two simultaneous loads share the marks. A
//!   version without marks sets none. So each start and each clean stop mark all cells, and every
//!   end counts as marked until a start's second round is complete.
//! - Numbers wrap. Then an expired cell counts as marked in 3 rounds of 256.

use crate::addr::{Addr, SockAddr};
use crate::assert_size;

/// A value of `WAYS`.
///
/// ```text
///   row     first                            second
///   TOLD    the number of changes of routes, the last second since boot in which bypass
///           rules, neighbours and devices    connections may be opened (the agent extends it)
///   ROUND   the round's number               the oldest valid mark
///   others  a mark                           0
/// ```
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub first: u32,
    pub second: u32,
}
assert_size!(Row = 4 + 4);

pub const TOLD: u32 = 0;
pub const ROUND: u32 = 1;
/// The first row of a cell.
pub const FIRST_CELL: u32 = 2;

/// The binary logarithm of the number of cells.
const CELL_BITS: u32 = 16;
pub const CELLS: u32 = 1 << CELL_BITS;
pub const ROWS: u32 = FIRST_CELL + CELLS;

/// The number of valid marks: the oldest, the completed round's, and the current round's.
pub const MARKS: u32 = 3;

/// Returns true if a mark is valid.
#[inline(always)]
pub const fn counts(mark: u32, oldest: u32) -> bool {
    mark.wrapping_sub(oldest) & 0xff < MARKS
}

/// Returns the row of an end's cell.
#[inline(always)]
pub fn cell_row<A: Addr>(end: &SockAddr<A>) -> u32 {
    // 2^32 divided by the golden ratio, which spreads neighbouring addresses and ports.
    const MULTIPLIER: u32 = 0x9e37_79b9;
    let add = |sum: u32, word: u32| (sum ^ word).wrapping_mul(MULTIPLIER);
    let sum = end.addr.fold_words(add(0, end.port.wire().into()), add);
    (sum >> (u32::BITS - CELL_BITS)) + FIRST_CELL
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;
    use crate::addr::{Addr4, Addr6, Port};

    #[test]
    fn marks_of_three_rounds_count() {
        for oldest in [0, 1, 254, 255] {
            let counting: Vec<u32> = (0..256).filter(|mark| counts(*mark, oldest)).collect();
            let mut due: Vec<u32> = (oldest..oldest + 3).map(|mark| mark & 0xff).collect();
            due.sort_unstable();
            assert_eq!(counting, due);
        }
    }

    #[test]
    fn ends_of_a_cluster_spread_over_the_cells() {
        let ends = (0..64).flat_map(|pod| (0..256).map(move |nth| (pod, 32_768 + nth * 97)));
        let v4 = |(pod, port): (u8, u16)| {
            SockAddr::new(Addr4::from(Ipv4Addr::new(10, 244, 1, pod)), Port::new(port))
        };
        let v6 = |(pod, port): (u8, u16)| {
            SockAddr::new(
                Addr6::from(Ipv6Addr::new(0xfd00, 10, 244, 1, 0, 0, 0, pod.into())),
                Port::new(port),
            )
        };
        let ends: Vec<_> = ends.collect();
        for rows in [
            ends.iter()
                .map(|end| cell_row(&v4(*end)))
                .collect::<BTreeSet<_>>(),
            ends.iter().map(|end| cell_row(&v6(*end))).collect(),
        ] {
            // Random numbers would take 14,500 of 65,536 cells.
            assert!(
                rows.len() > 13_000,
                "{} ends take {} cells",
                ends.len(),
                rows.len()
            );
            assert!(rows.iter().all(|row| (FIRST_CELL..ROWS).contains(row)));
        }
    }
}
