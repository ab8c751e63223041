use std::collections::BTreeSet;

use expect_test::expect;
use proptest::prelude::*;
use proxy_common::addr::{Addr, Port, Proto};
use proxy_common::frontend::{Backend, FrontendKey, FrontendKind, Set, SlotKey};

use crate::builders::{ServiceBuilder, SliceBuilder, service, slice};
use crate::diff::{Change, FamilyChange, diff};
use crate::random;
use crate::store::Store;
use crate::tables::{FamilyTables, Tables};

proptest! {
    #[test]
    fn every_prefix_is_safe((old, new) in random::old_and_new()) {
        if let Err(unsafe_step) = walk(&old, &new, diff(&old, &new)) {
            prop_assert!(false, "{unsafe_step}\nold:\n{old}new:\n{new}");
        }
    }

    #[test]
    fn a_diff_is_minimal((old, new) in random::old_and_new()) {
        prop_assert_eq!(diff(&new, &new), vec![]);
        // Every change is needed: none writes what is there, and none touches a row twice.
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
    let text = change.to_string();
    text.split(' ').skip(1).take(3).collect::<Vec<_>>().join(" ")
}

/// Applies `changes` one by one; says what is wrong after the first that leaves the tables unsafe or at the end.
fn walk(old: &Tables, new: &Tables, changes: Vec<Change>) -> Result<(), String> {
    let mut now = old.clone();
    for change in changes {
        now.apply(&change);
        check_family(&now.v4, &old.v4, &new.v4).map_err(|wrong| format!("after {change}: {wrong}"))?;
        check_family(&now.v6, &old.v6, &new.v6).map_err(|wrong| format!("after {change}: {wrong}"))?;
    }
    if now == *new { Ok(()) } else { Err(format!("ends in\n{now}")) }
}

/// Whether a client that dials at this very moment gets what the old or the new state promises.
fn check_family<A: Addr>(now: &FamilyTables<A>, old: &FamilyTables<A>, new: &FamilyTables<A>) -> Result<(), String> {
    for key in old.frontends.keys().filter(|key| new.frontends.contains_key(key)) {
        if !now.frontends.contains_key(key) {
            return Err(format!("{key:?} has vanished"));
        }
    }
    for (key, frontend) in now.frontends.iter().filter(|(_, frontend)| frontend.kind != FrontendKind::ADDRESS) {
        if !now.services.contains_key(&frontend.service) {
            return Err(format!("{key:?} leads to no service"));
        }
    }
    for (name, service) in &now.services {
        for (set, index) in Set::ALL.into_iter().flat_map(|set| (0..service.count(set)).map(move |index| (set, index)))
        {
            let slot = SlotKey::new(*name, set, index);
            let backend = now.slots.get(&slot).ok_or_else(|| format!("{slot:?} is a hole"))?;
            if !members(old, name, set).chain(members(new, name, set)).any(|member| member == backend) {
                return Err(format!("{slot:?} holds {backend:?}, which is of neither state"));
            }
        }
        let served = |tables: &FamilyTables<A>| {
            tables.services.get(name).is_some_and(|service| service.count(service.internal_set()) > 0)
        };
        if served(old) && served(new) && !served(now) {
            return Err(format!("{name:?} has no backends for a while"));
        }
    }
    Ok(())
}

fn members<'a, A: Addr>(
    tables: &'a FamilyTables<A>,
    service: &FrontendKey<A>,
    set: Set,
) -> impl Iterator<Item = &'a Backend<A>> {
    let count = tables.services.get(service).map_or(0, |service| service.count(set));
    let service = *service;
    (0..count).filter_map(move |index| tables.slots.get(&SlotKey::new(service, set, index)))
}

fn tables<const N: usize>(objects: [(ServiceBuilder, SliceBuilder); N]) -> Tables {
    let mut store = Store::new("here");
    for (service, slice) in objects {
        let _ = store.apply(service.into());
        let _ = store.apply(slice.into());
    }
    Tables::of(&store)
}

