//! Tests of the order of change kinds.

use super::{tables, walk};
use crate::builders::{ServiceBuilder, SliceBuilder, service, slice};
use crate::diff::{Change, FamilyChange, diff};
use crate::tables::Tables;

/// The kinds of change, in the order of a diff.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    PutSourceRange,
    PutEndpoint,
    PutSlot,
    PutMaglev,
    PutService,
    PutFrontend,
    DelFrontend,
    OpenService,
    DelService,
    DelMaglev,
    DelSlot,
    DelSourceRange,
    DelEndpoint,
}
use Kind::*;

const ORDER: [Kind; 13] = [
    PutSourceRange,
    PutEndpoint,
    PutSlot,
    PutMaglev,
    PutService,
    PutFrontend,
    DelFrontend,
    OpenService,
    DelService,
    DelMaglev,
    DelSlot,
    DelSourceRange,
    DelEndpoint,
];

/// The pairs whose first kind must come first. No other constraint is needed.
#[rustfmt::skip]
const NEEDED: [(Kind, Kind); 25] = [
    // A row is put before the rows that refer to it.
    (PutSourceRange, PutService), (PutEndpoint, PutSlot), (PutEndpoint, PutService), (PutSlot, PutMaglev),
    (PutSlot, PutService), (PutMaglev, PutService), (PutService, PutFrontend),
    // A row is deleted after the rows that refer to it.
    (PutFrontend, DelService), (DelFrontend, DelService),
    (PutService, DelMaglev), (OpenService, DelMaglev), (DelService, DelMaglev),
    (PutService, DelSlot), (OpenService, DelSlot), (DelService, DelSlot), (PutMaglev, DelSlot),
    (OpenService, DelSourceRange), (DelFrontend, DelSourceRange), (PutSourceRange, DelSourceRange),
    // No client is admitted through a frontend that is about to be deleted.
    (PutFrontend, OpenService), (DelFrontend, OpenService),
    // Endpoints are deleted last.
    (PutSlot, DelEndpoint), (PutService, DelEndpoint), (OpenService, DelEndpoint), (DelService, DelEndpoint),
];

/// Moves each kind before each earlier kind. The check fails exactly for the constrained pairs.
#[test]
fn other_orders_are_not_safe() {
    let (before, after) = before_and_after();
    for (to, earlier) in ORDER.into_iter().enumerate() {
        for (from, later) in ORDER.into_iter().enumerate().skip(to) {
            let mut order = ORDER.to_vec();
            order.remove(from);
            order.insert(to, later);
            let place = |kind: Kind| order.iter().position(|other| *other == kind);
            let walked = |old: &Tables, new: &Tables| {
                let mut changes = diff(old, new);
                changes.sort_by_key(|change| place(kind(change, old)));
                walk(old, new, changes)
            };
            let walked = walked(&before, &after).and(walked(&after, &before));
            let safe = NEEDED
                .iter()
                .all(|(first, then)| place(*first) < place(*then));
            assert_eq!(
                walked.is_ok(),
                safe,
                "{later:?} before {earlier:?}: {walked:?}"
            );
        }
    }
}

fn kind(change: &Change, old: &Tables) -> Kind {
    let Change::V4(change) = change else {
        panic!("the example is of IPv4")
    };
    match change {
        FamilyChange::PutSourceRange(_) => PutSourceRange,
        FamilyChange::PutEndpoint(..) => PutEndpoint,
        FamilyChange::PutSlot(..) => PutSlot,
        FamilyChange::PutMaglev(..) => PutMaglev,
        FamilyChange::PutService(key, service) if crate::diff::opens(&old.v4, key, service) => {
            OpenService
        }
        FamilyChange::PutService(..) => PutService,
        FamilyChange::PutFrontend(..) | FamilyChange::MoveFrontend(..) => PutFrontend,
        FamilyChange::DelFrontend(..) => DelFrontend,
        FamilyChange::DelService(..) => DelService,
        FamilyChange::DelMaglev(..) => DelMaglev,
        FamilyChange::DelSlot(..) => DelSlot,
        FamilyChange::DelSourceRange(..) => DelSourceRange,
        FamilyChange::DelEndpoint(..) => DelEndpoint,
    }
}

/// The tables of Services that each change in one way.
fn before_and_after() -> (Tables, Tables) {
    let plain = |last: u8| service(&format!("s{last}")).cluster_ip(&format!("10.96.0.{last}"));
    let tcp = |last: u8| plain(last).tcp(80);
    let udp = |last: u8| plain(last).port("", "UDP", 80);
    let guarded = |built: ServiceBuilder, last: u8, range: &str| {
        built
            .type_("LoadBalancer")
            .vip(&format!("203.0.113.{last}"))
            .source_range(range)
    };
    let backends = |last: u8, hosts: &[u8]| {
        let slice = slice(&format!("s{last}-1"), &format!("s{last}"))
            .tcp(80)
            .port("", "UDP", 80);
        hosts.iter().fold(slice, |slice, host| {
            slice.ready(&format!("10.244.{last}.{host}"))
        })
    };
    let wide = "198.51.100.0/24";
    let narrow = "198.51.100.0/28";
    let before: [(ServiceBuilder, SliceBuilder); 10] = [
        (tcp(1), backends(1, &[1, 2, 3])),
        (
            guarded(udp(2).algorithm("maglev"), 2, wide),
            backends(2, &[1, 2]),
        ),
        (tcp(4).algorithm("maglev"), backends(4, &[1, 2, 3])),
        (udp(5), backends(5, &[1, 2])),
        (guarded(tcp(6), 6, wide), backends(6, &[1])),
        (
            guarded(udp(7).algorithm("maglev"), 7, wide),
            backends(7, &[1, 2]),
        ),
        (guarded(tcp(8), 8, wide), backends(8, &[1])),
        (tcp(9), backends(9, &[1])),
        (
            tcp(10).affinity(None).algorithm("maglev"),
            backends(10, &[1, 2]),
        ),
        (guarded(tcp(11), 11, wide), backends(11, &[1])),
    ];
    let after = [
        // Shrinks.
        (tcp(1), backends(1, &[1, 3])),
        // Service 2 is deleted with all its rows. Service 3 is new.
        (
            guarded(udp(3).algorithm("maglev"), 3, wide),
            backends(3, &[1, 2]),
        ),
        // Changes the algorithm.
        (tcp(4), backends(4, &[1, 2, 3])),
        // Changes the backends.
        (udp(5), backends(5, &[1, 3])),
        // Changes the source ranges.
        (guarded(tcp(6), 6, narrow), backends(6, &[1])),
        // Keeps only its backends.
        (udp(7), backends(7, &[2])),
        // Loses its load balancer address to another Service.
        (tcp(8), backends(8, &[1])),
        (guarded(tcp(9), 8, wide), backends(9, &[1])),
        // Loses backends, and the Maglev table changes.
        (
            tcp(10).affinity(None).algorithm("maglev"),
            backends(10, &[2]),
        ),
        // Opens to every client.
        (
            tcp(11).type_("LoadBalancer").vip("203.0.113.11"),
            backends(11, &[1]),
        ),
    ];
    (tables(before), tables(after))
}
