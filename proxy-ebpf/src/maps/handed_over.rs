//! The nodes that got the packets of TCP connections from outside.

use aya_ebpf::macros::map;
use aya_ebpf::maps::LruHashMap;
use proxy_common::flow::AnyKey;
use proxy_common::peer::PeerKey;

use super::copied_here;

/// An evicted connection is lost only if the endpoints of its Service have changed.
#[map]
static HANDED_OVER: LruHashMap<AnyKey, PeerKey> = LruHashMap::with_max_entries(65_536, 0);

/// Returns the node that got the earlier packets of a connection.
#[inline(always)]
pub fn handed_over_to(connection: &AnyKey) -> Option<PeerKey> {
    copied_here(&HANDED_OVER, connection)
}

#[inline(always)]
pub fn note_handed_over(connection: &AnyKey, node: &PeerKey) {
    // Without the row, the Service's table chooses the node of the next packets.
    let _full = HANDED_OVER.insert(connection, node, 0);
}
