//! Foreign programs on the same hooks, before kpx's and after.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use aya::Ebpf;
use aya::programs::tc::TcAttachOptions;
use aya::programs::{LinkOrder, SchedClassifier, TcAttachType};
use object::write::{Object, Symbol, SymbolSection};
use object::{
    Architecture, BinaryFormat, Endianness, SectionKind, SymbolFlags, SymbolKind, SymbolScope,
};
use proxy_common::device::Device;
use proxy_datapath::verifier;
use testbed::agent::wait_until;
use testbed::echo::{Dial, Protocol, pattern};
use testbed::lab::Family;
use testbed::netns::NetNs;

use crate::churn::fixture::{
    Fixture, NODE_PORT, PROMPT, Running, ifindex, is_hooked, repairs, tc, tcx,
};
use crate::churn::links;
use crate::tables::alone;

const HOOKS: [(TcAttachType, &str, &str); 2] = [
    (TcAttachType::Ingress, "ingress", "kpx_ingress"),
    (TcAttachType::Egress, "egress", "kpx_egress"),
];

pub(super) fn others_programs_before_and_after_ours_change_nothing(
    running: &Running,
) -> Result<()> {
    let Running { fixture, kpx, .. } = running;
    let _alone = alone();
    let node = fixture.node();
    let mut kept = fixture.connect("p1a", Family::V4)?;
    // A program can be attached to a hook only once.
    let mut others = [other()?, other()?];
    for (other, order) in others.iter_mut().zip([LinkOrder::first, LinkOrder::last]) {
        let passes: &mut SchedClassifier = other
            .program_mut(OTHER)
            .context("no other program")?
            .try_into()?;
        verifier::load(|| passes.load())?;
        for (direction, _, _) in HOOKS {
            node.run(|| {
                passes.attach_with_options("p1a", direction, TcAttachOptions::TcxOrder(order()))
            })?;
        }
    }
    for (direction, _, ours) in HOOKS {
        ensure!(tcx(node, "p1a", direction)? == [OTHER, ours, OTHER]);
    }
    fixture
        .all_served(&["p1a", "n1", "x"])
        .context("with others around")?;
    kept.exchange(b"with others around")?;

    let before = repairs(kpx, "program")?;
    links::detach_all(kpx.pid(), ifindex(node, "p1a")?, "gress")?;
    wait_until(PROMPT, "ours are back", || {
        Ok(repairs(kpx, "program")? > before && is_hooked(node, "tcx", "p1a")?)
    })?;
    for (direction, _, ours) in HOOKS {
        ensure!(
            tcx(node, "p1a", direction)? == [OTHER, OTHER, ours],
            "others' programs stay"
        );
    }
    fixture
        .all_served(&["p1a", "n1", "x"])
        .context("behind others")?;
    kept.exchange(b"behind others")?;
    Ok(())
}

/// The name of the program in [`other`].
pub(crate) const OTHER: &str = "pass_all";

/// Loads a foreign program that passes every packet to the next one.
pub(crate) fn other() -> Result<Ebpf> {
    // r0 = TC_ACT_UNSPEC; exit
    const CODE: [u8; 16] = [0xb7, 0, 0, 0, 255, 255, 255, 255, 0x95, 0, 0, 0, 0, 0, 0, 0];
    let mut object = Object::new(BinaryFormat::Elf, Architecture::Bpf, Endianness::Little);
    let section = object.add_section(Vec::new(), b"classifier".to_vec(), SectionKind::Text);
    object.append_section_data(section, &CODE, 8);
    object.add_symbol(Symbol {
        name: OTHER.into(),
        value: 0,
        size: CODE.len() as u64,
        kind: SymbolKind::Text,
        scope: SymbolScope::Dynamic,
        weak: false,
        section: SymbolSection::Section(section),
        flags: SymbolFlags::None,
    });
    let object = object.write().context("make an object")?;
    Ok(verifier::loader().load(&object)?)
}

