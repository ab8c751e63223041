//! What a start makes of what it finds.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use aya::maps::{MapData, MapInfo};
use kpx_tests::agent::binary;
use kpx_tests::cgroup::Cgroup;
use proxy_common::layout::LAYOUT;

use crate::bed::{Bed, link_ids, map_ids};

#[test]
fn what_cannot_be_taken_over_is_refused() -> Result<()> {
    let bed = Bed::start()?;
    drop(bed.agent(&[])?);
    let (dir, names) = (bed.dir(), map_ids(&bed.dir())?);

    fs::create_dir(dir.join("v0"))?;
    refused(&bed, "v0 is of another version of kpx, and this one takes over v2 only")?;
    refused(&bed, &format!("`kpx cleanup --bpf-dir {}`", dir.display()))?;
    fs::remove_dir(dir.join("v0"))?;

    // Under the name of one map, another.
    let flows = dir.join("v2/maps/FLOWS4");
    fs::rename(&flows, dir.join("v2/maps/KEPT"))?;
    MapData::from_pin(dir.join("v2/maps/GENERATION"))?.pin(&flows)?;
    refused(
        &bed,
        "v2/maps/FLOWS4 is not a map of this kpx: type 2, 4 bytes of key, 4 of value, flags 0x0 instead of type 1",
    )?;
    fs::remove_file(&flows)?;
    fs::rename(dir.join("v2/maps/KEPT"), &flows)?;

    // Nothing was harmed.
    bed.serves()?;
    let _agent = bed.agent(&[])?;
    ensure!(map_ids(&dir)? == names);
    Ok(())
}

#[test]
fn two_agents_are_kept_apart() -> Result<()> {
    let bed = Bed::start()?;
    let agent = bed.agent(&[])?;
    let dir = bed.dir();
    let elsewhere = || run(&bed, &bed.lab.n2.host.ns, &["--bpf-dir", dir.to_str().context("a path in UTF-8")?]);
    ensure!(elsewhere()?.contains(&format!("another kpx is using {}", dir.display())), "{}", elsewhere()?);
    let own = PathBuf::from(format!("{}-own", dir.display()));
    let beside = run(&bed, &bed.lab.n1.host.ns, &["--bpf-dir", own.to_str().context("a path in UTF-8")?])?;
    ensure!(beside.contains("another kpx is running on this host") && !own.exists(), "{beside}");
    ensure!(agent.status()?["healthy"] == true);
    drop(agent);
    ensure!(elsewhere()?.contains("v2 serves another network namespace, net:["), "{}", elsewhere()?);
    bed.serves()
}

/// A crash may fall anywhere.
#[test]
fn half_a_start_is_made_whole() -> Result<()> {
    let bed = Bed::start()?;
    drop(bed.agent(&[])?);
    let (dir, maps, links) = (bed.dir(), map_ids(&bed.dir())?, link_ids(&bed.dir())?);
    let ingress = links.keys().find(|pin| pin.ends_with("-ingress")).context("a link")?;
    fs::remove_file(dir.join("v2/links").join(ingress))?;
    fs::remove_file(dir.join("v2/maps/AFFINITY4"))?;
    fs::remove_file(dir.join("v2/netns"))?;
    // Before the old table of flows was dropped.
    MapData::from_pin(dir.join("v2/maps/FLOWS4"))?.pin(dir.join("v2/maps/FLOWS4-9"))?;
    let agent = bed.agent(&[])?;
    ensure!(map_ids(&dir)?.keys().eq(maps.keys()), "{:?}", map_ids(&dir)?);
    ensure!(link_ids(&dir)?.keys().eq(links.keys()), "{:?}", link_ids(&dir)?);
    bed.serves()?;
    drop(agent);
    bed.serves()
}

fn refused(bed: &Bed, why: &str) -> Result<()> {
    let said = run(bed, &bed.lab.n1.host.ns, &["--bpf-dir", bed.dir().to_str().context("a path in UTF-8")?])?;
    ensure!(said.contains(why), "{said}");
    Ok(())
}

/// What a kpx says that ends at once.
fn run(bed: &Bed, ns: &kpx_tests::netns::NetNs, args: &[&str]) -> Result<String> {
    let mut command = Command::new(binary()?);
    command.args(["run", "--node-name", "other", "--manifests"]).arg(bed.lab.dir());
    command.arg("--run-dir").arg(bed.lab.dir().join("other")).args(args);
    let output = ns.run(|| command.output())?;
    ensure!(!output.status.success(), "it was not refused: {output:?}");
    Ok(String::from_utf8(output.stderr)?)
}

/// What a map is can only change together with the number of the layout: programs of another build read it.
#[test]
fn the_pinned_maps_are_those_of_this_layout() -> Result<()> {
    let (bed, cgroup) = (Bed::start()?, Cgroup::enter()?);
    // What is pinned for sockets is pinned where it is asked for.
    drop(bed.agent(&[
        "--socket-lb",
        "host",
        "--socket-lb-udp",
        "--cgroup-root",
        &cgroup.path().display().to_string(),
    ])?);
    let mut text = format!("layout {LAYOUT}\n");
    for name in map_ids(&bed.dir())?.keys() {
        let map = MapInfo::from_pin(bed.dir().join(format!("v{LAYOUT}/maps")).join(name))?;
        let (key, value, flags) = (map.key_size(), map.value_size(), map.map_flags());
        text += &format!("{name} {:?} key {key} value {value} flags {flags:#x}\n", map.map_type()?);
    }
    let want = include_str!("../../proxy-common/src/layout/v2-maps.txt");
    ensure!(text == want, "LAYOUT has to grow, and with it the name of the file:\n{text}");
    Ok(())
}
