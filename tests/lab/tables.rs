//! The agent's tables in the kernel's maps: reads return the written rows, and deletions remove
//! them.

use std::net::Ipv4Addr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use nix::unistd::Pid;
use proxy_common::addr::{Addr, Addr4, Port, Proto};
use proxy_common::frontend::{Backend, Frontend, FrontendKey, FrontendKind, Service, Set, SlotKey};
use proxy_core::desired::Desired;
use proxy_core::diff::{Change, FamilyChange, diff};
use proxy_core::input::{Input, Update};
use proxy_core::tables::Tables;
use proxy_datapath::object;
use proxy_datapath::{Datapath, Maps, Options, Sizes};
use serde_json::{Value, from_value, json};
use testbed::kernel_tables;

/// Runs one test with maps at a time, because tests find maps through the process's descriptors.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns true for a change after which a backend may stop serving.
fn ends_flows<A: Addr>(change: &FamilyChange<A>) -> bool {
    matches!(
        change,
        FamilyChange::DelEndpoint(_)
            | FamilyChange::DelFrontend(..)
            | FamilyChange::MoveFrontend(..)
    )
}

#[test]
fn tables_become_maps_and_are_read_back() -> Result<()> {
    let _alone = alone();
    let mut maps = Datapath::load(object::embedded()?, Options::default())?.tables;
    let states = [
        Tables::default(),
        tables(
            "maglev",
            &["198.51.100.0/24", "0.0.0.0/0", "2001:db8:1::/48"],
            3,
        )?,
        tables("random", &["198.51.100.0/28", "2001:db8::/32"], 2)?,
        Tables::default(),
    ];
    let full = &states[1].v4;
    ensure!(
        [
            full.endpoints.len(),
            full.maglev.len(),
            full.source_ranges.len()
        ] == [3, 2, 2],
        "{}",
        states[1]
    );
    let mut deleted = 0;
    for step in states.windows(2) {
        let [now, want] = step else { continue };
        for change in diff(now, want) {
            maps.apply(&change)?;
            deleted += u32::from(match change {
                Change::V4(change) => ends_flows(&change),
                Change::V6(change) => ends_flows(&change),
            });
        }
        let read = maps.read()?;
        ensure!(read == *want, "wanted\n{want}\nand read\n{read}");
        ensure!(
            kernel_tables::of(Pid::this())? == *want,
            "read from outside"
        );
        let generation = kernel_tables::generation(Pid::this())?;
        ensure!(
            generation == deleted,
            "generation {generation} after {deleted} deletions of endpoints and frontends"
        );
    }
    ensure!(deleted > 0);
    // A deletion of an absent row succeeds.
    for change in diff(&states[1], &Tables::default()) {
        maps.apply(&change)?;
    }
    Ok(())
}

#[test]
fn a_full_map_names_itself_and_the_flag_until_there_is_room() -> Result<()> {
    let _alone = alone();
    let want = tables("random", &["198.51.100.0/28"], 3)?;
    let few = Some(2);
    let cases = [
        (
            Sizes {
                endpoints: few,
                ..Sizes::default()
            },
            "ENDPOINTS4 is full: start kpx with a larger --endpoint-table-size",
        ),
        (
            Sizes {
                services: few,
                ..Sizes::default()
            },
            "FRONTENDS4 is full: start kpx with a larger --service-table-size",
        ),
    ];
    for (sizes, expected) in cases {
        let mut maps = Datapath::load(
            object::embedded()?,
            Options {
                sizes,
                ..Options::default()
            },
        )?
        .tables;
        let refused = diff(&Tables::default(), &want)
            .iter()
            .find_map(|change| maps.apply(change).err());
        let text = refused
            .map(|error| format!("{error:#}"))
            .unwrap_or_default();
        ensure!(text.contains(expected), "{expected}, but: {text:?}");
        let fits = tables("random", &["198.51.100.0/28"], 1)?;
        for change in diff(&maps.read()?, &fits)
            .iter()
            .filter(|_| sizes.endpoints == few)
        {
            maps.apply(change)?;
        }
    }
    Ok(())
}

