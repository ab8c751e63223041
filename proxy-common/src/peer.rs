//! The nodes that hand over packets of external clients: the agent's map `PEERS`.

use crate::assert_size;

/// Key of `PEERS`: an address of a Node object, of either family.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerKey {
    /// In network byte order; an IPv4 address is the first word.
    pub addr: [u32; 4],
    /// The kernel's number of the address family.
    pub family: u32,
}
assert_size!(PeerKey = 16 + 4);

/// Value of `PEERS`: the node with the address.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// A hash of the node's name: the addresses of a node have the same.
    pub node: u64,
}
assert_size!(Peer = 8);
