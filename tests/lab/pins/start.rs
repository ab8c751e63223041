//! A start that finds pins of its own version and of other versions.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use aya::maps::{MapData, MapInfo};
use proxy_common::layout::LAYOUT;
use testbed::agent::{Agent, binary};
use testbed::cgroup::Cgroup;
use testbed::lab::Layout;
use testbed::served_lab::ServedLab;

use crate::pins::fixture::{Fixture, link_ids, map_ids, program_ids, slow_ids};

#[test]
fn start_refuses_pins_that_it_cannot_take_over() -> Result<()> {
    let fixture = Fixture::start()?;
    drop(fixture.kpx(&[])?);
    let dir = fixture.dir();
    let names = map_ids(&fixture.dir())?;

    fs::create_dir(dir.join("v0"))?;
    refused(
        &fixture,
        "v0 belongs to another version of kpx; this version takes over layout v2 only",
    )?;
    refused(
        &fixture,
        &format!("`kpx cleanup --bpf-dir {}`", dir.display()),
    )?;
    fs::remove_dir(dir.join("v0"))?;

    // The pin of another map replaces a map's pin.
    let flows = dir.join("v2/maps/FLOWS4");
    fs::rename(&flows, dir.join("v2/maps/KEPT"))?;
    MapData::from_pin(dir.join("v2/maps/GENERATION"))?.pin(&flows)?;
    refused(
        &fixture,
        "v2/maps/FLOWS4 is not a map of this version of kpx: type 2, 4 bytes of key, 4 of value, flags 0x0 instead of type 1",
    )?;
    fs::remove_file(&flows)?;
    fs::rename(dir.join("v2/maps/KEPT"), &flows)?;

    // The refused start has changed nothing.
    fixture.serves()?;
    let _agent = fixture.kpx(&[])?;
    ensure!(map_ids(&dir)? == names);
    Ok(())
}

/// After a downgrade, maps with open flows of the newer kpx remain under an unknown layout number.
#[test]
fn older_kpx_touches_nothing_of_a_newer_one() -> Result<()> {
    for how in ["tcx", "clsact"] {
        let fixture = Fixture::start()?;
        let agent = fixture.kpx(&["--attach", how])?;
        let mut open = fixture.connections()?;
        let programs = program_ids(&agent)?;
        drop(agent);
        let [own, newer] =
            [LAYOUT, LAYOUT + 1].map(|layout| fixture.dir().join(format!("v{layout}")));
        fs::rename(&own, &newer)?;
        let before = (fixture.state()?, pinned(&newer)?);
        refused(
            &fixture,
            &format!("v{} belongs to another version of kpx", LAYOUT + 1),
        )?;
        refused(&fixture, "start that version again")?;
        ensure!(
            (fixture.state()?, pinned(&newer)?) == before && !own.exists(),
            "{how}: something has changed"
        );
        fixture.carry_only(&programs)?;
        open.answer()
            .and(fixture.serves())
            .with_context(|| format!("{how}: the older kpx is refused"))?;
        fs::rename(&newer, &own)?;
        let newer = fixture.kpx(&["--attach", how])?;
        open.answer()
            .and(fixture.serves())
            .with_context(|| format!("{how}: the newer kpx is back\n{}", newer.log()))?;
    }
    Ok(())
}

/// Returns the names and numbers of all pins of a layout.
fn pinned(layout: &Path) -> Result<Vec<(String, u64)>> {
    let mut pins = Vec::new();
    for folder in ["maps", "links"] {
        for pin in fs::read_dir(layout.join(folder))? {
            let pin = pin?;
            pins.push((pin.path().display().to_string(), pin.metadata()?.ino()));
        }
    }
    pins.sort();
    Ok(pins)
}

#[test]
fn two_agents_are_kept_apart() -> Result<()> {
    let fixture = Fixture::start()?;
    let agent = fixture.kpx(&[])?;
    let dir = fixture.dir();
    let elsewhere = || {
        run(
            &fixture,
            &fixture.lab.n2.host.ns,
            &["--bpf-dir", dir.to_str().context("a path in UTF-8")?],
        )
    };
    ensure!(
        elsewhere()?.contains(&format!("another kpx is using {}", dir.display())),
        "{}",
        elsewhere()?
    );
    let own = PathBuf::from(format!("{}-own", dir.display()));
    let beside = run(
        &fixture,
        &fixture.lab.n1.host.ns,
        &["--bpf-dir", own.to_str().context("a path in UTF-8")?],
    )?;
    ensure!(
        beside.contains("another kpx is running on this host") && !own.exists(),
        "{beside}"
    );
    ensure!(agent.status()?["healthy"] == true);
    drop(agent);
    ensure!(
        elsewhere()?.contains("v2 serves another network namespace, net:["),
        "{}",
        elsewhere()?
    );
    fixture.serves()
}

