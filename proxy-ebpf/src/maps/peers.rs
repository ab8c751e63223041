//! The nodes that hand over packets of external clients. Only the tunnel's program has this map.

use aya_ebpf::macros::map;
use aya_ebpf::maps::HashMap;
use proxy_common::maps::NO_PREALLOC;
use proxy_common::peer::{Peer, PeerKey};

use super::copied_here;

#[map]
static PEERS: HashMap<PeerKey, Peer> = HashMap::with_max_entries(65_536, NO_PREALLOC);

/// Returns the node with this address.
#[inline(always)]
pub fn peer(key: &PeerKey) -> Option<Peer> {
    copied_here(&PEERS, key)
}
