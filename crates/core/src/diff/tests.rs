use std::collections::BTreeSet;

use proptest::bool::weighted;
use proptest::collection::vec;
use proptest::prelude::*;
use proxy_common::addr::{Addr, Port, Proto};
use proxy_common::frontend::{FrontendKey, Set, SlotKey};

use crate::builders::{ServiceBuilder, SliceBuilder, service, slice};
use crate::diff::{Change, FamilyChange, diff};
use crate::model::ModelOptions;
use crate::model::tests::dumps::{Dump, assert_all_run};
use crate::random;
use crate::store::Store;
use crate::tables::Tables;

mod order;
mod safe;

use safe::{walk, walk_with};

proptest! {
    #[test]
    fn every_prefix_is_safe((old, new) in random::old_and_new()) {
        if let Err(unsafe_step) = walk(&old, &new, diff(&old, &new)) {
            prop_assert!(false, "{unsafe_step}\nold:\n{old}new:\n{new}");
        }
    }

    /// The agent omits a service port's writes after any of them fails.
    #[test]
    fn refused_writes_leave_the_tables_safe(
        (old, new) in random::old_and_new(),
        refusals in vec(weighted(0.15), 64),
    ) {
        let mut refusals = refusals.into_iter().cycle();
        let accepted = |_: &Change| !refusals.next().unwrap_or_default();
        if let Err(unsafe_step) = walk_with(&old, &new, diff(&old, &new), accepted) {
            prop_assert!(false, "{unsafe_step}\nold:\n{old}new:\n{new}");
        }
    }

    #[test]
    fn a_diff_is_minimal((old, new) in random::old_and_new()) {
        prop_assert_eq!(diff(&new, &new), vec![]);
        // Every change is needed: it changes the tables, and no row is written twice.
        let mut now = old.clone();
        let mut rows = BTreeSet::new();
        for change in diff(&old, &new) {
            let before = now.clone();
            now.apply(&change);
            prop_assert_ne!(before, now.clone(), "{} changes nothing", change);
            prop_assert!(rows.insert(row(&change)), "{} is the second write of its row", change);
        }
    }
}

fn row(change: &Change) -> String {
    fn of_family<A: Addr>(change: &FamilyChange<A>) -> String {
        match change {
            FamilyChange::PutSourceRange(key) | FamilyChange::DelSourceRange(key) => {
                format!("{key:?}")
            }
            FamilyChange::PutEndpoint(key, _) | FamilyChange::DelEndpoint(key) => {
                format!("{key:?}")
            }
            FamilyChange::PutSlot(key, _) | FamilyChange::DelSlot(key) => format!("{key:?}"),
            FamilyChange::PutMaglev(key, _) | FamilyChange::DelMaglev(key) => format!("{key:?}"),
            FamilyChange::PutService(key, _) | FamilyChange::DelService(key) => {
                format!("service {key:?}")
            }
            FamilyChange::PutFrontend(key, _)
            | FamilyChange::MoveFrontend(key, ..)
            | FamilyChange::DelFrontend(key, _) => format!("frontend {key:?}"),
        }
    }
    match change {
        Change::V4(change) => of_family(change),
        Change::V6(change) => of_family(change),
    }
}

fn tables<const N: usize>(objects: [(ServiceBuilder, SliceBuilder); N]) -> Tables {
    let mut store = Store::new("here");
    for (service, slice) in objects {
        let _ = store.apply(service.into());
        let _ = store.apply(slice.into());
    }
    Tables::of(&store, &ModelOptions::default())
}

/// The tables of Services that grow, shrink, are added and deleted.
fn before_and_after() -> (Tables, Tables) {
    let web = || service("web").cluster_ip("10.96.0.1").tcp(80);
    let web_1 = || slice("web-1", "web").tcp(80);
    let before = tables([
        (
            web(),
            web_1()
                .ready("10.244.0.1")
                .ready("10.244.0.2")
                .ready("10.244.0.3"),
        ),
        (
            service("old").cluster_ip("10.96.0.2").tcp(80),
            slice("old-1", "old").tcp(80).ready("10.244.0.8"),
        ),
    ]);
    let after = tables([
        (web(), web_1().ready("10.244.0.1").ready("10.244.0.3")),
        (
            service("new").cluster_ip("10.96.0.3").tcp(80),
            slice("new-1", "new").tcp(80).ready("10.244.0.9"),
        ),
    ]);
    (before, after)
}

#[test]
fn puts_lead_up_to_a_frontend_and_deletions_away_from_it() {
    let (before, after) = before_and_after();
    let changes: String = diff(&before, &after)
        .iter()
        .map(|change| format!("{change}\n"))
        .collect();
    Dump::of_rust(
        file!(),
        "puts_lead_up_to_a_frontend_and_deletions_away_from_it",
    )
    .assert_eq(&changes);
}

/// States that kpx never writes are cleaned up as well.
#[test]
fn leftovers_are_removed() {
    let (before, after) = before_and_after();
    let mut odd = before.clone();
    let key = FrontendKey::new(
        std::net::Ipv4Addr::new(10, 96, 0, 1).into(),
        Port::new(80),
        Proto::TCP,
    );
    odd.v4.services.remove(&key);
    let orphan = SlotKey::new(key, Set::LOCAL, 7);
    odd.v4.slots.extend(
        before
            .v4
            .slots
            .values()
            .next()
            .map(|backend| (orphan, *backend)),
    );
    for change in diff(&odd, &after) {
        odd.apply(&change);
    }
    assert_eq!(odd, after);
}

/// A Service changes a load balancer address and its source ranges together.
#[test]
fn a_change_of_address_and_source_ranges_admits_no_other_client() {
    let web = |vip, range| {
        let web = service("web")
            .cluster_ip("10.96.0.1")
            .tcp(80)
            .type_("LoadBalancer")
            .vip(vip)
            .source_range(range);
        tables([(web, slice("web-1", "web").tcp(80).ready("10.244.0.1"))])
    };
    let old = web("203.0.113.1", "198.51.100.0/24");
    let new = web("203.0.113.2", "192.0.2.0/24");
    walk(&old, &new, diff(&old, &new)).unwrap();
}

#[test]
fn every_section_has_a_test() {
    assert_all_run(file!(), include_str!("tests.rs"));
}
