//! `--external-forwarding dsr`: the entry step. The other end needs tunnel devices, which virtual
//! machines have: `tests/vm/dsr.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use aya::maps::{HashMap, MapData};
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto};
use proxy_common::device::{Device, HANDED_OVER_MARK, OwnAddr};
use proxy_common::frontend::{
    Backend, Frontend, FrontendKey, FrontendKind, MAGLEV_PLACES, Maglev, Service, Set, SetKey,
    SlotKey,
};
use proxy_common::names::{DEVICES, PEERS};
use proxy_core::diff::{Change, FamilyChange};
use proxy_datapath::{BpfFs, Datapath, Maps, Options, Persistence, Pins, Sizes, object, remove};
use proxy_net::changes::Changes;
use testbed::netns::NetNs;

use crate::fixture::{Fixture, fixtures_of};
use crate::reuse::Setup;

#[test]
fn clients_outside_are_handed_over_to_the_node_of_their_backend() -> Result<()> {
    for mut fixture in fixtures()? {
        set_tunnels(&fixture, 77)?;
        fixture
            .rows("handover::clients_outside_are_handed_over_to_the_node_of_their_backend/on")?;
    }
    Ok(())
}

#[test]
fn clients_are_masqueraded_where_nothing_may_be_handed_over() -> Result<()> {
    for mut fixture in fixtures()? {
        set_tunnels(&fixture, 0)?;
        fixture.rows("handover::clients_are_masqueraded_where_nothing_may_be_handed_over/off")?;
    }
    Ok(())
}

/// The backend's node knows only the addresses of the Node object.
#[test]
fn node_ports_at_other_addresses_are_masqueraded() -> Result<()> {
    for mut fixture in fixtures()? {
        set_tunnels(&fixture, 77)?;
        let node = fixture.names.addr("node")?;
        let own = BTreeMap::from([(node, OwnAddr::new(1, OwnAddr::NODE_PORTS))]);
        fixture.bench.datapath.node.set_addrs(&own)?;
        fixture.rows("handover::node_ports_at_other_addresses_are_masqueraded/other")?;
    }
    Ok(())
}

/// The router may lead a client's next packet to another node, which hands it over.
#[test]
fn syn_acks_to_clients_outside_leave_room_for_the_outer_header() -> Result<()> {
    for mut fixture in fixtures()? {
        set_tunnels(&fixture, 77)?;
        fixture
            .rows("handover::syn_acks_to_clients_outside_leave_room_for_the_outer_header/ipv4")?;
        fixture
            .rows("handover::syn_acks_to_clients_outside_leave_room_for_the_outer_header/ipv6")?;
    }
    Ok(())
}

#[test]
fn errors_about_answers_go_to_the_node_of_the_backend() -> Result<()> {
    for mut fixture in fixtures()? {
        set_tunnels(&fixture, 77)?;
        fixture.rows("handover::errors_about_answers_go_to_the_node_of_the_backend/on")?;
        fixture.mark = HANDED_OVER_MARK;
        fixture.rows("handover::errors_about_answers_go_to_the_node_of_the_backend/marked")?;
        fixture.mark = 0;
        fixture.rows("handover::errors_about_answers_go_to_the_node_of_the_backend/draining")?;
    }
    Ok(())
}

/// A backend that terminates serves its open connections.
#[test]
fn open_connections_stay_at_their_node_when_endpoints_change() -> Result<()> {
    for mut fixture in fixtures()? {
        set_tunnels(&fixture, 77)?;
        fixture
            .rows("handover::open_connections_stay_at_their_node_when_endpoints_change/before")?;
        let change = if fixture.is_v4() {
            Change::V4(backend_here::<Addr4>(&fixture)?)
        } else {
            Change::V6(backend_here::<Addr6>(&fixture)?)
        };
        fixture.bench.datapath.tables.apply(&change)?;
        fixture
            .rows("handover::open_connections_stay_at_their_node_when_endpoints_change/after")?;
        // The node takes no clients over any more.
        let nodes = BTreeSet::new();
        fixture.bench.datapath.node.keep_handed_over(&nodes)?;
        fixture.rows("handover::open_connections_stay_at_their_node_when_endpoints_change/left")?;
    }
    Ok(())
}

/// Netfilter masquerades from any port above 1,023.
#[test]
fn connections_of_other_programs_from_a_node_port_stay() -> Result<()> {
    for mut fixture in fixtures()? {
        set_tunnels(&fixture, 77)?;
        fixture.rows("handover::connections_of_other_programs_from_a_node_port_stay/on")?;
    }
    Ok(())
}

#[test]
fn flows_from_before_the_mode_stay() -> Result<()> {
    for mut fixture in fixtures()? {
        set_tunnels(&fixture, 0)?;
        fixture.rows("handover::flows_from_before_the_mode_stay/before")?;
        set_tunnels(&fixture, 77)?;
        fixture.rows("handover::flows_from_before_the_mode_stay/after")?;
    }
    Ok(())
}

/// The stack would forward a packet for the sender's node port to the sender again.
#[test]
fn nothing_of_the_tunnel_passes_untranslated() -> Result<()> {
    for mut fixture in fixtures()? {
        set_tunnels(&fixture, 77)?;
        fixture.mark = HANDED_OVER_MARK;
        fixture.rows("handover::nothing_of_the_tunnel_passes_untranslated/marked")?;
        // The device of a pod may leave marks alone.
        fixture.rows("handover::nothing_of_the_tunnel_passes_untranslated/pod")?;
        fixture.mark = 0;
        fixture.rows("handover::nothing_of_the_tunnel_passes_untranslated/unmarked")?;
    }
    Ok(())
}

