//! Another program removes kpx's state from a node: kpx notices and restores it within the sync
//! period.

use std::path::Path;
use std::process::Command;
use std::time::Instant;
use std::{fs, io};

use anyhow::{Context, Result, ensure};
use aya::programs::TcAttachType;
use testbed::agent::{Agent, wait_until};
use testbed::lab::Family;

use crate::churn::fixture::{Fixture, PROMPT, Running, ifindex, is_hooked, repairs, tc, tcx};
use crate::churn::links;

/// A range by which the kernel gives sockets some of the source ports that kpx draws.
const PORT_RANGE: &str = "32768 61500";
const RESERVED: &str = "61000-61500";

#[test]
fn programs_routes_anchor_and_parameters_are_restored() -> Result<()> {
    for attach in ["tcx", "clsact"] {
        let fixture = Fixture::new()?;
        fixture
            .node()
            .sysctl("ipv4/ip_local_port_range", PORT_RANGE)?;
        let kpx = fixture.kpx(attach)?;
        let mut kept = vec![
            fixture.connect("p1a", Family::V4)?,
            fixture.connect("n1", Family::V4)?,
        ];
        kept.extend([
            fixture.connect("x", Family::V6)?,
            fixture.connect("p1a", Family::V6)?,
        ]);

        unhook(&fixture, &kpx, attach).with_context(|| format!("programs, by {attach}"))?;
        anchor(&fixture, &kpx).with_context(|| format!("anchor, by {attach}"))?;
        ways(&fixture, &kpx).with_context(|| format!("ways, by {attach}"))?;
        parameters(&fixture, &kpx).with_context(|| format!("parameters, by {attach}"))?;

        for connection in &mut kept {
            connection
                .exchange(b"still there?")
                .context("a connection of before")?;
        }
        kpx.stop()?;
    }
    Ok(())
}

/// A foreign qdisc in the place of clsact. Its single hook accepts either of kpx's filters.
#[test]
fn older_qdisc_in_the_place_of_clsact_is_a_problem_and_half_serves_no_device() -> Result<()> {
    let fixture = Fixture::new()?;
    let node = fixture.node();
    tc(node, "qdisc add dev eth0 ingress")?;
    let args = ["--attach", "clsact", "--iptables-sync-period", "1s"];
    let kpx = Agent::launch_by(
        None,
        &fixture.lab,
        &fixture.lab.n1.host,
        fixture.cluster.source(),
        &args,
    )?;
    let kpx = kpx.having("complete")?;
    let is_named = || -> Result<bool> {
        let problem = kpx.problem("device eth0")?.unwrap_or_default();
        let filters =
            tc(node, "filter show dev eth0 ingress")? + &tc(node, "filter show dev eth0 egress")?;
        Ok(problem.contains("tc qdisc add dev eth0 clsact") && !filters.contains("kpx_"))
    };
    wait_until(PROMPT, "the qdisc is named", is_named)?;
    wait_until(PROMPT, "others are served", || {
        Ok(fixture.serves(&["p1a", "n1"]))
    })?;
    for _ in 0..2 {
        tc(node, "qdisc del dev eth0 ingress")?;
        wait_until(PROMPT, "the device is served", || {
            Ok(is_hooked(node, "clsact", "eth0")?
                && fixture.serves(&["x"])
                && kpx.problem("device eth0")?.is_none())
        })?;
        tc(node, "qdisc del dev eth0 clsact")?;
        // The agent may add clsact first.
        while tc(node, "qdisc add dev eth0 ingress").is_err() {
            tc(node, "qdisc del dev eth0 clsact")?;
        }
        wait_until(PROMPT, "the qdisc is named again", is_named)?;
    }
    kpx.stop()?;
    // TCX needs no qdisc.
    let kpx = fixture.kpx("tcx")?;
    wait_until(PROMPT, "the device is served", || {
        Ok(is_hooked(node, "tcx", "eth0")? && fixture.serves(&["x"]))
    })?;
    kpx.stop()
}

#[test]
fn repair_that_another_program_undoes_each_time_is_a_problem() -> Result<()> {
    let fixture = Fixture::new()?;
    let node = fixture.node();
    let kpx = fixture.kpx("clsact")?;
    let has = |what: &str| Ok(kpx.problem(what)?.is_some());
    let programs = "repairs of the programs of p1a";
    wait_until(PROMPT, "the programs are a problem", || {
        // Fails while the programs are gone.
        let _removed = tc(node, "filter del dev p1a egress");
        has(programs)
    })?;
    ensure!(
        kpx.log()
            .matches("the program was removed, reattaching")
            .count()
            == 3,
        "{}",
        kpx.log()
    );
    wait_until(PROMPT, "the programs stay", || {
        Ok(!has(programs)? && is_hooked(node, "clsact", "p1a")?)
    })?;
    wait_until(PROMPT, "the routes are a problem", || {
        node.exec(Command::new("ip").args(["route", "flush", "table", "all", "proto", "75"]))?;
        has("repairs of route")
    })?;
    wait_until(PROMPT, "the routes stay", || {
        Ok(!has("repairs of route")? && fixture.serves(&["n1"]))
    })?;
    kpx.stop()
}

