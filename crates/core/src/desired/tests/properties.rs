//! Properties of random cluster histories.

use std::collections::BTreeSet;
use std::net::IpAddr;

use proptest::bool::weighted;
use proptest::collection::vec;
use proptest::prelude::*;
use proxy_common::addr::{Addr, Port, Proto};
use proxy_common::frontend::{FrontendKey, FrontendKind, Namespace};

use crate::builders::listed;
use crate::compact::Address;
use crate::desired::{Desired, Snapshot};
use crate::diff::Change;
use crate::input::{Input, Update};
use crate::model::Skipped;
use crate::random;
use crate::shares::Room;
use crate::tables::{FamilyTables, Tables};

/// Returns the state of an empty cluster with redirects enabled.
fn desired() -> Desired {
    let mut desired = Desired::with_options("here", random::options());
    let of_pods = [
        Input::Pod(Update::All(Vec::new())),
        Input::LocalRedirect(Update::All(Vec::new())),
    ];
    listed()
        .into_iter()
        .chain(of_pods)
        .for_each(|input| desired.apply(input));
    desired
}

/// Returns true if each frontend came together with its service port.
fn leads_to_service_ports<A: Addr>(tables: &FamilyTables<A>) -> bool {
    let mut ports = tables
        .frontends
        .values()
        .filter(|frontend| frontend.kind != FrontendKind::ADDRESS);
    ports.all(|frontend| tables.services.contains_key(&frontend.service))
}

/// Maps that refuse writes on demand, and perform some of the refused writes.
struct FaultyMaps {
    tables: Tables,
    refusals: Box<dyn Iterator<Item = (bool, bool)>>,
}

impl FaultyMaps {
    fn apply(&mut self, changes: &[Change]) -> Result<(), ()> {
        for change in changes {
            let (refused, done) = self.refusals.next().expect("an endless supply");
            if !refused || done {
                self.tables.apply(change);
            }
            if refused {
                return Err(());
            }
        }
        Ok(())
    }
}

fn frontends(tables: &Tables, kinds: &[FrontendKind]) -> BTreeSet<(IpAddr, Proto, u16)> {
    fn of<A: Addr>(tables: &FamilyTables<A>, kinds: &[FrontendKind]) -> Vec<(IpAddr, Proto, u16)> {
        let of_kinds = tables
            .frontends
            .iter()
            .filter(|(_, frontend)| kinds.contains(&frontend.kind));
        of_kinds
            .map(|(key, _)| (key.addr.ip(), key.proto, key.port.get()))
            .collect()
    }
    of(&tables.v4, kinds)
        .into_iter()
        .chain(of(&tables.v6, kinds))
        .collect()
}

/// Returns the pods' sockets at which another namespace's Service is dialled as its ExternalIP.
fn pods_taken(desired: &Desired) -> Vec<(IpAddr, Proto, u16)> {
    let taken = |at: &(IpAddr, Proto, u16), own: Namespace| {
        let Tables { v4, v6 } = desired.tables();
        let of_family = [namespace_at(v4, at), namespace_at(v6, at)];
        of_family
            .into_iter()
            .flatten()
            .any(|namespace| namespace != own)
    };
    let mut found = Vec::new();
    for slice in desired.store.slices() {
        let own = desired.store.namespace_number(&slice.name.namespace);
        for endpoint in slice
            .endpoints
            .iter()
            .filter(|endpoint| endpoint.pod.is_some())
        {
            let Address::Ip(ip) = endpoint.address else {
                continue;
            };
            let sockets = slice.ports.iter().filter_map(|port| {
                let proto = if port.protocol.as_deref() == Some("UDP") {
                    Proto::UDP
                } else {
                    Proto::TCP
                };
                Some((ip, proto, u16::try_from(port.port?).ok()?))
            });
            found.extend(sockets.filter(|at| taken(at, own)));
        }
    }
    found
}

/// Returns the namespace of the Service that has a socket's address as its ExternalIP.
fn namespace_at<A: Addr>(
    tables: &FamilyTables<A>,
    (ip, proto, port): &(IpAddr, Proto, u16),
) -> Option<Namespace> {
    let key = FrontendKey::new(A::from_ip(*ip)?, Port::new(*port), *proto);
    let frontend = tables.frontends.get(&key)?;
    (frontend.kind == FrontendKind::EXTERNAL_IP).then_some(frontend.namespace)
}

