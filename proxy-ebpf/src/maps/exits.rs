//! The links to the pods of this node, as the kernel last told them.

use aya_ebpf::macros::map;
use aya_ebpf::maps::Array;

use super::live::part;
use super::{Find, Live};

/// A power of two: a row serves the devices whose interface indexes are equal modulo this number.
const EXITS_MAX: u32 = 16_384;

/// The last link of a packet that goes into a pod.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Exit {
    /// Interface index of the device in front of the pod; 0 while the row is empty, or being written.
    pub ifindex: u32,
    /// The longest IP packet that the route and the device take, in bytes.
    pub mtu: u32,
    /// Destination and source of the frame.
    pub macs: [u32; 3],
    /// The epoch in which the row was written.
    pub epoch: u32,
}

#[map]
static EXITS: Array<Exit> = Array::with_max_entries(EXITS_MAX, 0);
/// The agent's number of changes to routes, neighbours and devices.
#[map]
static EPOCH: Array<u32> = Array::with_max_entries(1, 0);

#[inline(always)]
pub fn epoch() -> u32 {
    EPOCH.find(&0).map_or(0, |epoch| epoch.copy())
}

/// Returns the link to the pod behind a device. While another CPU writes it, a packet may get the frame of another pod's device.
#[inline(always)]
pub fn exit(ifindex: u32) -> Option<Exit> {
    let exit = row(ifindex)?.copy();
    (exit.ifindex == ifindex && ifindex != 0).then_some(exit)
}

/// Keeps a link. Returns false if the device has another one in this epoch: several pods, or a bridge, may be behind it.
#[inline(always)]
pub fn keep_exit(exit: &Exit) -> bool {
    let Some(row) = row(exit.ifindex) else { return false };
    // In bits, because each branch would multiply the verifier's work.
    let differences = row.read(|kept| {
        let [a, b, c] = [0, 1, 2].map(|word| kept.macs[word] ^ exit.macs[word]);
        a | b | c | kept.mtu ^ exit.mtu
    });
    let another = row.read(|kept| kept.ifindex ^ exit.ifindex);
    if differences | another == 0 {
        return true;
    }
    if another | row.read(|kept| kept.epoch) ^ exit.epoch == 0 {
        return false;
    }
    part!(row.ifindex).set_in_order(0);
    part!(row.mtu).set_in_order(exit.mtu);
    part!(row.macs).set_in_order(exit.macs);
    part!(row.epoch).set_in_order(exit.epoch);
    part!(row.ifindex).set_in_order(exit.ifindex);
    true
}

#[inline(always)]
fn row(ifindex: u32) -> Option<Live<Exit>> {
    EXITS.find(&(ifindex % EXITS_MAX))
}