/// Older versions with the same layout used one half-open queue for all CPUs, and an interrupted
/// start could leave a second pinned queue.
#[test]
fn start_removes_the_maps_that_only_an_earlier_kpx_used() -> Result<()> {
    let fixture = Fixture::start()?;
    drop(fixture.kpx(&[])?);
    let dir = fixture.dir();
    let maps = map_ids(&fixture.dir())?;
    for name in ["HALF_OPEN4", "HALF_OPEN6-65536", "NURSERY4"] {
        MapData::from_pin(dir.join("v2/maps/FRAGMENTS4"))?.pin(dir.join("v2/maps").join(name))?;
    }
    // An earlier kpx had no rings.
    fs::remove_file(dir.join("v2/maps/HALF_OPEN_RING4"))?;
    let _agent = fixture.kpx(&[])?;
    ensure!(
        map_ids(&dir)?.keys().eq(maps.keys()),
        "{:?}, not {maps:?}",
        map_ids(&dir)?
    );
    fixture.serves()
}

/// A crash may interrupt the start at any point.
#[test]
fn kpx_completes_an_interrupted_start() -> Result<()> {
    let fixture = Fixture::start()?;
    drop(fixture.kpx(&[])?);
    let dir = fixture.dir();
    let maps = map_ids(&fixture.dir())?;
    let links = link_ids(&fixture.dir())?;
    let ingress = links
        .keys()
        .find(|pin| pin.ends_with("-ingress"))
        .context("a link")?;
    fs::remove_file(dir.join("v2/links").join(ingress))?;
    fs::remove_file(dir.join("v2/maps/AFFINITY4"))?;
    fs::remove_file(dir.join("v2/netns"))?;
    // The crash came before the old flow table was dropped.
    MapData::from_pin(dir.join("v2/maps/FLOWS4"))?.pin(dir.join("v2/maps/FLOWS4-9"))?;
    // And before the array of an earlier load was.
    let slow = slow_ids(&dir)?;
    let array = slow.keys().next().context("an array")?;
    MapData::from_pin(dir.join("v2/slow").join(array))?.pin(dir.join("v2/slow/earlier"))?;
    let agent = fixture.kpx(&[])?;
    ensure!(
        map_ids(&dir)?.keys().eq(maps.keys()),
        "{:?}",
        map_ids(&dir)?
    );
    ensure!(
        link_ids(&dir)?.keys().eq(links.keys()),
        "{:?}",
        link_ids(&dir)?
    );
    ensure!(
        slow_ids(&dir)?.len() == 1 && !slow_ids(&dir)?.contains_key(array),
        "{:?}",
        slow_ids(&dir)?
    );
    fixture.serves()?;
    drop(agent);
    fixture.serves()
}

fn refused(fixture: &Fixture, why: &str) -> Result<()> {
    let said = run(
        fixture,
        &fixture.lab.n1.host.ns,
        &[
            "--bpf-dir",
            fixture.dir().to_str().context("a path in UTF-8")?,
        ],
    )?;
    ensure!(said.contains(why), "{said}");
    Ok(())
}

/// Returns the error of a kpx that exits at once.
fn run(fixture: &Fixture, ns: &testbed::netns::NetNs, args: &[&str]) -> Result<String> {
    let mut command = Command::new(binary()?);
    command
        .args(["run", "--node-name", "other", "--manifests"])
        .arg(fixture.lab.dir());
    command
        .arg("--run-dir")
        .arg(fixture.lab.dir().join("other"))
        .args(args);
    let output = ns.run(|| command.output())?;
    ensure!(!output.status.success(), "it was not refused: {output:?}");
    Ok(String::from_utf8(output.stderr)?)
}

/// Checks that maps change only together with the layout's number, because programs of other builds
/// read them.
#[test]
fn the_pinned_maps_are_those_of_this_layout() -> Result<()> {
    // With an API server there are Pods, which need a map for their sockets, and other nodes.
    let lab = ServedLab::with_api_server(Layout::Routed)?;
    let cgroup = Cgroup::enter()?;
    let root = cgroup.path().display().to_string();
    let args = [
        "--external-forwarding",
        "dsr",
        "--socket-lb-udp",
        "--cgroup-root",
        &root,
    ];
    let source = lab.cluster.source();
    let agent = Agent::launch_by(None, &lab.lab, &lab.lab.n1.host, source, &args)?;
    // Without the kernel's modules for tunnels, no node of the mode is healthy.
    drop(agent.having("complete")?);
    let dir = lab.lab.n1.host.ns.bpf_dir();
    let mut text = format!("layout {LAYOUT}\n");
    for name in map_ids(&dir)?.keys() {
        let map = MapInfo::from_pin(dir.join(format!("v{LAYOUT}/maps")).join(name))?;
        let key = map.key_size();
        let value = map.value_size();
        let flags = map.map_flags();
        text += &format!(
            "{name} {:?} key {key} value {value} flags {flags:#x}\n",
            map.map_type()?
        );
    }
    let want = include_str!("../../../proxy-common/src/layout/v2-maps.txt");
    ensure!(
        text == want,
        "a changed map needs another LAYOUT, and a new map a line in the file:\n{text}"
    );
    Ok(())
}