proptest! {
    /// A socket that kpx connected to a pod has the pod as peer, and the programs look up its
    /// packets again where they leave.
    #[test]
    fn packets_to_a_pod_meet_no_external_ip_of_another_namespace(
        inputs in vec(random::input_at_pods(), 1..24),
    ) {
        let mut desired = desired();
        for input in inputs {
            desired.apply(input);
            desired.sync();
            prop_assert_eq!(pods_taken(&desired), vec![]);
        }
    }

    #[test]
    fn incremental_tables_equal_tables_from_scratch(
        batches in vec(random::inputs(0..6), 1..12),
        room in prop_oneof![Just(usize::MAX), 0..12_usize],
    ) {
        let room = Room::of_rows(room);
        let mut desired = desired().within(room);
        let mut now = Tables::default();
        for input in batches {
            for input in input {
                desired.apply(input);
            }
            for change in desired.sync().changes {
                now.apply(&change);
            }
            let scratch = Tables::within(room, &desired.store, &desired.options);
            prop_assert_eq!(desired.tables(), &scratch, "kept:\n{}from scratch:\n{}", desired.tables(), scratch);
            prop_assert_eq!(&now, &scratch, "the changes lead elsewhere");
            prop_assert_eq!(desired.sync().changes, vec![], "nothing happened in between");
            let externals: BTreeSet<_> = desired.external_frontends().collect();
            let kinds = [FrontendKind::EXTERNAL_IP, FrontendKind::LOAD_BALANCER];
            prop_assert_eq!(externals, frontends(&scratch, &kinds));
            let addresses = frontends(&scratch, &[FrontendKind::ADDRESS]).into_iter().map(|(addr, ..)| addr);
            prop_assert_eq!(desired.service_addresses_apart(&[], &[]), addresses.collect());
        }
    }

    /// Each pass reads a part, while objects keep changing.
    #[test]
    fn passes_in_turn_lead_to_the_tables_from_scratch(
        batches in vec(random::inputs(0..6), 1..12),
        room in prop_oneof![Just(usize::MAX), 0..12_usize],
        rows in 1..20_usize,
    ) {
        let room = Room::of_rows(room);
        let mut desired = desired().within(room);
        let mut now = Tables::default();
        let mut pass = |desired: &mut Desired| {
            desired.read_in_turn(rows).sync().changes.iter().for_each(|change| now.apply(change));
            let holds = [now.v4.rows(), now.v6.rows()].iter().all(|rows| room.holds(rows));
            desired.tables() == &now && holds && leads_to_service_ports(&now.v4) && leads_to_service_ports(&now.v6)
        };
        for input in batches.into_iter().flatten() {
            desired.apply(input);
            prop_assert!(pass(&mut desired));
        }
        let passes = (0..1_000).take_while(|_| desired.is_dirty() && pass(&mut desired)).count();
        prop_assert!(!desired.is_dirty(), "not even after {} passes", passes);
        prop_assert_eq!(desired.pending(), Default::default());
        prop_assert_eq!(desired.tables(), &Tables::within(room, &desired.store, &desired.options));
    }

    /// Each object has a history; the histories interleave in any order.
    #[test]
    fn tables_depend_on_the_last_versions_alone(
        events in vec((random::input_but_lists(), any::<u32>(), any::<u32>()), 0..24),
        syncs in vec(any::<bool>(), 24),
    ) {
        let mut orders = [events.clone(), events];
        orders[0].sort_by_key(|(_, at, _)| *at);
        orders[1].sort_by_key(|(_, _, at)| *at);
        let [first, mut second] = orders.map(|events| events.into_iter().map(|(input, ..)| input).collect::<Vec<_>>());
        // Only the order of one object's versions matters, so the second sequence takes the order
        // of the first.
        for place in 0..second.len() {
            let object = random::object(&second[place]);
            let version = second[..place].iter().filter(|input| random::object(input) == object).count();
            let mut history = first.iter().filter(|input| random::object(input) == object);
            second[place] = history.nth(version).expect("as many versions in the first").clone();
        }
        let [first, second] = [first, second].map(|inputs| {
            let mut desired = desired();
            for (input, sync) in inputs.into_iter().zip(&syncs) {
                desired.apply(input);
                if *sync {
                    desired.sync();
                }
            }
            desired.sync();
            desired
        });
        prop_assert_eq!(first.tables(), second.tables());
        prop_assert_eq!(first.skipped().collect::<Vec<_>>(), second.skipped().collect::<Vec<_>>());
        prop_assert_eq!(first.counts(), second.counts());
        let mut parts = Snapshot::default();
        let mut after = parts.take(first.snapshot_part(None, 2));
        while let Some(name) = after {
            after = parts.take(first.snapshot_part(Some(&name), 2));
        }
        prop_assert_eq!(format!("{parts:?}"), format!("{:?}", first.snapshot()));
        // A source that lists only the remaining objects gives the same tables.
        let mut listed = Desired::with_options("here", random::options());
        for input in first.store.lists() {
            listed.apply(input);
        }
        listed.sync();
        prop_assert_eq!(first.tables(), listed.tables());
    }

    #[test]
    fn reports_add_up_to_the_skipped_objects(batches in vec(random::inputs(0..6), 1..12)) {
        let mut desired = desired();
        let mut before = Vec::new();
        for input in batches {
            for input in input {
                desired.apply(input);
            }
            let mut reported = desired.sync().skipped;
            let now: Vec<_> = desired.skipped().cloned().collect();
            let mut news: Vec<_> = now.iter().filter(|skipped| !before.contains(*skipped)).cloned().collect();
            // A slice that moves to another Service is reported again.
            let is_passed_on = |skipped: &Skipped| skipped.object.kind == "EndpointSlice" && before.contains(skipped);
            prop_assert!(reported.iter().all(|skipped| now.contains(skipped)));
            reported.retain(|skipped| !is_passed_on(skipped));
            reported.sort();
            news.sort();
            prop_assert_eq!(reported, news);
            before = now;
        }
    }

    #[test]
    fn maps_that_refuse_one_write_in_four_converge(
        (leftover, _) in random::old_and_new(),
        batches in vec(random::inputs(0..6), 1..12),
        refusals in vec((weighted(0.25), any::<bool>()), 64),
    ) {
        let mut maps = FaultyMaps { tables: leftover, refusals: Box::new(refusals.into_iter().cycle()) };
        let mut desired = desired();
        let mut sync = desired.sync_from(&maps.tables);
        for batch in batches {
            for _ in 0..1_000 {
                if maps.apply(&sync.changes).is_ok() {
                    break;
                }
                sync = desired.sync_from(&maps.tables);
            }
            prop_assert_eq!(&maps.tables, desired.tables());
            for input in batch {
                desired.apply(input);
            }
            sync = desired.sync();
        }
    }
}