/// A map that no program uses has one row, and no pin. The next agent may have the mode.
#[test]
fn the_table_of_nodes_is_large_only_with_the_mode() -> Result<()> {
    let netns = NetNs::create(format!("kpx-{}-peers", std::process::id()))?;
    let dir = netns.bpf_dir();
    let start = |hands_over| {
        let persistence = Persistence::new(Pins::open(&dir, BpfFs::Host)?, Changes::new(&dir));
        let options = Options {
            sizes: Sizes {
                flows: Some(32_768),
                ..Sizes::default()
            },
            hands_over,
            ..Options::default()
        };
        Datapath::take_over(object::embedded()?, options, persistence)
    };
    let pin = Pins::maps_in(&dir).join(PEERS);
    let nodes = BTreeMap::from([(
        "n2".to_owned(),
        vec!["192.0.2.2".parse()?, "2001:db8::2".parse()?],
    )]);
    netns.run(|| {
        let off = start(false)?;
        ensure!(off.loaded.max_entries[PEERS] == 1 && !pin.exists());
        // An agent without this rule has left a pin.
        MapData::from_id(off.loaded.maps[PEERS])?.pin(&pin)?;
        drop(off);
        let mut on = start(true)?;
        ensure!(
            on.loaded.max_entries[PEERS] > 1_000,
            "{:?}",
            on.loaded.max_entries
        );
        on.node.set_peers(&nodes)?;
        drop(on);
        let off = start(false)?;
        ensure!(off.loaded.max_entries[PEERS] == 1);
        drop(off);
        let mut on = start(true)?;
        on.node.set_peers(&nodes)?;
        drop(on);
        remove(&dir, &mut |_| ())
    })
}

/// Makes fixtures with Services of every kind, of which some hand clients over.
fn fixtures() -> Result<Vec<Fixture>> {
    let setup = Setup {
        hands_over: true,
        ..Setup::default()
    };
    let mut fixtures = fixtures_of("handover", setup)?;
    for fixture in &mut fixtures {
        fixture.add_frontends()?;
        // Frames for other hosts are left alone.
        fixture
            .netns
            .ip("link set eth1 address 02:00:00:00:00:02")?;
        let changes: Vec<Change> = if fixture.is_v4() {
            direct::<Addr4>(fixture)?
                .into_iter()
                .map(Change::V4)
                .collect()
        } else {
            direct::<Addr6>(fixture)?
                .into_iter()
                .map(Change::V6)
                .collect()
        };
        for change in &changes {
            fixture.bench.datapath.tables.apply(change)?;
        }
    }
    Ok(fixtures)
}

/// Hands over web:80, whose backend is here, and two ports of `remote`, whose backend is elsewhere:
/// at a node port, and at the address `empty`. The name `lost` stands for the backend's node.
fn direct<A: Addr>(fixture: &Fixture) -> Result<Vec<FamilyChange<A>>> {
    let addr =
        |name: &str| -> Result<A> { A::from_ip(fixture.names.addr(name)?).context("family") };
    let mut changes = Vec::new();
    for (name, port, proto, backend, target, flags) in [
        ("web", 80, Proto::TCP, "pod", 8080, Backend::<A>::LOCAL),
        (
            "remote",
            53,
            Proto::UDP,
            "far",
            5353,
            Backend::<A>::TUNNELLED,
        ),
        (
            "remote",
            80,
            Proto::TCP,
            "far",
            8080,
            Backend::<A>::TUNNELLED,
        ),
    ] {
        let key = FrontendKey::new(addr(name)?, Port::new(port), proto);
        let backend = Backend::new(addr(backend)?, Port::new(target), flags);
        let node = Backend::new(addr("lost")?, Port::ANY, 0);
        changes.extend([
            FamilyChange::PutSlot(SlotKey::new(key, Set::DIRECT, 0), backend),
            FamilyChange::PutSlot(SlotKey::new(key, Set::NODES, 0), node),
            FamilyChange::PutMaglev(
                SetKey::new(key, Set::DIRECT),
                Arc::new(Maglev::new([0; MAGLEV_PLACES])),
            ),
            FamilyChange::PutService(
                key,
                Service::new(1, 0, Service::HAS_ENDPOINTS | Service::HANDS_OVER),
            ),
        ]);
    }
    let remote = FrontendKey::new(addr("remote")?, Port::new(80), Proto::TCP);
    changes.push(FamilyChange::PutFrontend(
        FrontendKey::new(addr("empty")?, Port::new(80), Proto::TCP),
        Frontend::new(remote, FrontendKind::LOAD_BALANCER),
    ));
    Ok(changes)
}

/// Returns the change that puts this node's pod in the place of the backend of `empty`.
fn backend_here<A: Addr>(fixture: &Fixture) -> Result<FamilyChange<A>> {
    let addr =
        |name: &str| -> Result<A> { A::from_ip(fixture.names.addr(name)?).context("family") };
    let remote = FrontendKey::new(addr("remote")?, Port::new(80), Proto::TCP);
    let backend = Backend::new(addr("pod")?, Port::new(8080), Backend::<A>::LOCAL);
    let slot = SlotKey::new(remote, Set::DIRECT, 0);
    Ok(FamilyChange::PutSlot(slot, backend))
}

/// Sets the tunnel devices of both families; 0: packets take the stack.
fn set_tunnels(fixture: &Fixture, ifindex: u32) -> Result<()> {
    let mut devices: HashMap<MapData, u32, Device> = fixture.bench.map(DEVICES)?;
    let row = Device::tunnels(ifindex, ifindex);
    devices
        .insert(Device::TUNNELS, row, 0)
        .context("write DEVICES")
}
