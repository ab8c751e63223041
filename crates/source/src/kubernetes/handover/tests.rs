use std::collections::BTreeSet;

use super::*;
use crate::peers::{PeerList, peers};

const UID: &str = "uid of ";

fn node(name: &str, version: u64, addresses: &[&str]) -> PeerNode {
    PeerNode {
        name: ObjectName::new("", name),
        uid: format!("{UID}{name}"),
        version: Some(version),
        addresses: addresses.iter().map(|addr| addr.parse().unwrap()).collect(),
    }
}

fn lease(name: &str, accepts: u64) -> HandoverLease {
    HandoverLease {
        name: ObjectName::new(NAMESPACE, name),
        accepts: Some(accepts),
        ..HandoverLease::default()
    }
}

fn put(object: PeerNode) -> Found {
    Found::Node(Update::Put(Box::new(object)))
}

/// The state of node n1.
struct Fixture {
    state: State,
    list: PeerList,
}

impl Fixture {
    /// Reads two Nodes.
    fn new(leases: Vec<HandoverLease>) -> Self {
        let mut fixture = Self::unread();
        fixture.hears(Found::Node(Update::All(vec![
            node("n1", 5, &["192.0.2.1"]),
            node("n2", 7, &["192.0.2.2", "2001:db8::2"]),
        ])));
        assert_eq!(fixture.peers(), None, "the Leases are not read yet");
        fixture.hears(Found::Lease(Update::All(leases)));
        fixture
    }

    fn unread() -> Self {
        let (list, link) = peers();
        Self {
            state: Handover::new("n1", link).state,
            list,
        }
    }

    fn hears(&mut self, found: Found) {
        self.state.take(Some(found));
        self.state.report();
        self.state.schedule();
    }

    fn peers(&self) -> Option<Peers> {
        self.list.peers.borrow().clone()
    }

    fn accepting(&self) -> BTreeSet<String> {
        self.peers().unwrap().accepting
    }

    fn offers(&mut self, offer: Offer) {
        self.list.offer.send_replace(offer);
        self.state.schedule();
    }

    /// The versions that this node's Lease is about to name.
    fn written(&self) -> Option<HandoverLease> {
        self.state.write_at?;
        match *self.list.offer.borrow() {
            Offer::Accepts(version) => self.state.wanted(version),
            Offer::Unknown | Offer::Nothing => None,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_gets_clients_only_after_it_has_read_this_node() {
    let mut fixture = Fixture::new(vec![lease("n2", 4)]);
    let peers = fixture.peers().unwrap();
    assert_eq!(peers.own, ["192.0.2.1".parse::<IpAddr>().unwrap()]);
    assert_eq!(peers.nodes["n2"].len(), 2);
    assert_eq!(peers.nodes.len(), 1, "a node is no peer of itself");
    assert!(peers.accepting.is_empty(), "n2 has not read this node yet");
    fixture.hears(Found::Lease(Update::Put(Box::new(lease("n2", 5)))));
    assert_eq!(fixture.accepting(), BTreeSet::from(["n2".to_owned()]));
    fixture.hears(put(node("n1", 9, &["192.0.2.1"])));
    assert_eq!(fixture.accepting().len(), 1, "a heartbeat is no change");
    fixture.hears(put(node("n1", 10, &["192.0.2.9"])));
    assert!(
        fixture.accepting().is_empty(),
        "n2 does not know the new address"
    );
    fixture.hears(Found::Lease(Update::Del(ObjectName::new(NAMESPACE, "n2"))));
    assert!(fixture.accepting().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_written_after_a_change_of_the_nodes_and_not_for_heartbeats() {
    let mut fixture = Fixture::new(vec![]);
    assert_eq!(fixture.state.write_at, None, "nothing is offered yet");
    let version = fixture.peers().unwrap().version;
    assert_eq!(version, 7);
    fixture.offers(Offer::Accepts(version));
    let written = fixture.written().unwrap();
    assert_eq!((written.accepts, written.since), (Some(7), Some(5)));
    assert_eq!(written.node_uid, "uid of n1");
    fixture.hears(Found::Lease(Update::Put(Box::new(written))));
    assert_eq!(fixture.state.write_at, None, "it is written");
    for found in [
        put(node("n2", 20, &["192.0.2.2", "2001:db8::2"])),
        Found::Node(Update::Del(ObjectName::new("", "n2"))),
    ] {
        fixture.hears(found);
        assert_eq!(fixture.peers().unwrap().version, 7);
    }
    // A Node of the same name is another machine.
    fixture.hears(put(node("n2", 30, &["192.0.2.2", "2001:db8::2"])));
    let again = fixture.peers().unwrap().version;
    assert_eq!(again, 30);
    fixture.offers(Offer::Accepts(again));
    let written = fixture.written().unwrap();
    assert_eq!((written.accepts, written.since), (Some(30), Some(5)));
}

#[tokio::test(start_paused = true)]
async fn a_replaced_node_counts_as_a_change_even_within_one_list() {
    let mut fixture = Fixture::new(vec![]);
    let replaced = PeerNode {
        uid: "another".to_owned(),
        ..node("n2", 40, &["192.0.2.2", "2001:db8::2"])
    };
    fixture.hears(Found::Node(Update::All(vec![
        node("n1", 5, &["192.0.2.1"]),
        replaced,
    ])));
    assert_eq!(fixture.peers().unwrap().version, 40);
}

#[tokio::test(start_paused = true)]
async fn a_restarted_agent_keeps_what_others_accept_and_its_lease() {
    let own = HandoverLease {
        node_uid: "uid of n1".to_owned(),
        since: Some(2),
        addresses: "192.0.2.1".to_owned(),
        ..lease("n1", 7)
    };
    let mut fixture = Fixture::new(vec![own.clone(), lease("n2", 3)]);
    assert_eq!(
        fixture.accepting().len(),
        1,
        "n2 has accepted an earlier agent here"
    );
    assert_eq!(
        fixture.state.write_at, None,
        "the Lease stays until the devices are read"
    );
    fixture.offers(Offer::Accepts(7));
    assert_eq!(fixture.state.write_at, None, "the same Lease again");
    fixture.offers(Offer::Nothing);
    assert_eq!(
        fixture.state.write_at,
        Some(Instant::now()),
        "deleted at once"
    );

    let replaced = HandoverLease {
        node_uid: "another".to_owned(),
        ..own
    };
    let fixture = Fixture::new(vec![replaced, lease("n2", 3)]);
    assert!(
        fixture.accepting().is_empty(),
        "the Lease belongs to another Node"
    );
}

#[tokio::test(start_paused = true)]
async fn a_server_without_the_leases_leaves_a_node_alone() {
    let mut fixture = Fixture::unread();
    fixture.hears(Found::Node(Update::Refused));
    fixture.hears(Found::Lease(Update::Refused));
    assert_eq!(fixture.peers(), Some(Peers::default()));
    fixture.offers(Offer::Accepts(0));
    assert_eq!(fixture.state.write_at, None, "the Node object is unknown");
}