pub(super) fn others_filters_before_and_after_ours_change_nothing(running: &Running) -> Result<()> {
    let Running { fixture, kpx, .. } = running;
    let node = fixture.node();
    let mut kept = fixture.connect("p1a", Family::V4)?;
    for (prio, (_, hook, _)) in HOOKS
        .into_iter()
        .flat_map(|hook| [("1", hook), ("60000", hook)])
    {
        // TC_ACT_UNSPEC: continue with the next filter.
        add_filter(node, &format!("p1a {hook} prio {prio}"), &["da"])?;
    }
    fixture
        .all_served(&["p1a", "n1", "x"])
        .context("with others around")?;
    kept.exchange(b"with others around")?;
    fixture.settles()?;
    let before = repairs(kpx, "program")?;
    for (_, hook, _) in HOOKS {
        tc(
            node,
            &format!(
                "filter del dev p1a {hook} prio {}",
                proxy_net::filter::PRIORITY
            ),
        )?;
    }
    wait_until(PROMPT, "ours are back", || {
        Ok(repairs(kpx, "program")? > before && is_hooked(node, "clsact", "p1a")?)
    })?;
    for (_, hook, _) in HOOKS {
        let filters = tc(node, &format!("filter show dev p1a {hook}"))?;
        ensure!(
            filters.contains("pref 1 ") && filters.contains("pref 60000 "),
            "others' filters are gone: {filters}"
        );
    }
    fixture
        .all_served(&["p1a", "n1", "x"])
        .context("put back among others")?;
    kept.exchange(b"put back among others")?;
    for (prio, (_, hook, _)) in HOOKS
        .into_iter()
        .flat_map(|hook| [("1", hook), ("60000", hook)])
    {
        tc(node, &format!("filter del dev p1a {hook} prio {prio}"))?;
    }
    Ok(())
}

/// The classes of filters: none, one, and some that look like kpx's marks.
const CLASSES: [&[&str]; 6] = [
    &[],
    &["flowid", "1:1"],
    &["flowid", "1:8001"],
    &["flowid", "1:a001"],
    &["flowid", "1:c001"],
    &["flowid", "1:e001"],
];

/// The class overwrites the mark that kpx leaves on masqueraded packets.
pub(super) fn foreign_filter_class_keeps_service_traffic(running: &Running) -> Result<()> {
    let Running {
        fixture, attach, ..
    } = running;
    let node = fixture.node();
    fixture.put(&fixture.web.backed_by(&["p2a"]))?;
    // Conntrack reassembles fragments, and the host fragments the packet again.
    node.nft(
        "table inet tracks { chain forward { type filter hook forward priority 0; ct state invalid counter; }; }",
    )?;
    wait_until(PROMPT, "eth0 has its programs", || {
        is_hooked(node, attach, "eth0")
    })?;
    if *attach == "tcx" {
        tc(node, "qdisc add dev eth0 clsact")?;
    }
    for class in CLASSES {
        // TC_ACT_OK: no later filter runs.
        add_filter(node, "eth0 ingress prio 60000", class)?;
        wait_until(PROMPT, "kpx knows of the filter", || {
            is_filtered(fixture, "eth0")
        })?;
        let serves = || {
            fixture
                .all_served(&["p1a", "n1", "x"])
                .and_then(|()| serves_fragments(fixture))
        };
        serves().with_context(|| format!("by {attach}, with {class:?}"))?;
        tc(node, "filter del dev eth0 ingress prio 60000")?;
        wait_until(PROMPT, "kpx knows that the filter is gone", || {
            Ok(!is_filtered(fixture, "eth0")?)
        })?;
    }
    if *attach == "tcx" {
        tc(node, "qdisc del dev eth0 clsact")?;
    }
    node.nft("delete table inet tracks")?;
    fixture.put(&fixture.web)
}

/// Returns true if the programs expect a foreign filter behind them on a device's ingress.
fn is_filtered(fixture: &Fixture, device: &str) -> Result<bool> {
    let row = fixture
        .devices()?
        .get(&ifindex(fixture.node(), device)?, 0)?;
    Ok(row.flags() & Device::FILTERED != 0)
}

/// Sends a masqueraded client's datagram in fragments, by both families, and receives the echo in
/// fragments.
fn serves_fragments(fixture: &Fixture) -> Result<()> {
    const LONG: usize = 4_000;
    let x = &fixture.lab.host("x").ns;
    Family::ALL.into_iter().try_for_each(|family| {
        let to = (fixture.lab.n1.host.addrs.ip(family), NODE_PORT).into();
        let answer = Dial::new(Protocol::Udp, to)
            .fragments()
            .exchange(x, &pattern(LONG));
        answer
            .map(drop)
            .with_context(|| format!("fragments by {family}"))
    })
}

/// Adds a foreign filter for all packets at a device, a hook and a priority.
fn add_filter(node: &NetNs, place: &str, result: &[&str]) -> Result<()> {
    let mut command = Command::new("tc");
    command
        .args(["filter", "add", "dev"])
        .args(place.split_whitespace())
        .args(["protocol", "all", "bpf"]);
    node.exec(
        command
            .args(["bytecode", "1,6 0 0 4294967295,"])
            .args(result),
    )
    .map(drop)
}
