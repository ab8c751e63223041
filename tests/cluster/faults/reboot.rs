//! A node reboots: its network is as before, and kpx's state is gone.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, Service, wait_until};
use testbed::apiserver::History;
use testbed::echo::{Connection, Dial, Fault, Protocol};
use testbed::lab::{Family, Lab};
use testbed::watched_lab::WatchedLab;

use crate::faults::fixture::PORT;

const NODE_PORT: u16 = 30_080;
/// Each client, and true if it dials the node port.
const CLIENTS: [(&str, bool); 3] = [("p1a", false), ("n1", false), ("x", true)];
/// The timeout of an answer that may never come.
const SOON: Duration = Duration::from_millis(400);

/// The API server answers after a delay, as when it starts along with kpx.
#[test]
fn node_serves_again_after_its_start_from_nothing() -> Result<()> {
    let fixture = WatchedLab::start(PORT)?;
    let lab = &fixture.lab;
    let web = Service::new("web", 10, &["p2a"], PORT).node_port(NODE_PORT);
    fixture.put_service(&web)?;
    let kpx = Agent::start(lab, &lab.n1, fixture.source())?;
    let mut outside = open(lab, &web, "x")?;
    let mut pods = open(lab, &web, "p1a")?;

    fixture.api_mut().stop()?;
    lose_all(lab, kpx)?;
    // The node's stack lacks such a connection, and resets it at once.
    ensure!(
        matches!(outside.exchange(b"?"), Err(Fault::Io(..) | Fault::Refused)),
        "a connection of before is not refused"
    );
    is_unserved(lab, &web).context("without kpx")?;
    let kpx = Agent::launch_by(None, lab, &lab.n1.host, fixture.source(), &[""; 0])?.answering()?;
    kpx.wait(DEADLINE, "the API server is missed", |status| {
        !status.problems.is_empty()
    })?;
    is_unserved(lab, &web).context("before anything is listed")?;

    fixture.api_mut().start_again(History::Kept)?;
    wait_until(DEADLINE, "all clients are served", || {
        let served = each(lab, &web)
            .into_iter()
            .all(|(.., answer)| answer.is_ok_and(|backend| backend == "p2a"));
        Ok(served)
    })
    .with_context(|| kpx.log())?;
    kpx.wait(DEADLINE, "nothing is wrong", |status| {
        status.healthy && status.problems.is_empty()
    })?;
    // A pod ends with its node. The connection of a pod that lived on would belong to no flow.
    ensure!(
        pods.exchange(b"?").is_err(),
        "a connection of before goes on"
    );
    kpx.stop()
}

/// Removes what a reboot removes: processes, pins and their programs, devices, routes, rules, files
/// below /run.
fn lose_all(lab: &Lab, kpx: Agent<'_>) -> Result<()> {
    let node = &lab.n1.host.ns;
    let run_dir = kpx.run_dir().to_owned();
    kpx.crash()?;
    proxy_datapath::remove(&node.bpf_dir(), &mut |_| {})?;
    node.ip("link del kpx0")?;
    for family in ["-4", "-6"] {
        let ip = |words: &str| node.exec(Command::new("ip").arg(family).args(words.split(' ')));
        ip("rule flush")?;
        ip("rule add lookup main pref 32766")?;
        ip("route flush table all proto 75")?;
    }
    fs::remove_dir_all(&run_dir).with_context(|| format!("remove {}", run_dir.display()))
}

/// Checks that no client is served, and that the outside client is refused.
fn is_unserved(lab: &Lab, web: &Service) -> Result<()> {
    for (client, family, answer) in each(lab, web) {
        let expected = match answer {
            Err(Fault::Refused) => true,
            Err(Fault::TimedOut(_) | Fault::Io(..)) => client != "x",
            _ => false,
        };
        ensure!(expected, "{client} by {family}: {answer:?}");
    }
    Ok(())
}

/// Dials from each client, by both families.
fn each(lab: &Lab, web: &Service) -> Vec<(&'static str, Family, Result<String, Fault>)> {
    let clients = CLIENTS
        .into_iter()
        .flat_map(|client| Family::ALL.map(|family| (client, family)));
    let ask = |((client, by_node_port), family)| {
        let answer = dial(lab, web, by_node_port, family)
            .deadline(SOON)
            .exchange(&lab.host(client).ns, b"hello");
        (client, family, answer.map(|answer| answer.backend))
    };
    clients.map(ask).collect()
}

fn dial(lab: &Lab, web: &Service, by_node_port: bool, family: Family) -> Dial {
    let to = match by_node_port {
        true => (lab.n1.host.addrs.ip(family), NODE_PORT).into(),
        false => web.frontend(family),
    };
    Dial::new(Protocol::Tcp, to)
}

fn open(lab: &Lab, web: &Service, client: &str) -> Result<Connection> {
    let by_node_port = client == "x";
    let connection = dial(lab, web, by_node_port, Family::V4)
        .deadline(DEADLINE / 10)
        .connect(&lab.host(client).ns);
    let mut connection = connection.with_context(|| client.to_owned())?;
    connection
        .exchange(b"hello")
        .with_context(|| client.to_owned())?;
    Ok(connection)
}
