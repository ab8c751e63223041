//! The nodes that hand clients over to each other: what this node offers, and what the others do. See
//! "Handing clients over" in proxy-agent's README.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use tokio::sync::watch;

/// The cluster's nodes, for the hand-over of clients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peers {
    /// The addresses of this node's Node object.
    pub own: Vec<IpAddr>,
    /// The other nodes by name, with the addresses of their Node objects: internal addresses first.
    pub nodes: BTreeMap<String, Vec<IpAddr>>,
    /// The version of `nodes`: see [`Offer::Accepts`].
    pub version: u64,
    /// The other nodes that accept packets from this node.
    pub accepting: BTreeSet<String>,
}

/// What this node offers to the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Offer {
    /// The agent has not read its devices and peers yet: an earlier offer stays.
    #[default]
    Unknown,
    /// This node takes no clients over.
    Nothing,
    /// The programs take packets over from all nodes of this version of [`Peers::nodes`].
    Accepts(u64),
}

/// The agent's half.
#[derive(Debug)]
pub struct PeerList {
    pub offer: watch::Sender<Offer>,
    /// `None` until the nodes and their offers are read.
    pub peers: watch::Receiver<Option<Peers>>,
    /// True while no Lease has an offer of this node, after a withdrawal.
    pub withdrawn: watch::Receiver<bool>,
}

impl PeerList {
    /// Withdraws this node's offer, and waits until that is done. Returns at once where the mode is
    /// off.
    pub async fn withdraw(&mut self) {
        self.offer.send_replace(Offer::Nothing);
        // An error means that the source has no part in the hand-over.
        let _withdrawn = self.withdrawn.wait_for(|withdrawn| *withdrawn).await;
    }
}

/// The source's half.
#[derive(Debug)]
pub struct PeerSource {
    pub(crate) offer: watch::Receiver<Offer>,
    pub(crate) peers: watch::Sender<Option<Peers>>,
    pub(crate) withdrawn: watch::Sender<bool>,
}

/// The source's part in the hand-over.
#[derive(Debug)]
pub enum Peering {
    /// The mode is off.
    Off,
    /// The mode is off, and was on before: the source withdraws the offer of an earlier agent.
    Withdraw(PeerSource),
    On(PeerSource),
}

/// Creates both halves.
pub fn peers() -> (PeerList, PeerSource) {
    let (offer_sender, offer) = watch::channel(Offer::Unknown);
    let (peer_sender, peers) = watch::channel(None);
    let (withdrawn_sender, withdrawn) = watch::channel(false);
    (
        PeerList {
            offer: offer_sender,
            peers,
            withdrawn,
        },
        PeerSource {
            offer,
            peers: peer_sender,
            withdrawn: withdrawn_sender,
        },
    )
}
