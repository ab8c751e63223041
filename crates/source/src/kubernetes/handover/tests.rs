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
        node_uid: format!("{UID}{name}"),
        accepts: Some(accepts),
        ..HandoverLease::default()
    }
}

fn put(object: PeerNode) -> Found {
    Found::Node(Update::Put(Box::new(object)))
}

/// The state of a node: n1, unless a test names another.
struct Fixture {
    state: State,
    list: PeerList,
}

impl Fixture {
    /// Reads two Nodes.
    fn new(leases: Vec<HandoverLease>) -> Self {
        let mut fixture = Self::unread();
        fixture.reads(Found::Node(Update::All(vec![
            node("n1", 5, &["192.0.2.1"]),
            node("n2", 7, &["192.0.2.2", "2001:db8::2"]),
        ])));
        assert_eq!(fixture.peers(), None, "the Leases are not read yet");
        fixture.reads(Found::Lease(Update::All(leases)));
        fixture
    }

    fn unread() -> Self {
        Self::unread_on("n1")
    }

    fn unread_on(node: &str) -> Self {
        let (list, link) = peers();
        Self {
            state: Handover::new(node, link).state,
            list,
        }
    }

    fn reads(&mut self, found: Found) {
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
    fixture.reads(Found::Lease(Update::Put(Box::new(lease("n2", 5)))));
    assert_eq!(fixture.accepting(), BTreeSet::from(["n2".to_owned()]));
    fixture.reads(put(node("n1", 9, &["192.0.2.1"])));
    assert_eq!(fixture.accepting().len(), 1, "a heartbeat is no change");
    fixture.reads(put(node("n1", 10, &["192.0.2.9"])));
    assert!(
        fixture.accepting().is_empty(),
        "n2 does not know the new address"
    );
    fixture.reads(Found::Lease(Update::Del(ObjectName::new(NAMESPACE, "n2"))));
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
    fixture.reads(Found::Lease(Update::Put(Box::new(written))));
    assert_eq!(fixture.state.write_at, None, "it is written");
    for found in [
        put(node("n2", 20, &["192.0.2.2", "2001:db8::2"])),
        Found::Node(Update::Del(ObjectName::new("", "n2"))),
    ] {
        fixture.reads(found);
        assert_eq!(fixture.peers().unwrap().version, 7);
    }
    // A Node of the same name is another machine.
    fixture.reads(put(node("n2", 30, &["192.0.2.2", "2001:db8::2"])));
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
    fixture.reads(Found::Node(Update::All(vec![
        node("n1", 5, &["192.0.2.1"]),
        replaced,
    ])));
    assert_eq!(fixture.peers().unwrap().version, 40);
}

/// Heartbeats come before each of two agents starts, between the starts, and after them.
#[tokio::test(start_paused = true)]
async fn nodes_accept_each_other_in_every_order_of_heartbeats_and_starts() {
    const STEPS: [Step; 6] = [
        Step::Starts("n1"),
        Step::Starts("n2"),
        Step::Beats("n1"),
        Step::Beats("n2"),
        Step::Beats("n1"),
        Step::Beats("n2"),
    ];
    let mut orders = 0;
    permutations(&STEPS, &mut Vec::new(), &mut |order| {
        orders += 1;
        let mut cluster = Cluster::default();
        for step in order {
            cluster.does(*step);
        }
        for (agent, other) in [("n1", "n2"), ("n2", "n1")] {
            let accepting = cluster.agents[agent].accepting();
            assert!(accepting.contains(other), "{order:?}: {agent}");
        }
        let writes = cluster.writes;
        assert!(writes <= 4, "{order:?}: {writes} Leases");
        cluster.does(Step::Beats("n1"));
        cluster.does(Step::Beats("n2"));
        assert_eq!(cluster.writes, writes, "{order:?}: a heartbeat");
    });
    assert_eq!(orders, 720);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Starts(&'static str),
    Beats(&'static str),
}

fn permutations(rest: &[Step], order: &mut Vec<Step>, visit: &mut impl FnMut(&[Step])) {
    if rest.is_empty() {
        visit(order);
    }
    for nth in 0..rest.len() {
        let mut others = rest.to_vec();
        order.push(others.remove(nth));
        permutations(&others, order, visit);
        order.pop();
    }
}

/// Two Nodes, the API server's Leases, and an agent on each that has started.
#[derive(Default)]
struct Cluster {
    version: u64,
    beats: BTreeMap<&'static str, u64>,
    leases: BTreeMap<&'static str, HandoverLease>,
    agents: BTreeMap<&'static str, Fixture>,
    writes: usize,
}

impl Cluster {
    const NODES: [(&str, &str); 2] = [("n1", "192.0.2.1"), ("n2", "192.0.2.2")];

    fn node(&self, name: &'static str) -> PeerNode {
        let (_, address) = Self::NODES
            .into_iter()
            .find(|(node, _)| *node == name)
            .unwrap();
        node(name, self.beats.get(name).copied().unwrap_or(1), &[address])
    }

    fn does(&mut self, step: Step) {
        self.version += 10;
        match step {
            Step::Beats(name) => {
                self.beats.insert(name, self.version);
                let node = self.node(name);
                for agent in self.agents.values_mut() {
                    agent.reads(put(node.clone()));
                }
            }
            Step::Starts(name) => {
                let mut agent = Fixture::unread_on(name);
                let nodes = Self::NODES.map(|(name, _)| self.node(name));
                agent.reads(Found::Node(Update::All(nodes.into())));
                let leases = self.leases.values().cloned().collect();
                agent.reads(Found::Lease(Update::All(leases)));
                self.agents.insert(name, agent);
            }
        }
        self.write_leases();
    }

    /// Writes the Leases until none is due. The programs of a node accept what its agent has read.
    fn write_leases(&mut self) {
        let due = |agents: &mut BTreeMap<&'static str, Fixture>| {
            agents.iter_mut().find_map(|(name, agent)| {
                let version = agent.peers()?.version;
                agent.offers(Offer::Accepts(version));
                Some((*name, agent.written()?))
            })
        };
        while let Some((name, lease)) = due(&mut self.agents) {
            self.writes += 1;
            self.leases.insert(name, lease.clone());
            for agent in self.agents.values_mut() {
                agent.reads(Found::Lease(Update::Put(Box::new(lease.clone()))));
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_counts_only_for_the_node_that_owns_it() {
    let replaced = HandoverLease {
        node_uid: "another".to_owned(),
        since: Some(9),
        ..lease("n2", 5)
    };
    let mut fixture = Fixture::new(vec![replaced]);
    assert!(fixture.accepting().is_empty(), "the Lease of an earlier n2");
    fixture.reads(put(node("n2", 20, &["192.0.2.2", "2001:db8::2"])));
    assert_eq!(fixture.peers().unwrap().version, 7, "nothing waits for 20");
}

#[tokio::test(start_paused = true)]
async fn a_later_version_counts_once_it_is_read() {
    let waits = HandoverLease {
        since: Some(9),
        ..lease("n2", 5)
    };
    let mut fixture = Fixture::new(vec![waits]);
    assert_eq!(
        fixture.peers().unwrap().version,
        7,
        "n2's version 9 is not read yet"
    );
    fixture.reads(put(node("n2", 9, &["192.0.2.2", "2001:db8::2"])));
    assert_eq!(fixture.peers().unwrap().version, 9);
}

#[tokio::test(start_paused = true)]
async fn nodes_that_do_not_accept_this_node_are_named_after_a_minute() {
    let mut fixture = Fixture::new(vec![lease("n2", 4)]);
    fixture.offers(Offer::Accepts(7));
    assert_eq!(
        fixture.state.next_report(),
        None,
        "this node has no Lease yet"
    );
    let own = fixture.written().unwrap();
    fixture.reads(Found::Lease(Update::Put(Box::new(own))));
    let late = fixture.state.next_report().unwrap();
    assert_eq!(late, Instant::now() + PATIENCE + 2 * SPREAD);
    tokio::time::advance(Duration::from_secs(30)).await;
    fixture.reads(Found::Lease(Update::Put(Box::new(lease("n2", 3)))));
    assert_eq!(fixture.state.problem(), None, "n2 has time left");
    tokio::time::advance(Duration::from_secs(31)).await;
    let why = fixture.state.problem().unwrap();
    assert!(why.contains(" at n2 are masqueraded"), "{why}");
    assert_eq!(fixture.state.next_report(), None);
    fixture.reads(Found::Lease(Update::Put(Box::new(lease("n2", 5)))));
    assert_eq!(fixture.state.problem(), None);
}

#[tokio::test(start_paused = true)]
async fn a_failed_write_is_over_once_nothing_is_due() {
    let mut fixture = Fixture::new(vec![]);
    fixture.offers(Offer::Accepts(7));
    fixture.state.failure = Some("forbidden".to_owned());
    fixture.offers(Offer::Accepts(7));
    assert!(
        fixture.state.problem().is_some(),
        "the Lease is not written"
    );
    fixture.offers(Offer::Nothing);
    assert_eq!(fixture.state.problem(), None, "there is nothing to write");
    assert!(*fixture.list.withdrawn.borrow());
}

#[tokio::test(start_paused = true)]
async fn a_withdrawal_is_done_once_the_lease_is_gone() {
    let own = HandoverLease {
        since: Some(5),
        ..lease("n1", 7)
    };
    let mut fixture = Fixture::new(vec![own.clone()]);
    fixture.offers(Offer::Nothing);
    assert!(!*fixture.list.withdrawn.borrow());
    fixture.reads(Found::Lease(Update::Del(own.name)));
    assert!(*fixture.list.withdrawn.borrow());
}

#[tokio::test(start_paused = true)]
async fn the_order_of_addresses_is_no_change() {
    let mut fixture = Fixture::new(vec![lease("n2", 5)]);
    fixture.reads(put(node("n1", 8, &["192.0.2.1", "2001:db8::1"])));
    assert!(fixture.accepting().is_empty(), "a new address");
    fixture.reads(Found::Lease(Update::Put(Box::new(lease("n2", 8)))));
    fixture.reads(put(node("n1", 9, &["2001:db8::1", "192.0.2.1"])));
    assert_eq!(fixture.accepting().len(), 1);
    assert_eq!(fixture.peers().unwrap().version, 8);
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
    fixture.reads(Found::Node(Update::Refused));
    fixture.reads(Found::Lease(Update::Refused));
    assert_eq!(fixture.peers(), Some(Peers::default()));
    fixture.offers(Offer::Accepts(0));
    assert_eq!(fixture.state.write_at, None, "the Node object is unknown");
}
