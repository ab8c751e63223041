//! Pins outlive an agent: packets pass without an agent, and the next agent takes over.

mod fixture;
mod start;

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use testbed::agent::{DEADLINE, wait_until};
use testbed::lab::Family;

use crate::pins::fixture::{Fixture, NODE, link_ids, map_ids, program_ids, slow_ids};

#[test]
fn a_killed_agent_is_not_missed_and_the_next_takes_over() -> Result<()> {
    for how in ["tcx", "clsact"] {
        let fixture = Fixture::start()?;
        let args = ["--attach", how, "--socket-lb", "off"];
        let agent = fixture.kpx(&args)?;
        let mut open = fixture.connections()?;
        let maps = map_ids(&fixture.dir())?;
        let links = link_ids(&fixture.dir())?;
        let slow = slow_ids(&fixture.dir())?;
        let programs = program_ids(&agent)?;
        drop(agent); // By SIGKILL.
        open.answer()
            .with_context(|| format!("{how}: no agent runs"))?;
        fixture
            .serves()
            .with_context(|| format!("{how}: no agent runs"))?;
        let mut while_dead = fixture.connections()?;

        // The next agent keeps a predecessor's filters, unless it is told otherwise.
        let agent = fixture.kpx(&args[2..])?;
        ensure!(map_ids(&fixture.dir())? == maps, "{how}: other maps");
        ensure!(
            link_ids(&fixture.dir())? == links && links.is_empty() == (how == "clsact"),
            "{how}: {links:?}"
        );
        let slow_now = slow_ids(&fixture.dir())?;
        let arrays = usize::from(how == "tcx");
        ensure!(
            [&slow, &slow_now].map(BTreeMap::len) == [arrays; 2]
                && slow_now.keys().all(|array| !slow.contains_key(array)),
            "{how}: {slow:?}, then {slow_now:?}"
        );
        let now = program_ids(&agent)?;
        ensure!(
            now.iter().all(|program| !programs.contains(program)),
            "{how}: {programs:?}, then {now:?}"
        );
        fixture.carry_only(&now).context(how)?;
        open.answer()
            .and(while_dead.answer())
            .and(fixture.serves())
            .with_context(|| format!("{how}: the next runs"))?;
        ensure!(
            agent.status()?["flows"]["IPv4"]["flows"].as_u64() > Some(1),
            "{how}: {}",
            agent.status()?
        );
    }
    Ok(())
}

#[test]
fn a_signal_ends_the_agent_and_not_what_it_made() -> Result<()> {
    let fixture = Fixture::start()?;
    let before = fixture.state()?;
    let agent = fixture.kpx(&[])?;
    let mut open = fixture.connections()?;
    agent.stop()?;
    open.answer()
        .and(fixture.serves())
        .context("no agent runs")?;
    fixture.kpx(&["--cleanup-on-exit"])?.stop()?;
    fixture.is_clean(&before)?;
    wait_until(DEADLINE, "nothing is translated", || {
        Ok(fixture.serves().is_err())
    })
}

#[test]
fn cleanup_finds_all_that_was_left() -> Result<()> {
    for how in ["tcx", "clsact"] {
        let fixture = Fixture::start()?;
        let node = &fixture.lab.n1.host.ns;
        // The range makes kpx reserve ports, and release them later.
        node.sysctl("ipv4/ip_local_port_range", "32768 65000")?;
        let before = fixture.state()?;
        let agent = fixture.kpx(&["--attach", how, "--conntrack-tcp-timeout-close-wait", "30m"])?;
        ensure!(
            node.read("/proc/sys/net/ipv4/ip_local_reserved_ports")?
                .trim()
                == "61000-65000"
        );
        let run_dir = agent.run_dir().to_owned();
        drop(agent);
        // A layout version that no kpx has.
        std::fs::create_dir_all(fixture.dir().join("v0/maps"))?;
        let mut command = Command::new(testbed::agent::binary()?);
        command
            .arg("cleanup")
            .arg("--run-dir")
            .arg(&run_dir)
            .arg("--bpf-dir")
            .arg(fixture.dir());
        let mut said = String::new();
        wait_until(DEADLINE, "the dead agent's lock is gone", || {
            said = node.exec(&mut command).unwrap_or_default();
            Ok(!said.is_empty())
        })?;
        let reported = [
            "kpx0 and kpx1",
            "maps pinned",
            "61000-65000",
            "timeout_close_wait",
        ];
        let told_here = if how == "tcx" {
            "-ingress, pinned"
        } else {
            "the clsact qdisc of eth0"
        };
        for what in reported.iter().chain([&told_here]) {
            ensure!(said.contains(what), "{how}: {what} is not in\n{said}");
        }
        fixture.is_clean(&before)?;
        ensure!(!run_dir.join("changes.json").exists());
        ensure!(node.exec(&mut command)? == "nothing to remove\n");
    }
    Ok(())
}

