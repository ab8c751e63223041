//! The nodes that hand over packets of external clients: what this node publishes about itself, and
//! what others do. See "Handing clients over" in proxy-agent's README.

use std::collections::BTreeMap;
use std::net::IpAddr;

use tokio::sync::watch;

/// The other nodes that take over packets, by name, with the addresses of their Node objects:
/// internal addresses first.
pub type Peers = BTreeMap<String, Vec<IpAddr>>;

/// The agent's half.
#[derive(Debug)]
pub struct PeerList {
    /// Set while this node takes over packets.
    pub is_able: watch::Sender<bool>,
    pub peers: watch::Receiver<Peers>,
}

/// The source's half.
#[derive(Debug)]
pub struct PeerSource {
    pub(crate) is_able: watch::Receiver<bool>,
    pub(crate) peers: watch::Sender<Peers>,
}

/// Creates both halves.
pub fn peers() -> (PeerList, PeerSource) {
    let (able, is_able) = watch::channel(false);
    let (sender, peers) = watch::channel(Peers::new());
    (
        PeerList {
            is_able: able,
            peers,
        },
        PeerSource {
            is_able,
            peers: sender,
        },
    )
}
