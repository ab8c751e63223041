//! The links to the pods of this node, from the kernel's last answers, and the agent's settings for
//! the fast path.

use aya_ebpf::macros::map;
use aya_ebpf::maps::Array;
use proxy_common::ways::{self, Row};

use super::live::part;
use super::{Find, Live, Maps};

/// The binary logarithm of the number of rows. Two pods with the same row replace each other's
/// link.
const EXITS_BITS: u32 = 14;

/// The link of the last packet into a pod.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Exit {
    /// The pod's address, in words.
    pub pod: [u32; 4],
    /// Interface index of the device in front of the pod; 0 while the row is empty or being
    /// written.
    pub ifindex: u32,
    /// The longest IP packet for the route and the device, in bytes.
    pub mtu: u32,
    /// Destination and source addresses of the frame.
    pub macs: [u32; 3],
}

#[map]
static EXITS: Array<Exit> = Array::with_max_entries(1 << EXITS_BITS, 0);
#[map]
pub(super) static WAYS: Array<Row> = Array::with_max_entries(ways::ROWS, 0);

#[inline(never)]
pub fn epoch() -> u32 {
    WAYS.find_here(&ways::TOLD)
        .map_or(0, |row| row.read(|row| row.first))
}

#[inline(never)]
pub fn opens_until() -> u32 {
    WAYS.find_here(&ways::TOLD)
        .map_or(0, |row| row.read(|row| row.second))
}

/// Returns the link to a pod, if it leads through this device. While another CPU writes the row,
/// the link may have another pod's addresses.
#[inline(always)]
pub fn exit<A: Maps>(ifindex: u32, pod: &A) -> Option<Exit> {
    let (pod, row) = row(pod)?;
    let exit = row.copy();
    // In bits, because each branch would multiply the verifier's work.
    let differences = [0, 1, 2, 3]
        .into_iter()
        .fold(exit.ifindex ^ ifindex, |all, word| {
            all | exit.pod[word] ^ pod[word]
        });
    (differences == 0 && ifindex != 0).then_some(exit)
}

/// Stores the link to a pod.
#[inline(always)]
pub fn keep_exit<A: Maps>(pod: &A, ifindex: u32, mtu: u32, macs: [u32; 3]) {
    let Some((pod, row)) = row(pod) else { return };
    let differences = row.read(|kept| {
        let of_pod = [0, 1, 2, 3]
            .into_iter()
            .fold(0, |all, word| all | kept.pod[word] ^ pod[word]);
        let of_link = [0, 1, 2]
            .into_iter()
            .fold(kept.ifindex ^ ifindex, |all, word| {
                all | kept.macs[word] ^ macs[word]
            });
        of_pod | of_link | kept.mtu ^ mtu
    });
    if differences == 0 {
        return;
    }
    part!(row.ifindex).set_in_order(0);
    part!(row.pod).set_in_order(pod);
    part!(row.mtu).set_in_order(mtu);
    part!(row.macs).set_in_order(macs);
    part!(row.ifindex).set_in_order(ifindex);
}

/// Returns a pod's address in words, and its row.
#[inline(always)]
fn row<A: Maps>(pod: &A) -> Option<([u32; 4], Live<Exit>)> {
    // 2^32 divided by the golden ratio, which spreads neighbouring addresses.
    const MULTIPLIER: u32 = 0x9e37_79b9;
    let words = pod.words();
    let sum = words
        .iter()
        .fold(0, |sum: u32, word| (sum ^ word).wrapping_mul(MULTIPLIER));
    Some((words, EXITS.find_here(&(sum >> (u32::BITS - EXITS_BITS)))?))
}