#[test]
fn a_flow_table_of_another_size_has_the_flows_of_the_old() -> Result<()> {
    let fixture = Fixture::start()?;
    drop(fixture.kpx(&["--flow-table-size", "4096"])?);
    let mut open = fixture.connections()?;
    let before = map_ids(&fixture.dir())?;
    for size in ["8192", "1024"] {
        let agent = fixture.kpx(&["--flow-table-size", size])?;
        let fill = &agent.status()?["mapFill"]["FLOWS4"];
        ensure!(fill["maxEntries"].as_u64() == size.parse().ok(), "{fill}");
        open.answer().and(fixture.serves()).context(size)?;
        let now = map_ids(&fixture.dir())?;
        ensure!(now.keys().eq(before.keys()), "{now:?}");
        ensure!(
            now["FLOWS4"] != before["FLOWS4"] && now["SERVICES4"] == before["SERVICES4"],
            "{now:?}"
        );
        fixture.carry_only(&program_ids(&agent)?)?;
    }
    Ok(())
}

#[test]
fn table_without_a_flag_keeps_its_size() -> Result<()> {
    let fixture = Fixture::start()?;
    // A larger table than the default for any machine's memory.
    drop(fixture.kpx(&["--endpoint-table-size", "2097152"])?);
    let before = map_ids(&fixture.dir())?;
    for (args, size) in [
        (&[][..], 2_097_152),
        (&["--endpoint-table-size", "4096"], 4_096),
    ] {
        let agent = fixture.kpx(args)?;
        let fill = &agent.status()?["mapFill"]["SLOTS4"];
        ensure!(fill["maxEntries"] == size, "{args:?}: {fill}");
        let now = map_ids(&fixture.dir())?;
        ensure!(
            (now["SLOTS4"] == before["SLOTS4"]) == args.is_empty(),
            "{args:?}: {now:?}"
        );
        fixture
            .serves()
            .with_context(|| format!("{args:?}: {:?}", agent.status()))?;
    }
    Ok(())
}

#[test]
fn the_link_of_a_device_that_vanished_meanwhile_is_unpinned() -> Result<()> {
    let fixture = Fixture::start()?;
    let node = &fixture.lab.n1.host.ns;
    node.ip("link add gone type veth peer name gone1\nlink set gone1 up\nlink set gone up")?;
    let agent = fixture.kpx(&[])?;
    let ifindex = node.run(|| nix::net::if_::if_nametoindex("gone"))?;
    let pins = |ifindex: u32| -> Result<bool> {
        Ok(fs::read_dir(fixture.dir().join("v2/links"))?
            .flatten()
            .any(|pin| {
                pin.file_name()
                    .to_string_lossy()
                    .starts_with(&format!("{ifindex}-"))
            }))
    };
    wait_until(DEADLINE, "it has links", || pins(ifindex))?;
    drop(agent);
    node.ip("link del gone")?;
    let _agent = fixture.kpx(&[])?;
    ensure!(!pins(ifindex)?, "{:?}", link_ids(&fixture.dir())?);
    // A device may vanish while an agent runs.
    node.ip("link add gone type veth peer name gone2\nlink set gone2 up\nlink set gone up")?;
    let ifindex = node.run(|| nix::net::if_::if_nametoindex("gone"))?;
    wait_until(DEADLINE, "it has links", || pins(ifindex))?;
    node.ip("link del gone")?;
    wait_until(DEADLINE, "they are unpinned", || Ok(!pins(ifindex)?))?;
    Ok(())
}

/// Connections that their clients keep open.
pub(crate) struct Open(pub(crate) Vec<(String, testbed::echo::Connection)>);

impl Open {
    fn answer(&mut self) -> Result<()> {
        for (what, connection) in &mut self.0 {
            connection
                .exchange(b"still there?")
                .with_context(|| what.clone())?;
        }
        Ok(())
    }
}

impl Fixture {
    /// Opens connections from a pod and from the node itself.
    fn connections(&self) -> Result<Open> {
        let from = ["p1a", NODE]
            .into_iter()
            .flat_map(|client| Family::ALL.map(|family| (client, family)));
        let open = from.map(|(client, family)| {
            let what = format!("{client} by {family}");
            let connection = self
                .dial(family)
                .connect(&self.lab.host(client).ns)
                .with_context(|| what.clone())?;
            Ok((what, connection))
        });
        Ok(Open(open.collect::<Result<_>>()?))
    }
}