#[test]
fn many_rows_are_written_at_once_and_one_that_cannot_be_stops_there() -> Result<()> {
    let _alone = alone();
    const ROOM: usize = 3_000;
    let sizes = Sizes {
        endpoints: u32::try_from(ROOM).ok(),
        ..Sizes::default()
    };
    let mut maps = Datapath::load(
        object::embedded()?,
        Options {
            sizes,
            ..Options::default()
        },
    )?
    .tables;
    let key = |nth: u16| {
        FrontendKey::new(
            Addr4::from(Ipv4Addr::new(10, 96, 0, 1)),
            Port::new(nth + 1),
            Proto::TCP,
        )
    };
    let slot = |nth| SlotKey::new(key(nth / 10), Set::CLUSTER, nth % 10);
    let addr = |nth: u16| Addr4::from(Ipv4Addr::from_bits(0x0a80_0000 + u32::from(nth)));
    let slots = |port| -> Vec<Change> {
        let backend = |nth| Backend::new(addr(nth), Port::new(port), 0);
        (0..4_000)
            .map(|nth| Change::V4(FamilyChange::PutSlot(slot(nth), backend(nth))))
            .collect()
    };
    let (made, result) = maps.apply_all(&slots(80));
    let text = result
        .err()
        .map(|error| format!("{error:#}"))
        .unwrap_or_default();
    let full = "SLOTS4 is full: start kpx with a larger --endpoint-table-size";
    ensure!(
        made == ROOM && text.contains(full) && text.starts_with("put slot"),
        "{made}: {text}"
    );
    // A batch replaces existing rows, with or without room.
    let (made, result) = maps.apply_all(&slots(81)[..ROOM]);
    ensure!(made == ROOM && result.is_ok(), "{made}: {result:?}");
    let mut want = Tables::default();
    slots(81)[..ROOM]
        .iter()
        .for_each(|change| want.apply(change));
    ensure!(maps.read()? == want, "{}", maps.read()?);

    // The same for Services and frontends, mixed with rows of other kinds.
    let service = |nth| Change::V4(FamilyChange::PutService(key(nth), Service::default()));
    let frontend = |nth| {
        let at = FrontendKey::node_port(Port::new(30_000 + nth), Proto::TCP);
        Change::V4(FamilyChange::PutFrontend(
            at,
            Frontend::new(key(nth), FrontendKind::NODE_PORT),
        ))
    };
    let puts: Vec<_> = (0..2_000)
        .map(service)
        .chain((0..2_000).map(frontend))
        .chain([service(2_000)])
        .collect();
    let (made, result) = maps.apply_all(&puts);
    ensure!(made == puts.len() && result.is_ok(), "{made}: {result:?}");
    puts.iter().for_each(|change| want.apply(change));
    ensure!(maps.read()? == want);

    // A deletion of absent rows succeeds, wherever they are in the batch.
    for nth in [0, 1_500, 1_501, 2_999] {
        maps.apply(&Change::V4(FamilyChange::DelSlot(slot(nth))))?;
    }
    let dels = diff(&want, &Tables::default());
    let (made, result) = maps.apply_all(&dels);
    ensure!(made == dels.len() && result.is_ok(), "{made}: {result:?}");
    ensure!(maps.read()? == Tables::default(), "{}", maps.read()?);
    Ok(())
}

#[test]
fn flows_look_again_after_endpoints_were_removed_at_once() -> Result<()> {
    let _alone = alone();
    let mut maps = Datapath::load(object::embedded()?, Options::default())?.tables;
    let none = Tables::default();
    let full = tables("random", &["198.51.100.0/28"], 100)?;
    ensure!(
        [full.v4.endpoints.len(), full.v6.endpoints.len()] == [100, 100],
        "{full}"
    );
    let frontends = u32::try_from(full.v4.frontends.len() + full.v6.frontends.len())?;
    // One generation for the endpoints of each family; its few frontends may change one by one.
    for (now, want, generations) in [(&none, &full, 0..=0), (&full, &none, 3..=frontends + 2)] {
        let changes = diff(now, want);
        let (made, result) = maps.apply_all(&changes);
        ensure!(
            made == changes.len() && result.is_ok(),
            "{made}: {result:?}"
        );
        ensure!(maps.read()? == *want);
        let generation = kernel_tables::generation(Pid::this())?;
        ensure!(
            generations.contains(&generation),
            "{generation} is not in {generations:?}"
        );
    }
    Ok(())
}

/// Returns the tables of a Service of both families with a row in every map, and `backends`.
fn tables(algorithm: &str, ranges: &[&str], backends: u8) -> Result<Tables> {
    let service = json!({
        "metadata": { "namespace": "default", "name": "web", "annotations": { "kpx.dev/lb-algorithm": algorithm } },
        "spec": {
            "type": "LoadBalancer", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1", "fd00:96::1"],
            "ipFamilies": ["IPv4", "IPv6"], "externalTrafficPolicy": "Local", "healthCheckNodePort": 32_000,
            "sessionAffinity": "ClientIP", "externalIPs": ["192.0.2.1"], "loadBalancerSourceRanges": ranges,
            "ports": [{ "port": 53, "protocol": "UDP", "nodePort": 30_053 }],
        },
        "status": { "loadBalancer": { "ingress": [{ "ip": "203.0.113.1" }, { "ip": "2001:db8::1" }] } },
    });
    let slice = |family: &str, prefix: &str| {
        let endpoint =
            |host: u8| json!({ "addresses": [format!("{prefix}{host}")], "nodeName": "here" });
        json!({
            "metadata": {
                "namespace": "default", "name": format!("web-{family}"),
                "labels": { "kubernetes.io/service-name": "web" },
            },
            "addressType": family, "ports": [{ "name": "", "port": 53, "protocol": "UDP" }],
            "endpoints": (1..=backends).map(endpoint).collect::<Vec<Value>>(),
        })
    };
    let mut desired = Desired::new("here");
    desired.apply(Update::All(vec![from_value::<core::Service>(service)?]).into());
    let slices = [slice("IPv4", "10.244.0."), slice("IPv6", "fd00:244::")];
    let slices = slices
        .into_iter()
        .map(from_value::<EndpointSlice>)
        .collect::<Result<_, _>>()
        .context("slices")?;
    desired.apply(Update::All(slices).into());
    desired.apply(Input::Node(Update::All(Vec::new())));
    desired.apply(Input::ServiceCidr(Update::All(Vec::new())));
    let skipped = desired.sync().skipped;
    ensure!(skipped.is_empty(), "{skipped:?}");
    Ok(desired.tables().clone())
}
