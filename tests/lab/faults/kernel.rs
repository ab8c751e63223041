//! Kernel resources that an agent loses: pins, disk space, file descriptors, IPv6.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use proxy_common::layout::LAYOUT;
use testbed::agent::wait_until;
use testbed::lab::Family;
use testbed::netns;

use crate::churn::fixture::{Fixture, PROMPT};
use crate::faults::process::{CLIENTS, STILL, serves_for};

#[test]
fn agent_pins_again_what_another_program_has_unpinned() -> Result<()> {
    let fixture = Fixture::new()?;
    for attach in ["tcx", "clsact"] {
        let kpx = fixture.kpx(attach)?;
        let mut kept = fixture.connect("p1a", Family::V4)?;
        let dir = fixture.node().bpf_dir().join(format!("v{LAYOUT}"));
        let pins = || pinned(&dir);
        let before = pins()?;
        fs::remove_dir_all(&dir).with_context(|| format!("remove {}", dir.display()))?;
        fixture.all_served(&CLIENTS).context("without pins")?;
        wait_until(PROMPT, "the pins are back", || {
            Ok(dir.exists() && pins()? == before)
        })
        .with_context(|| format!("{attach}: {:?}, not {before:?}\n{}", pins(), kpx.log()))?;
        kpx.crash()?;
        kept.exchange(b"without an agent")?;
        let next = fixture.kpx(attach)?;
        kept.exchange(b"with the next")?;
        fixture.all_served(&CLIENTS).context("with the next")?;
        next.stop()?;
    }
    Ok(())
}

/// Returns the names of all pinned maps and links.
fn pinned(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for folder in ["maps", "links"] {
        let Ok(entries) = fs::read_dir(dir.join(folder)) else {
            continue;
        };
        for entry in entries {
            names.push(format!("{folder}/{}", entry?.file_name().to_string_lossy()));
        }
    }
    names.sort();
    Ok(names)
}

#[test]
fn full_run_directory_costs_no_service() -> Result<()> {
    let fixture = Fixture::new()?;
    let run_dir = fixture.lab.dir().join("n1-run");
    fs::create_dir_all(&run_dir)?;
    mount(
        Some("tmpfs"),
        &run_dir,
        Some("tmpfs"),
        MsFlags::empty(),
        Some("size=64k"),
    )
    .context("mount a small tmpfs")?;
    let served = || -> Result<()> {
        fs::write(run_dir.join("filler"), [0; 4096])?;
        let _ = fs::write(run_dir.join("rest"), vec![0; 1 << 20]); // Writes as much as fits.
        ensure!(
            fs::write(run_dir.join("more"), [0; 4096]).is_err(),
            "the directory is full"
        );
        let kpx = fixture.kpx("tcx")?;
        fixture
            .all_served(&CLIENTS)
            .context("with a full run directory")?;
        fs::remove_file(run_dir.join("rest"))?;
        kpx.wait(PROMPT, "healthy", |status| status.healthy)?;
        kpx.stop()
    };
    let outcome = served();
    umount2(&run_dir, MntFlags::MNT_DETACH)?;
    outcome
}

#[test]
fn agent_without_file_descriptors_keeps_serving_and_recovers() -> Result<()> {
    let fixture = Fixture::new()?;
    let kpx = fixture.kpx("tcx")?;
    let mut kept = fixture.connect("p1a", Family::V4)?;
    let limit = |soft: &str| -> Result<()> {
        let pid = kpx.pid().to_string();
        netns::check(
            Command::new("prlimit")
                .args(["--pid", &pid, &format!("--nofile={soft}:")])
                .output(),
            "limit the agent's file descriptors",
        )?;
        Ok(())
    };
    limit("3")?;
    ensure!(
        kpx.status().is_err(),
        "an agent without descriptors takes no connection"
    );
    serves_for(STILL, &fixture).context("without descriptors")?;
    limit("1024")?;
    kpx.wait(PROMPT, "healthy", |status| status.healthy)?;
    kept.exchange(b"after that")?;
    fixture.put(&fixture.web.backed_by(&["p1b"]))?;
    wait_until(PROMPT, "the change is followed", || {
        Ok(fixture.ask("p1a", Family::V4)?.backend == "p1b")
    })?;
    kpx.stop()
}

#[test]
fn ipv6_goes_and_comes_back_under_a_running_agent() -> Result<()> {
    let fixture = Fixture::new()?;
    let kpx = fixture.kpx("tcx")?;
    let node = fixture.node();
    let mut kept = fixture.connect("p1a", Family::V4)?;
    let kept_by_node = (address_lines(&fixture)?, route_lines(&fixture)?);
    node.sysctl("ipv6/conf/all/disable_ipv6", "1")?;
    let off = Instant::now();
    while off.elapsed() < STILL {
        CLIENTS
            .iter()
            .try_for_each(|client| fixture.ask(client, Family::V4).map(drop))
            .context("without IPv6")?;
    }
    kept.exchange(b"without IPv6")?;
    ensure!(!fixture.serves(&["p1a"]), "IPv6 is off");
    node.sysctl("ipv6/conf/all/disable_ipv6", "0")?;
    let (addresses, routes) = kept_by_node;
    for line in addresses.iter().chain(&routes) {
        node.exec(Command::new("ip").arg("-6").args(line.split_whitespace()))
            .with_context(|| line.clone())?;
    }
    wait_until(PROMPT, "IPv6 is served again", || {
        Ok(fixture.serves(&CLIENTS))
    })
    .with_context(|| format!("{:?}\n{}", kpx.status(), kpx.log()))?;
    kpx.wait(PROMPT, "healthy", |status| status.healthy)?;
    kept.exchange(b"with IPv6 again")?;
    kpx.stop()
}

/// Returns `ip -6` commands that restore the node's addresses.
fn address_lines(fixture: &Fixture) -> Result<Vec<String>> {
    let text = fixture
        .node()
        .exec(Command::new("ip").args(["-6", "-o", "addr", "show", "scope", "global"]))?;
    let line = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        (words[1] != "lo" && words[1] != "kpx0")
            .then(|| format!("addr replace {} dev {} nodad", words[3], words[1]))
    };
    Ok(text.lines().filter_map(line).collect())
}

/// Returns `ip -6` commands that restore the node's own routes, without the kernel's and kpx's
/// routes.
fn route_lines(fixture: &Fixture) -> Result<Vec<String>> {
    let text = fixture
        .node()
        .exec(Command::new("ip").args(["-6", "route", "show"]))?;
    let own = text
        .lines()
        .filter(|line| !line.contains("proto kernel") && !line.contains("kpx0"));
    Ok(own
        .map(|line| format!("route replace {}", line.replace(" pref medium", "")))
        .collect())
}
