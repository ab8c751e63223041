//! The sweep counts the open flows of each backend.

use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};
use aya::maps::{HashMap, Map, MapData};
use proxy_common::addr::{Addr4, Port, Proto, SockAddr};
use proxy_common::flow::{Flow, FlowKey, Kind, Seen};
use proxy_common::frontend::FrontendKey;
use proxy_datapath::Options;
use testbed::test_run::Bench;

#[test]
fn counts_of_backends_become_what_the_flow_table_shows() -> Result<()> {
    let bench = Bench::load(Options::default())?;
    let mut flows: HashMap<MapData, FlowKey<Addr4>, Flow<Addr4>> = map(&bench, "FLOWS4")?;
    let mut connections: HashMap<MapData, FrontendKey<Addr4>, u32> = map(&bench, "CONNECTIONS4")?;
    let now_secs =
        u32::try_from(nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME)?.tv_sec())?;
    let fin = Seen::PACKET.with(Seen::FIN);
    for (client, backend, flags, tx, rx, last_secs) in [
        (
            1,
            1,
            Flow::<Addr4>::COUNTED,
            Seen::PACKET,
            Seen::PACKET,
            now_secs,
        ),
        (
            2,
            1,
            Flow::<Addr4>::COUNTED,
            Seen::PACKET,
            Seen::NOTHING,
            now_secs,
        ),
        (3, 1, Flow::<Addr4>::COUNTED, fin, Seen::PACKET, now_secs),
        // The sweep excludes uncounted flows, ended flows, and flows that it removes.
        (4, 1, 0, Seen::PACKET, Seen::PACKET, now_secs),
        (5, 1, Flow::<Addr4>::COUNTED, fin, fin, now_secs),
        (
            6,
            1,
            Flow::<Addr4>::COUNTED,
            Seen::PACKET,
            Seen::RST,
            now_secs,
        ),
        (
            7,
            1,
            Flow::<Addr4>::COUNTED,
            Seen::PACKET,
            Seen::NOTHING,
            now_secs.saturating_sub(31),
        ),
        (
            1,
            2,
            Flow::<Addr4>::COUNTED,
            Seen::PACKET,
            Seen::PACKET,
            now_secs,
        ),
        (1, 3, Flow::<Addr4>::COUNTED, fin, fin, now_secs),
    ] {
        let at =
            |last, port| SockAddr::new(Addr4::from(Ipv4Addr::new(10, 0, 0, last)), Port::new(port));
        let client = at(100 + client, 1000 + u16::from(backend));
        let mut flow = Flow::new(
            client,
            at(50, 80),
            at(backend, 8080),
            client,
            flags,
            last_secs,
        );
        (flow.tx, flow.rx) = (tx, rx);
        flows.insert(flow.key(Proto::TCP), flow, 0)?;
        flow.kind = Kind::UNDNAT;
        flows.insert(flow.key(Proto::TCP), flow, 0)?;
    }
    let key = |last, proto| {
        FrontendKey::<Addr4>::new(Ipv4Addr::new(10, 0, 0, last).into(), Port::new(8080), proto)
    };
    for (backend, count) in [
        (key(1, Proto::TCP), 9),
        (key(3, Proto::TCP), 1),
        (key(1, Proto::UDP), 4),
    ] {
        connections.insert(backend, count, 0)?;
    }

    let swept = bench.datapath.flows.sweep()?;
    ensure!(
        swept["IPv4"].flows == 8 && swept["IPv4"].expired == 1,
        "{swept:?}"
    );
    let mut counts: Vec<(FrontendKey<Addr4>, u32)> =
        connections.iter().collect::<Result<_, _>>()?;
    counts.sort();
    ensure!(
        counts == [(key(1, Proto::TCP), 3), (key(2, Proto::TCP), 1)],
        "{counts:?}"
    );
    Ok(())
}

fn map<M: TryFrom<Map, Error = aya::maps::MapError>>(bench: &Bench, name: &str) -> Result<M> {
    let id = *bench
        .datapath
        .loaded
        .maps
        .get(name)
        .with_context(|| format!("no map {name}"))?;
    Ok(Map::from_map_data(MapData::from_id(id)?)?.try_into()?)
}
