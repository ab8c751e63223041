//! `kpx flows --end`: the operator ends flows, on the stack and past it.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::agent::{self, Agent, DEADLINE, Service, wait_until};
use testbed::cases::Running;
use testbed::echo::{Connection, Dial, Protocol};
use testbed::lab::Family;

use super::fixture::{Fixture, Path, said};
use super::opened::{Shape, load, unload, until_open_ones_skip};
use super::{exchange, says, until_bypass};

/// The timeout of one exchange.
const SOON: Duration = Duration::from_millis(500);

fn dial(fixture: &Fixture, client: &str, protocol: Protocol, family: Family) -> Result<Connection> {
    let to = Service::new("", 10, &[], fixture.port()).frontend(family);
    said(
        Dial::new(protocol, to)
            .deadline(SOON)
            .connect(&fixture.lab.host(client).ns),
    )
}

/// Runs `kpx flows` with these flags. Returns its output.
fn flows(agent: &Agent, flags: &str) -> Result<String> {
    let output = agent::kpx(
        agent.ns(),
        &format!("flows {flags} --run-dir {}", agent.run_dir().display()),
    )?;
    ensure!(output.status.success(), "kpx flows {flags}: {output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

fn count(agent: &Agent, flags: &str) -> Result<usize> {
    Ok(flows(agent, &format!("--no-headers {flags}"))?
        .lines()
        .count())
}

/// Returns the number of packets to the Service so far.
fn sent(agent: &Agent) -> Result<u64> {
    let output = agent::kpx(
        agent.ns(),
        &format!("services -o json --run-dir {}", agent.run_dir().display()),
    )?;
    let services: Value = serde_json::from_slice(&output.stdout)?;
    let local = services
        .as_array()
        .into_iter()
        .flatten()
        .find(|service| service["name"] == "local");
    local
        .and_then(|service| service["ports"][0]["counts"]["packets"].as_u64())
        .context("no count of packets")
}

/// Ends the connection of one of two pods. It stays ended, and its client dials again.
fn one_of_two_is_ended(
    fixture: &Fixture,
    agent: &Agent,
    until: impl Fn(&mut [Connection]) -> Result<()>,
) -> Result<()> {
    for family in Family::ALL {
        let client = fixture.lab.host("p1a").addrs.ip(family);
        let mut open = ["p1a", "p1c"]
            .into_iter()
            .map(|client| dial(fixture, client, Protocol::Tcp, family))
            .collect::<Result<Vec<_>>>()?;
        until(&mut open)?;
        let mut datagrams = dial(fixture, "p1a", Protocol::Udp, family)?;
        exchange(&mut datagrams, 3, 100)?;
        let before = sent(agent)?;
        let selected = format!("--client {client} --state established");
        let there = count(agent, &selected)?;
        ensure!(there >= 1, "{family}: no flow of the client");
        let reported = flows(agent, &format!("{selected} --end"))?;
        ensure!(
            reported == format!("{there} flows ended\n"),
            "{family}: {reported}"
        );
        ensure!(
            count(agent, &selected)? == 0,
            "{family}: flows are there yet"
        );
        ensure!(
            exchange(&mut open[0], 1, 100).is_err(),
            "{family}: the connection goes on"
        );
        exchange(&mut open[1], 5, 1_000)
            .with_context(|| format!("{family}: the other pod's connection"))?;
        exchange(&mut datagrams, 1, 100)
            .with_context(|| format!("{family}: the next datagram opens a flow"))?;
        exchange(&mut dial(fixture, "p1a", Protocol::Tcp, family)?, 5, 1_000)?;
        wait_until(
            DEADLINE,
            "the packets of ended flows and of new ones count",
            || Ok(sent(agent)? > before),
        )?;
        ensure!(
            exchange(&mut open[0], 1, 100).is_err(),
            "{family}: the connection has come back"
        );
    }
    Ok(())
}

pub(super) fn operator_ends_one_of_two_bypass_connections(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    for family in Family::ALL {
        until_bypass(fixture, agent, family)?;
    }
    one_of_two_is_ended(fixture, agent, |open| {
        // The exchanges make the link addresses known.
        open.iter_mut().try_for_each(|one| exchange(one, 5, 1_000))
    })
}

pub(super) fn operator_ends_one_of_two_connections_that_conntrack_tolerates(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    load(running, Shape::Calico)?;
    says(agent, "open connections between this node's pods")?;
    one_of_two_is_ended(fixture, agent, |open| {
        until_open_ones_skip(fixture, agent, open)
    })?;
    unload(running)
}

/// The connections are those of a pod, of the host and of outside clients, and all of a Service.
#[test]
fn operator_ends_connections_on_the_stack() -> Result<()> {
    let fixture = Fixture::new()?;
    let agent = fixture.start("off")?;
    one_of_two_is_ended(&fixture, &agent, |open| {
        open.iter_mut().try_for_each(|one| exchange(one, 5, 1_000))
    })?;
    let to = |nth| Service::new("", nth, &[], fixture.port()).frontend(Family::V4);
    let node_port = SocketAddr::new(fixture.lab.n1.host.addrs.ip(Family::V4), 30_082);
    let dial = |client: &str, to| {
        said(
            Dial::new(Protocol::Tcp, to)
                .deadline(SOON)
                .connect(&fixture.lab.host(client).ns),
        )
    };
    let mut ended = vec![dial("p1a", to(11))?, dial("x", node_port)?];
    let mut kept = vec![
        dial("p1a", to(10))?,
        fixture.dial(Path::NodePortLocal, Protocol::Tcp, Family::V4)?,
    ];
    for one in ended.iter_mut().chain(&mut kept) {
        exchange(one, 5, 100)?;
    }
    let there = count(&agent, "--service remote --state established")?;
    ensure!(there == 2, "{there} flows of the Service");
    let reported = flows(&agent, "--service remote --state established --end -o json")?;
    ensure!(
        serde_json::from_str::<Value>(&reported)?["ended"] == 2,
        "{reported}"
    );
    for one in &mut ended {
        ensure!(exchange(one, 1, 100).is_err(), "the connection goes on");
    }
    kept.iter_mut().try_for_each(|one| exchange(one, 5, 100))?;
    flows(&agent, "--end --all")?;
    for one in &mut kept {
        ensure!(exchange(one, 1, 100).is_err(), "the connection goes on");
    }
    wait_until(
        DEADLINE,
        "no flow is left but those of ended connections",
        || Ok(count(&agent, "--state established")? == 0),
    )?;
    agent.stop()
}
