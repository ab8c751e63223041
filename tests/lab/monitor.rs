//! `kpx monitor` with real traffic: opened flows and refused packets while a client watches.

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, Map, MapData};
use proxy_common::monitor::WATCHED_PER_SECOND;
use proxy_common::names::WATCHED;
use serde_json::{Value, json};
use testbed::agent::{Agent, DEADLINE, Service, binary, wait_until};
use testbed::echo::{Dial, Protocol};
use testbed::lab::{Family, Layout};
use testbed::served_lab::ServedLab;

const PORT: u16 = 8080;
/// The timeout of an answer or refusal.
const ANSWER: Duration = Duration::from_millis(500);

#[test]
fn monitors_see_what_they_ask_for_and_slow_ones_delay_none() -> Result<()> {
    let base = ServedLab::with_manifests(Layout::Routed)?.serve(&["p1b"], PORT)?;
    let lab = &base.lab;
    let web = Service::new("web", 10, &["p1b"], PORT);
    let none = Service::new("none", 11, &[], PORT);
    [&web, &none]
        .into_iter()
        .try_for_each(|service| base.put(service))?;
    let agent = base.kpx(&[])?;
    let client = lab.host("p1a");
    let dial = |service: &Service| {
        let _refused_or_answered = Dial::new(Protocol::Tcp, service.frontend(Family::V4))
            .deadline(ANSWER)
            .exchange(&client.ns, &[1]);
    };
    dial(&web);
    ensure!(watched(&agent)? == 0, "no monitor runs");

    let decisions = Watcher::start(&agent, &["--service", "web", "--decisions", "--count", "2"])?;
    for event in decisions.events(|| [&none, &web].map(dial))? {
        let dialled = event["dialled"].as_str();
        let address = event["client"].as_str();
        ensure!(
            event["what"] == "decision" && event["decision"]["name"] == "web",
            "{event}"
        );
        ensure!(
            dialled == Some(&web.frontend(Family::V4).to_string()),
            "{event}"
        );
        let address: SocketAddr = address.context("a client")?.parse()?;
        ensure!(address.ip() == client.addrs.ip(Family::V4), "{event}");
        let backend = SocketAddr::new(lab.host("p1b").addrs.ip(Family::V4), PORT);
        ensure!(
            event["decision"]["backend"] == json!(backend) && event["decision"]["origin"] == "pod",
            "{event}"
        );
    }
    let address = client.addrs.ip(Family::V4).to_string();
    let drops = Watcher::start(
        &agent,
        &[
            "--reason",
            "no_endpoints",
            "--client",
            &address,
            "--count",
            "3",
        ],
    )?;
    for event in drops.events(|| [&none, &web].map(dial))? {
        ensure!(
            event["what"] == "reject" && event["decision"]["name"] == "none",
            "{event}"
        );
    }
    wait_until(DEADLINE, "the programs report no more", || {
        Ok(watched(&agent)? == 0)
    })?;

    // The next agent shows its history to watchers.
    agent.stop()?;
    let agent = base.kpx(&["--monitor-history=3"])?;
    ensure!(
        watched(&agent)? == WATCHED_PER_SECOND,
        "the programs report, for the history"
    );
    let past = |arguments: &[&str]| {
        Watcher::start(
            &agent,
            &[&["--since", "5m", "--no-follow"], arguments].concat(),
        )?
        .events(|| ())
    };
    // The agent reads the CPUs' buffers in turn, so events have a certain order only with a pause
    // between them.
    (0..4).for_each(|_| dial(&none));
    wait_until(DEADLINE, "refusals are kept", || {
        Ok(past(&["--unserved"])?.len() == 3)
    })?;
    dial(&web);
    wait_until(DEADLINE, "all is kept", || {
        Ok(past(&["--decisions"])?.len() == 1 && past(&["--unserved"])?.len() == 3)
    })?;
    let all = past(&[])?;
    ensure!(
        all.last()
            .is_some_and(|event| event["decision"]["name"] == "web"),
        "the newest comes last: {all:?}"
    );
    let none_yet = Watcher::start(&agent, &["--since", "0s", "--no-follow"])?.events(|| ())?;
    ensure!(none_yet.is_empty(), "{none_yet:?}");

    // A watcher that never reads, and more events than its buffer holds.
    let mut deaf = Watcher::start(&agent, &["--limit-per-second", "1000000"])?;
    wait_until(DEADLINE, "the programs report", || {
        Ok(watched(&agent)? == WATCHED_PER_SECOND)
    })?;
    for _ in 0..2_000 {
        dial(&none);
    }
    let other = Watcher::start(&agent, &["--service", "web", "--count", "1"])?;
    other.events(|| dial(&web))?;
    ensure!(deaf.0.try_wait()?.is_none(), "the deaf one has ended");
    deaf.0.kill()?;
    deaf.0.wait()?;
    agent.stop()
}

