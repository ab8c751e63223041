//! kpx counts connections of translated sockets by outcome.

use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use proxy_common::counter::Event;
use proxy_common::names::SOCK_OPS;
use proxy_datapath::{object, verifier};
use testbed::agent::{DEADLINE, Service, kpx, wait_until};
use testbed::echo::{Dial, Protocol};
use testbed::lab::Family;

use crate::churn::links::{attach_alone, detach_alone};
use crate::latency::{connect, views};
use crate::socket::fixture::{Fixture, NODE, NODE_PORT, PORT, count, web};

const TCP: Protocol = Protocol::Tcp;
/// No server listens here.
const CLOSED: u16 = 8081;
/// A client's time-out that includes a second SYN, and one that includes none.
const PATIENT: Duration = Duration::from_millis(1_600);
const HASTY: Duration = Duration::from_millis(200);
/// A client's time-out that exceeds the kernel's.
const TIRELESS: Duration = Duration::from_secs(30);
/// The first SYN of IPv4 to the closed port is lost.
const FIRST_LOST: &str = "table inet lost {
    chain input { type filter hook input priority 0; tcp dport 8081 tcp flags & (syn | ack) == syn quota until 90 bytes drop; }
}";
/// The backend's host drops SYNs to this port.
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
    // A process may forge both in a network namespace of its own.
    ensure!(count(&agent, "events", Event::BackendFailed.name())? == 0);
    let all = views(&agent)?;
    let silent = connect(&all, "mute")?;
    ensure!(silent.retransmitted >= 2, "{silent:?}");
    let prompt = connect(&all, "web")?;
    ensure!(
        prompt.connect_p99.is_some_and(|secs| secs < 0.5),
        "the time of a handshake: {prompt:?}"
    );

    // The kernel gives up after one more SYN, at three seconds.
    let node = &fixture.lab.host(NODE).ns;
    node.sysctl("ipv4/tcp_syn_retries", "1")?;
    fails(mute.frontend(Family::V4), TIRELESS)?;
    wait_until(DEADLINE, "the kernel's time-out is counted", || {
        Ok(counts()?[2] == (0, 0, 3))
    })?;
    // A RST to the second SYN is a refusal as well.
    let late = &fixture.lab.host("p1a").ns;
    late.nft(FIRST_LOST)?;
    fails(closed.frontend(Family::V4), TIRELESS)?;
    late.nft("delete table inet lost")?;
    wait_until(DEADLINE, "the late refusal is counted", || {
        Ok(counts()?[1] == (0, 3, 0))
    })?;

    // Without an agent, the programs go on counting.
    drop(agent);
    fails(closed.frontend(Family::V4), PATIENT)?;
    let agent = fixture.agent("host", &[])?;
    let refused = || Ok(connect(&views(&agent)?, "closed")?.refused == 4);
    wait_until(DEADLINE, "the last refusal is counted", refused)
}

#[test]
fn sockets_are_served_beside_an_exclusive_sock_ops_program() -> Result<()> {
    let fixture = Fixture::start()?;
    let cgroup = File::open(fixture.cgroup.path())?;
    let mut ebpf = verifier::loader().load(object::embedded()?)?;
    let program = ebpf.program_mut(SOCK_OPS).context("the program")?;
    verifier::load_any(program)?;
    let alone = program.fd()?.as_fd();
    attach_alone(cgroup.as_fd(), alone)?;

    let agent = fixture.agent("host", &["--iptables-sync-period", "1s"])?;
    let uncounted = || -> Result<_> {
        let sockets = agent
            .typed_status()?
            .sockets
            .context("sockets are served")?;
        Ok(sockets.uncounted)
    };
    fixture.reaches(NODE, TCP, web().frontend(Family::V4), true)?;
    let why = uncounted()?.context("connections are not counted")?;
    ensure!(why.contains("attach kpx_sock_ops"), "{why}");
    let shown = kpx(
        agent.ns(),
        &format!("status --run-dir {}", agent.run_dir().display()),
    )?;
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    ensure!(
        shown.contains("their connections are not counted"),
        "{shown}"
    );

    detach_alone(cgroup.as_fd(), alone)?;
    wait_until(DEADLINE, "connections are counted", || {
        Ok(uncounted()?.is_none())
    })?;
    fixture.reaches(NODE, TCP, web().frontend(Family::V4), true)?;
    wait_until(DEADLINE, "one is counted", || {
        Ok(connect(&views(&agent)?, "web")?.connects == 1)
    })
}
