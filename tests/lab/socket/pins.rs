//! Socket programs outlive the agent.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use testbed::agent::{DEADLINE, binary, wait_until};
use testbed::echo::Protocol;
use testbed::lab::Family;

use crate::socket::fixture::{Fixture, NODE, web};

const STREAMS: [&str; 5] = ["connect4", "connect6", "getpeer4", "getpeer6", "sock_ops"];
const ALL: [&str; 9] = [
    "connect4", "connect6", "getpeer4", "getpeer6", "recvmsg4", "recvmsg6", "sendmsg4", "sendmsg6",
    "sock_ops",
];

#[test]
fn sockets_are_served_without_an_agent_and_by_the_next_until_reconfigured() -> Result<()> {
    let fixture = Fixture::start()?;
    let dial = |want| fixture.reaches(NODE, Protocol::Tcp, web().frontend(Family::V4), want);
    let agent = fixture.agent("host", &["--socket-lb-udp"])?;
    ensure!(fixture.pins()? == ALL, "{:?}", fixture.pins()?);
    let mut open = dial(true)?;
    drop(agent); // By SIGKILL.
    dial(true).context("no agent runs")?;

    let agent = fixture.agent("host", &[])?;
    ensure!(fixture.pins()? == STREAMS, "{:?}", fixture.pins()?);
    dial(true).context("the next runs")?;
    open.connection.exchange(b"still there?")?;
    let [_, peer] = open.connection.ends()?;
    ensure!(
        peer == web().frontend(Family::V4),
        "of an earlier agent's: {peer}"
    );
    drop(agent);

    let agent = fixture.kpx(&["--socket-lb", "off"])?;
    ensure!(fixture.pins()?.is_empty(), "{:?}", fixture.pins()?);
    dial(false).context("the next leaves sockets to packets")?;
    open.connection.exchange(b"still there?")?;
    drop(agent);

    let agent = fixture.agent("host", &[])?;
    dial(true)?;
    let run_dir = agent.run_dir().to_owned();
    drop(agent);
    let node = &fixture.lab.host(NODE).ns;
    let mut cleanup = Command::new(binary()?);
    cleanup
        .arg("cleanup")
        .arg("--run-dir")
        .arg(&run_dir)
        .arg("--bpf-dir")
        .arg(node.bpf_dir());
    let mut said = String::new();
    wait_until(DEADLINE, "the dead agent's lock is gone", || {
        said = node.exec(&mut cleanup).unwrap_or_default();
        Ok(!said.is_empty())
    })?;
    ensure!(said.contains("the link socket-connect4"), "{said}");
    open.connection.exchange(b"still there?")?;
    fixture.agent("host", &["--cleanup-on-exit"])?.stop()?;
    ensure!(!node.bpf_dir().exists());
    Ok(())
}

#[test]
fn socket_programs_come_back_after_a_detach() -> Result<()> {
    let fixture = Fixture::start()?;
    let _agent = fixture.agent(
        "host",
        &[
            "--iptables-sync-period",
            "1s",
            "--iptables-min-sync-period",
            "0s",
        ],
    )?;
    let pin = fixture
        .lab
        .host(NODE)
        .ns
        .bpf_dir()
        .join("v2/links/socket-connect4");
    std::fs::remove_file(&pin)?;
    wait_until(DEADLINE, "it is pinned again", || Ok(pin.exists()))?;
    fixture.reaches(NODE, Protocol::Tcp, web().frontend(Family::V4), true)?;
    Ok(())
}

impl Fixture {
    /// Returns the pins of links to cgroups, by the calls that they hook.
    pub(crate) fn pins(&self) -> Result<Vec<String>> {
        let dir = self.lab.host(NODE).ns.bpf_dir().join("v2/links");
        let names = std::fs::read_dir(&dir)?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let names = names.collect::<Result<Vec<_>>>()?;
        let mut calls: Vec<_> = names
            .iter()
            .filter_map(|name| Some(name.strip_prefix("socket-")?.to_owned()))
            .collect();
        calls.sort();
        Ok(calls)
    }
}
