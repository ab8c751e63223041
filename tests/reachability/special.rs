//! Cases with more than one conversation.

mod addresses;
mod affinity;
mod balance;
mod live;
mod pairs;
mod sets;

use std::thread;

use anyhow::{Result, anyhow};
use testbed::echo::Protocol;
use testbed::lab::Family;

use crate::fixture::{Fixture, combinations};
use crate::results::Results;

pub(crate) struct Special {
    pub(crate) id: &'static str,
    pub(crate) what: &'static str,
    check: Check,
}

/// A check for each protocol and family, or for all at once.
enum Check {
    Each(fn(&Fixture, Protocol, Family) -> Result<()>),
    /// Runs once, because each protocol would repeat the same change of the cluster or the same
    /// wait.
    Together(fn(&Fixture) -> Result<()>),
    /// A check for all at once that mostly waits, in parallel with checks of single protocols.
    Waiting(fn(&Fixture) -> Result<()>),
}
use Check::{Each, Together, Waiting};

const fn special(id: &'static str, what: &'static str, check: Check) -> Special {
    Special { id, what, check }
}

pub(crate) const SPECIALS: &[Special] = &[
    special(
        "C05",
        "masqueraded to the port with which the host dials the same backend",
        Each(pairs::masqueraded_and_host),
    ),
    special(
        "C07",
        "the backend's neighbour entry is gone",
        Each(pairs::local_neighbour_unknown),
    ),
    special(
        "C08",
        "the next hop's neighbour entry is gone",
        Each(pairs::remote_neighbour_unknown),
    ),
    special(
        "C11",
        "a process bound to the loopback's address, and one bound to eth0",
        Each(addresses::bound),
    ),
    special(
        "C15",
        "internalTrafficPolicy Local: only the local backend answers",
        Each(sets::policy_local),
    ),
    special(
        "C15",
        "internalTrafficPolicy Cluster: both backends answer",
        Each(sets::policy_cluster),
    ),
    special(
        "C17",
        "one backend for a client, as long as it is there",
        Together(affinity::sticks),
    ),
    special(
        "C17",
        "kept by use, forgotten when idle",
        Waiting(affinity::expires),
    ),
    special(
        "C18",
        "served if there is no other, avoided if there is",
        Together(sets::terminating),
    ),
    special(
        "C19",
        "zones, nodes, and all if a hint fits no client here",
        Together(sets::hints),
    ),
    special("C21", "at the same time", Each(pairs::two_services)),
    special("C22", "at the same time", Each(pairs::service_and_direct)),
    special(
        "N05",
        "only the local one of two backends answers outsiders, both answer pods",
        Each(sets::external_policy),
    ),
    special(
        "N15",
        "served at once, and no longer when it is taken away",
        Together(addresses::comes_and_goes),
    ),
    special(
        "N18",
        "two nodes, as two clients behind one NAT",
        Each(pairs::two_nodes),
    ),
    special(
        "N18",
        "a node port and a load balancer",
        Each(pairs::two_frontends),
    ),
    special(
        "N20",
        "the answers come to the pod",
        Each(pairs::masqueraded_to_node_port),
    ),
    special(
        "L05",
        "the address does not leave the node",
        Together(addresses::stays),
    ),
    special(
        "L13",
        "200 and 503, the numbers in header and body",
        Together(addresses::health_check),
    ),
    special("L15", "every kind of frontend", Together(addresses::narrow)),
    special(
        "D05",
        "the next datagram goes to a live one",
        Together(live::datagrams_move),
    ),
    special(
        "D13",
        "flows outlive the backend's removal",
        Together(live::outlive_backend),
    ),
    special(
        "D13",
        "flows outlive a change of policy",
        Together(live::outlive_policy),
    ),
    special(
        "D13",
        "flows outlive the service",
        Together(live::outlive_service),
    ),
    special(
        "D13",
        "service.kubernetes.io/service-proxy-name and headless, live",
        Together(live::labels),
    ),
    special(
        "D16",
        "maglev: one client, one backend, on both nodes",
        Together(balance::maglev),
    ),
    special(
        "D16",
        "round-robin: the same number for each",
        Together(balance::round_robin),
    ),
    special(
        "D16",
        "least-connections: not the loaded one",
        Together(balance::least_connections),
    ),
    special(
        "D16",
        "weights 3, 1 and 0 under each algorithm",
        Together(balance::weights),
    ),
    special(
        "D16",
        "the weight of a slice: that of its endpoints",
        Together(balance::slice_weight),
    ),
];

pub(crate) fn run(fixture: &Fixture, results: &mut Results) {
    const ALL: &str = "all protocols and families";
    let mut add = |special: &Special, combination: &str, result| {
        let Special { id, what, .. } = special;
        results.add(
            id,
            &format!("{id}: {what}, {combination}, {:?}", fixture.lab.layout),
            result,
        );
    };
    thread::scope(|scope| {
        let waiting: Vec<_> = SPECIALS
            .iter()
            .filter_map(|special| match special.check {
                Waiting(check) => Some((special, scope.spawn(move || check(fixture)))),
                Each(_) | Together(_) => None,
            })
            .collect();
        for special in SPECIALS {
            if let Each(check) = special.check {
                for (protocol, family) in combinations() {
                    add(
                        special,
                        &format!("{protocol} {family}"),
                        check(fixture, protocol, family),
                    );
                }
            }
        }
        for (special, waiting) in waiting {
            add(
                special,
                ALL,
                waiting
                    .join()
                    .unwrap_or_else(|_| Err(anyhow!("its thread panicked"))),
            );
        }
    });
    for special in SPECIALS {
        if let Together(check) = special.check {
            add(special, ALL, check(fixture));
        }
    }
}