/// Each device with IPv6 reports its multicast groups, so the anchor does too.
#[test]
fn anchor_housekeeping_counts_no_refusal() -> Result<()> {
    let base = ServedLab::with_manifests(Layout::Routed)?.serve(&["p1b"], PORT)?;
    let none = Service::new("none", 11, &[], PORT);
    base.put(&none)?;
    let agent = base.kpx(&["--monitor-history=100"])?;
    let dropped =
        || -> Result<Option<u64>> { Ok(agent.status()?["reasons"]["not_unicast"].as_u64()) };
    let before = dropped()?;
    // The kernel sends multicast reports and router solicitations.
    agent.ns().ip("link set kpx0 down\nlink set kpx0 up")?;
    wait_until(DEADLINE, "the anchor drops reports", || {
        Ok(dropped()? > before)
    })?;
    let mut past = Vec::new();
    wait_until(DEADLINE, "a refusal behind them is kept", || {
        let _refused = Dial::new(Protocol::Tcp, none.frontend(Family::V4))
            .deadline(ANSWER)
            .exchange(&base.lab.host("p1a").ns, &[1]);
        past = Watcher::start(&agent, &["--since", "5m", "--no-follow"])?.events(|| ())?;
        Ok(past.iter().any(|event| event["reason"] == "no_endpoints"))
    })?;
    ensure!(
        past.iter().all(|event| event["reason"] != "not_unicast"),
        "{past:?}"
    );
    agent.stop()
}

/// Returns the value in the programs' map.
fn watched(agent: &Agent) -> Result<u32> {
    let id = agent.status()?["maps"][WATCHED]
        .as_u64()
        .context("the map's id")?;
    let map: Array<MapData, u32> = Map::Array(MapData::from_id(u32::try_from(id)?)?).try_into()?;
    Ok(map.get(&0, 0)?)
}

/// A running `kpx monitor -o json`.
struct Watcher(Child);

impl Watcher {
    fn start(agent: &Agent, args: &[&str]) -> Result<Self> {
        let mut command = Command::new(binary()?);
        command
            .args(["monitor", "--output", "json", "--run-dir"])
            .arg(agent.run_dir())
            .args(args);
        Ok(Self(
            command
                .stdout(Stdio::piped())
                .spawn()
                .context("run kpx monitor")?,
        ))
    }

    /// Runs `traffic` until the watcher has seen enough.
    fn events<T>(mut self, mut traffic: impl FnMut() -> T) -> Result<Vec<Value>> {
        wait_until(DEADLINE, "the watcher has seen enough", || {
            traffic();
            Ok(self.0.try_wait()?.is_some())
        })?;
        let output = self.0.wait_with_output()?;
        ensure!(output.status.success(), "{}", output.status);
        String::from_utf8(output.stdout)?
            .lines()
            .map(|line| Ok(serde_json::from_str(line)?))
            .collect()
    }
}