/// Two services grow, shrink, come and go.
fn before_and_after() -> (Tables, Tables) {
    let web = || service("web").cluster_ip("10.96.0.1").tcp(80);
    let web_1 = || slice("web-1", "web").tcp(80);
    let before = tables([
        (web(), web_1().ready("10.244.0.1").ready("10.244.0.2").ready("10.244.0.3")),
        (service("old").cluster_ip("10.96.0.2").tcp(80), slice("old-1", "old").tcp(80).ready("10.244.0.8")),
    ]);
    let after = tables([
        (web(), web_1().ready("10.244.0.1").ready("10.244.0.3")),
        (service("new").cluster_ip("10.96.0.3").tcp(80), slice("new-1", "new").tcp(80).ready("10.244.0.9")),
    ]);
    (before, after)
}

#[test]
fn puts_lead_up_to_a_frontend_and_deletions_away_from_it() {
    let (before, after) = before_and_after();
    let changes: String = diff(&before, &after).iter().map(|change| format!("{change}\n")).collect();
    expect![[r#"
        put slot 10.96.0.1:80/tcp cluster[1] -> 10.244.0.3:80
        put slot 10.96.0.3:80/tcp cluster[0] -> 10.244.0.9:80
        put service 10.96.0.1:80/tcp cluster=2 local=0 has-endpoints
        put service 10.96.0.3:80/tcp cluster=1 local=0 has-endpoints
        put frontend 10.96.0.3 address
        put frontend 10.96.0.3:80/tcp cluster-ip
        del frontend 10.96.0.2
        del frontend 10.96.0.2:80/tcp
        del service 10.96.0.2:80/tcp
        del slot 10.96.0.1:80/tcp cluster[2]
        del slot 10.96.0.2:80/tcp cluster[0]
    "#]]
    .assert_eq(&changes);
}

/// Of all orders of the six kinds of change the check above refuses exactly those that let a reader down.
#[test]
fn other_orders_are_not_safe() {
    let (before, after) = before_and_after();
    for order in permutations([0, 1, 2, 3, 4, 5]) {
        let place = |kind: u8| order.iter().position(|other| *other == kind);
        let walked = |old: &Tables, new: &Tables| {
            let mut changes = diff(old, new);
            changes.sort_by_key(|change| place(kind(change)));
            walk(old, new, changes)
        };
        let walked = walked(&before, &after).and(walked(&after, &before));
        // Slots before what counts them, services before what leads to them; and back.
        let safe = [(0, 1), (1, 2), (1, 5), (3, 4), (4, 5)].iter().all(|(first, then)| place(*first) < place(*then));
        assert_eq!(walked.is_ok(), safe, "{order:?}: {walked:?}");
    }
}

fn kind(change: &Change) -> u8 {
    let Change::V4(change) = change else { panic!("the example is of IPv4") };
    match change {
        FamilyChange::PutSlot(..) => 0,
        FamilyChange::PutService(..) => 1,
        FamilyChange::PutFrontend(..) => 2,
        FamilyChange::DelFrontend(..) => 3,
        FamilyChange::DelService(..) => 4,
        FamilyChange::DelSlot(..) => 5,
    }
}

fn permutations(of: [u8; 6]) -> Vec<Vec<u8>> {
    let mut all = vec![vec![]];
    for kind in of {
        let longer = |order: Vec<u8>| (0..=order.len()).map(move |at| [&order[..at], &[kind], &order[at..]].concat());
        all = all.into_iter().flat_map(longer).collect();
    }
    all
}

/// A state that no kpx would write is only another state to leave.
#[test]
fn leftovers_are_removed() {
    let (before, after) = before_and_after();
    let mut odd = before.clone();
    let key = FrontendKey::new(std::net::Ipv4Addr::new(10, 96, 0, 1).into(), Port::new(80), Proto::TCP);
    odd.v4.services.remove(&key);
    let orphan = SlotKey::new(key, Set::LOCAL, 7);
    odd.v4.slots.extend(before.v4.slots.values().next().map(|backend| (orphan, *backend)));
    for change in diff(&odd, &after) {
        odd.apply(&change);
    }
    assert_eq!(odd, after);
}
