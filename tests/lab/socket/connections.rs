//! Connections of translated sockets count as those of flows.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use testbed::agent::{DEADLINE, Service, wait_until};
use testbed::echo::{Dial, Protocol};
use testbed::lab::Family;

use crate::latency::{connect, views};
use crate::socket::fixture::{Fixture, NODE, NODE_PORT, PORT, count, web};

const TCP: Protocol = Protocol::Tcp;
/// No server listens here.
const CLOSED: u16 = 8081;
/// A client's time-out that includes a second SYN, and one that includes none.
const PATIENT: Duration = Duration::from_millis(1_600);
const HASTY: Duration = Duration::from_millis(200);
/// The backend's first packet of this port never comes.
const MUTE: &str = "table inet mute {
    chain input { type filter hook input priority 0; tcp dport 8080 drop; }
}";

#[test]
fn connections_of_sockets_are_counted_by_outcome() -> Result<()> {
    let fixture = Fixture::start()?;
    let closed = Service::new("closed", 11, &["p1a"], CLOSED);
    let mute = Service::new("mute", 12, &["p2b"], PORT);
    fixture.put(&closed)?;
    fixture.put(&mute)?;
    fixture.lab.host("p2b").ns.nft(MUTE)?;
    let agent = fixture.agent("host", &[])?;
    let fails = |to: SocketAddr, limit| -> Result<()> {
        let failed = Dial::new(TCP, to)
            .deadline(limit)
            .connect(&fixture.lab.host(NODE).ns);
        ensure!(failed.is_err(), "{to} answers");
        Ok(())
    };
    for family in Family::ALL {
        fixture.reaches(NODE, TCP, web().frontend(family), true)?;
        fixture.reaches(NODE, TCP, fixture.node_at(family, NODE_PORT), true)?;
        fails(closed.frontend(family), PATIENT)?;
        fails(mute.frontend(family), PATIENT)?;
        fails(mute.frontend(family), HASTY)?;
    }
    let SocketAddr::V4(v4) = web().frontend(Family::V4) else {
        unreachable!("of this family")
    };
    let mapped = (v4.ip().to_ipv6_mapped(), v4.port()).into();
    fixture.reaches(NODE, TCP, mapped, true)?;

    let counts = || -> Result<_> {
        let views = views(&agent)?;
        let counts = |name| {
            let found = connect(&views, name)?;
            anyhow::Ok((found.connects, found.refused, found.unanswered))
        };
        Ok([counts("web")?, counts("closed")?, counts("mute")?])
    };
    let want = [(5, 0, 0), (0, 2, 0), (0, 0, 2)];
    wait_until(DEADLINE, "all are counted", || Ok(counts()? == want))
        .inspect_err(|_| eprintln!("{:?}", counts()))?;
    // Each refusal and each SYN that is repeated after a second speaks against the backend.
    ensure!(count(&agent, "events", "backend_failed")? == 4);
    let all = views(&agent)?;
    let mute = connect(&all, "mute")?;
    ensure!(mute.retransmitted >= 2, "{mute:?}");
    let web = connect(&all, "web")?;
    ensure!(
        web.connect_p99.is_some_and(|secs| secs < 0.5),
        "the time of a handshake: {web:?}"
    );

    // Without an agent, the programs go on counting.
    drop(agent);
    fails(closed.frontend(Family::V4), PATIENT)?;
    let agent = fixture.agent("host", &[])?;
    let refused = || Ok(connect(&views(&agent)?, "closed")?.refused == 3);
    wait_until(DEADLINE, "the third refusal is counted", refused)
}
