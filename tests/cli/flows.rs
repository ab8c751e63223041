//! `kpx flows` on a node with many flows.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context, Result};
use aya::maps::{HashMap, Map, MapData};
use nix::time::{ClockId, clock_gettime};
use proxy_common::addr::{Addr4, Port, Proto, SockAddr};
use proxy_common::flow::{Flow, FlowKey, Seen};
use proxy_common::names::IPV4;
use proxy_view::status::Status;

use crate::node::Node;

/// More than the agent reads from the map at once.
const FLOWS: u32 = 20_000;

fn at(addr: u32, port: u16) -> SockAddr<Addr4> {
    SockAddr::new(Ipv4Addr::from(addr).into(), Port::new(port))
}

/// Adds established flows, each from its own client, to web and kube-dns in turn.
fn fill(status: &Status) -> Result<()> {
    let map = Map::from_map_data(MapData::from_id(status.maps[IPV4.flows])?)?;
    let mut flows: HashMap<_, FlowKey<Addr4>, Flow<Addr4>> = map.try_into()?;
    let now_secs = u32::try_from(clock_gettime(ClockId::CLOCK_BOOTTIME)?.tv_sec())?;
    let backend = at(Ipv4Addr::new(10, 244, 2, 9).into(), 53);
    for n in 0..FLOWS {
        let client = at(u32::from(Ipv4Addr::new(10, 244, 8, 0)) + n, 40_000);
        let frontend = if n % 2 == 0 {
            (Ipv4Addr::new(10, 96, 0, 10), 80)
        } else {
            (Ipv4Addr::new(10, 96, 0, 53), 53)
        };
        let frontend = at(frontend.0.into(), frontend.1);
        let mut flow = Flow::new(client, frontend, backend, client, 0, now_secs);
        (flow.tx, flow.rx) = (Seen::PACKET.with(Seen::ASSURED), Seen::PACKET);
        flows.insert(flow.opener_key(Proto::TCP), flow, 0)?;
    }
    Ok(())
}

#[test]
fn many_flows_are_listed_and_few_of_many_found() -> Result<()> {
    let node = Node::start("flows", "")?;
    fill(&serde_json::from_str(&node.text("status -o json")?)?)?;
    let lines = |arguments: &str| -> Result<Vec<String>> {
        let started = std::time::Instant::now();
        let text = node.text(&format!("flows --no-headers {arguments}"))?;
        println!("kpx flows {arguments}: {:?}", started.elapsed());
        Ok(text.lines().map(str::to_owned).collect())
    };
    assert_eq!(lines("--limit 0")?.len(), FLOWS as usize);
    assert_eq!(lines("")?.len(), 1_000, "unless more are asked for");
    assert_eq!(lines("--limit 10")?.len(), 10);
    assert_eq!(
        lines("--limit 0 --service shop/web")?.len(),
        FLOWS as usize / 2
    );
    assert_eq!(
        lines("--limit 0 --service web -n shop --state established,new")?.len(),
        FLOWS as usize / 2
    );
    assert_eq!(lines("-n shop --state closed")?.len(), 0);
    let client = "10.244.9.1";
    let found = lines(&format!("--client {client}"))?;
    assert_eq!(found.len(), 1);
    let words: Vec<_> = found[0].split_whitespace().collect();
    let expected = [
        "TCP",
        "10.244.9.1:40000",
        "10.96.0.53:53",
        "kube-system/kube-dns:dns-tcp",
        "10.244.2.9:53",
        "established",
    ];
    assert_eq!(words[..6], expected);
    assert_eq!(
        words[1]
            .parse::<SocketAddr>()
            .context("a client")?
            .ip()
            .to_string(),
        client
    );
    assert_eq!(lines("--backend 10.244.2.10")?.len(), 0);
    // Each of these flags would end too many flows, or none.
    for flags in [
        "--end",
        "--all",
        "--end --all -n shop",
        "--end -A",
        "--end --all --limit 1",
        "--end --all --watch",
    ] {
        let output = node.kpx(&format!("flows {flags}"))?;
        assert_eq!(output.status.code(), Some(2), "{flags}: {output:?}");
    }
    assert_eq!(
        lines(&format!("--end --client {client}"))?,
        ["1 flows ended"]
    );
    assert_eq!(lines("--end --client 10.244.9.1")?, ["0 flows ended"]);
    assert_eq!(
        lines("--end -n shop --state established")?,
        [format!("{} flows ended", FLOWS / 2)]
    );
    assert_eq!(
        lines("--end -n shop&all --state established")?,
        ["0 flows ended"]
    );
    assert_eq!(lines("--limit 0")?.len(), FLOWS as usize / 2 - 1);
    assert_eq!(
        lines("--end --all")?,
        [format!("{} flows ended", FLOWS / 2 - 1)]
    );
    Ok(())
}
