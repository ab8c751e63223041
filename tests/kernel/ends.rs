//! Ends that have flows: each round marks the ends of open flows, and packets of other ends skip
//! the flow look-up.

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, HashMap, MapData};
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto, SockAddr};
use proxy_common::flow::{Flow, FlowKey, Hook, Kind};
use proxy_common::names::{IPV4, IPV6, WAYS};
use proxy_common::ways::{ROUND, ROWS, Row, counts};
use proxy_datapath::{BpfFs, Datapath, Options, Persistence, Pins, Sizes, object, open, remove};
use proxy_net::changes::Changes;
use testbed::netns::NetNs;

use crate::fixture::{Fixture, fixtures};
use crate::packets::run_section;

/// More rounds than a mark lasts.
const ROUNDS: u32 = 5;

#[test]
fn silent_flows_are_found_in_each_round() -> Result<()> {
    for mut fixture in fixtures("ends")? {
        run_section(&mut fixture, "ends::flows_open")?;
        for _ in 0..ROUNDS {
            fixture.bench.datapath.flows.sweep()?;
        }
        run_section(&mut fixture, "ends::flows_go_on")?;
    }
    Ok(())
}

/// Opens flows, and copies their entries to ends without marks, so that no packet finds the copies.
fn make_unmarked(fixture: &mut Fixture) -> Result<()> {
    run_section(fixture, "ends::flows_open")?;
    if fixture.is_v4() {
        copy::<Addr4>(fixture, IPV4.flows)
    } else {
        copy::<Addr6>(fixture, IPV6.flows)
    }?;
    run_section(fixture, "ends::unmarked_flow_is_not_found")
}

#[test]
fn packet_asks_for_no_flow_before_its_ends_are_marked() -> Result<()> {
    for mut fixture in fixtures("ends")? {
        make_unmarked(&mut fixture)?;
        fixture.bench.datapath.flows.sweep()?;
        run_section(&mut fixture, "ends::marked_flow_is_found")?;
    }
    Ok(())
}

/// An older agent without marks may follow. Its programs open flows without marking them.
#[test]
fn programs_without_agent_find_unmarked_flows() -> Result<()> {
    for mut fixture in fixtures("ends")? {
        make_unmarked(&mut fixture)?;
        fixture.bench.retire();
        fixture.bench.datapath.flows.leave()?;
        run_section(&mut fixture, "ends::marked_flow_is_found")?;
    }
    Ok(())
}

/// A start replaces programs device by device. In between, the programs of one load open a flow
/// whose packets the programs of the other load see.
#[test]
fn programs_of_two_loads_find_the_same_ends() -> Result<()> {
    let netns = NetNs::create(format!("kpx-{}-ends-loads", std::process::id()))?;
    let dir = netns.bpf_dir();
    let start = || {
        let persistence = Persistence::new(Pins::open(&dir, BpfFs::Host)?, Changes::new(&dir));
        let options = Options {
            sizes: Sizes {
                flows: Some(32_768),
                ..Sizes::default()
            },
            ..Options::default()
        };
        Datapath::take_over(object::embedded()?, options, persistence)
    };
    netns.run(|| {
        let first = start()?;
        let ways: Array<MapData, Row> = open(&first.loaded.maps, WAYS)?;
        let unmarked = || -> Result<usize> {
            let oldest = ways.get(&ROUND, 0)?.second;
            let cells = (ROUND + 1..ROWS)
                .map(|row| Ok(ways.get(&row, 0)?.first))
                .collect::<Result<Vec<_>>>()?;
            Ok(cells
                .into_iter()
                .filter(|mark| !counts(*mark, oldest))
                .count())
        };
        for _ in 0..ROUNDS {
            first.flows.sweep()?;
        }
        ensure!(unmarked()? == (ROUND + 1..ROWS).len(), "no flow is open");
        drop(first);
        let second = start()?;
        ensure!(
            unmarked()? == 0,
            "to the programs of the first load {} ends have no flow",
            unmarked()?
        );
        second.flows.sweep()?;
        ensure!(unmarked()? == 0, "one round decides nothing");
        second.flows.sweep()?;
        ensure!(unmarked()? > 0, "two rounds decide");
        drop(second);
        remove(&dir, &mut |_| ())
    })
}

/// Copies the flow of the client's port 1000 to port 4444, past the programs, which mark the ends
/// of flows.
fn copy<A: Addr>(fixture: &Fixture, name: &str) -> Result<()> {
    let mut flows: HashMap<MapData, FlowKey<A>, Flow<A>> = fixture.bench.map(name)?;
    let entries = flows.iter().collect::<Result<Vec<_>, _>>()?;
    let is_opener = |key: &FlowKey<A>, flow: &Flow<A>| {
        (key.hook(), key.proto(), flow.kind) == (Hook::INGRESS, Proto::TCP, Kind::DNAT)
            && !flow.is_snat()
    };
    let opener = entries.iter().find(|(key, flow)| is_opener(key, flow));
    let (_, mut flow) = *opener.context("no flow of the client")?;
    ensure!(flow.client.port == Port::new(1000), "{flow:?}");
    flow.client = SockAddr::new(flow.client.addr, Port::new(4444));
    flow.source = flow.client;
    for kind in [Kind::UNDNAT, Kind::DNAT] {
        flow.kind = kind;
        flows.insert(flow.key(Proto::TCP), flow, 0)?;
    }
    Ok(())
}