/// Detaches one hook of a device, then both hooks. Then removes a link's pin, which keeps the link
/// without an agent.
fn unhook(fixture: &Fixture, kpx: &Agent<'_>, attach: &str) -> Result<()> {
    let node = fixture.node();
    for device in ["p1a", "eth0"] {
        for hook in ["egress", "gress"] {
            let before = repairs(kpx, "program")?;
            match (attach, hook) {
                ("tcx", _) => links::detach_all(kpx.pid(), ifindex(node, device)?, hook)?,
                (_, "egress") => drop(tc(node, &format!("filter del dev {device} egress"))?),
                _ => drop(tc(node, &format!("qdisc del dev {device} clsact"))?),
            }
            wait_until(PROMPT, "the programs are back", || {
                Ok(repairs(kpx, "program")? > before && is_hooked(node, attach, device)?)
            })?;
        }
    }
    if attach == "tcx" {
        let before = repairs(kpx, "program")?;
        links::detach_all(kpx.pid(), ifindex(node, "kpx0")?, "egress")?;
        wait_until(PROMPT, "the anchor's program is back", || {
            Ok(repairs(kpx, "program")? > before
                && tcx(node, "kpx0", TcAttachType::Egress)? == ["kpx_anchor"])
        })?;
        let pin = node
            .bpf_dir()
            .join(format!("v2/links/{}-ingress", ifindex(node, "p1a")?));
        fs::remove_file(&pin)?;
        wait_until(PROMPT, "the pin is back", || Ok(pin.exists()))?;
    }
    wait_until(PROMPT, "all are served", || {
        Ok(fixture.serves(&["p1a", "n1", "x"]))
    })?;
    ensure!(
        kpx.log().contains("was removed, reattaching"),
        "{}",
        kpx.log()
    );
    Ok(())
}

fn anchor(fixture: &Fixture, kpx: &Agent<'_>) -> Result<()> {
    for (times, undo) in [
        (1.0, "link del kpx0"),
        (2.0, "link set kpx0 down"),
        (3.0, "link set kpx1 down"),
        (4.0, "link del kpx1"),
    ] {
        fixture.node().ip(undo)?;
        wait_until(
            PROMPT,
            &format!("the node is served after `{undo}`"),
            || Ok(repairs(kpx, "anchor")? >= times && fixture.serves(&["n1"])),
        )
        .with_context(|| format!("{:?} repairs\n{}", repairs(kpx, "anchor"), kpx.log()))?;
        ensure!(repairs(kpx, "anchor")? == times, "each is counted once");
    }
    Ok(())
}

fn ways(fixture: &Fixture, kpx: &Agent<'_>) -> Result<()> {
    let before = (repairs(kpx, "route")?, repairs(kpx, "rule")?);
    for family in ["-4", "-6"] {
        fixture.node().exec(
            Command::new("ip").args([family, "route", "flush", "table", "all", "proto", "75"]),
        )?;
    }
    fixture
        .node()
        .ip("rule flush\nrule add lookup main pref 32766\nrule add lookup default pref 32767")?;
    wait_until(PROMPT, "the ways are back", || {
        let rules = fixture.node().exec(Command::new("ip").arg("rule"))?;
        let after = (repairs(kpx, "route")?, repairs(kpx, "rule")?);
        let counted = after.0 >= before.0 + 2.0 && after.1 > before.1;
        Ok(counted && rules.lines().any(|rule| rule.starts_with("75:")) && fixture.serves(&["n1"]))
    })
}

/// Sets kernel parameters from a distribution's `sysctl.d` files, as systemd-sysctl does.
fn parameters(fixture: &Fixture, kpx: &Agent<'_>) -> Result<()> {
    let read = |key: &str| {
        anyhow::Ok(
            fixture
                .node()
                .read(&format!("/proc/sys/net/{key}"))?
                .trim()
                .to_owned(),
        )
    };
    ensure!(read("ipv4/ip_local_reserved_ports")? == RESERVED);
    let wanted = [
        ("ipv4/conf/lo/accept_local", "0", "1"),
        ("ipv4/conf/kpx0/forwarding", "0", "1"),
        ("ipv4/conf/kpx0/src_valid_mark", "0", "1"),
        ("ipv6/conf/kpx0/accept_ra", "1", "0"),
        ("ipv4/ip_local_reserved_ports", "\n", RESERVED),
    ];
    let before = repairs(kpx, "sysctl")?;
    for (key, other, _) in wanted {
        fixture.node().sysctl(key, other)?;
    }
    wait_until(PROMPT, "the parameters are back", || {
        wanted.iter().try_fold(true, |all, (key, _, value)| {
            anyhow::Ok(all && read(key)? == *value)
        })
    })?;
    wait_until(PROMPT, "kpx counts them", || {
        Ok(repairs(kpx, "sysctl")? >= before + 5.0)
    })
}

/// The test changes the value again right after each repair, so that every sync finds it changed.
pub(super) fn every_repair_of_a_parameter_is_counted(running: &Running) -> Result<()> {
    const REPAIRS: u32 = 6;
    const KEY: &str = "ipv4/conf/kpx0/src_valid_mark";
    let Running { fixture, kpx, .. } = running;
    let before = repairs(kpx, "sysctl")?;
    let mut repaired = 0;
    fixture.node().run(|| -> io::Result<()> {
        let path = Path::new("/proc/sys/net").join(KEY);
        let end = Instant::now() + PROMPT;
        fs::write(&path, "0")?;
        while repaired < REPAIRS && Instant::now() < end {
            if fs::read_to_string(&path)?.trim() == "1" {
                repaired += 1;
                fs::write(&path, "0")?;
            }
        }
        Ok(())
    })?;
    ensure!(repaired == REPAIRS, "{repaired} repairs");
    // The count includes the last change.
    wait_until(PROMPT, "kpx counts them", || {
        Ok(repairs(kpx, "sysctl")? == before + f64::from(REPAIRS + 1))
    })?;
    kpx.wait(PROMPT, "nothing is wrong", |status| {
        status.problems.is_empty()
    })
}
