//! The cases in a node's default setting, for kernels in virtual machines (`cargo xtask vmtest`),
//! where all settings would take too long. SCTP there is the kernel's own.
#![allow(dead_code, reason = "what only the other cases use")]

mod case;
mod fixture;
mod results;
mod rows;
mod services;
mod setting;
mod table;

use anyhow::{Context, Result};
use testbed::agent::{Cluster, Service};
use testbed::echo::Servers;
use testbed::kernel;
use testbed::lab::{Lab, Layout, NetkitLayer, TunnelKind, Uplink};

use self::fixture::{Fixture, compat_args, create_services};
use self::results::Results;
use self::setting::Setting;
use self::table::{CASES, ON_IPVLAN, SHAPED};

#[test]
fn pods_reach_services_by_the_default_mechanism() {
    check(&[]).unwrap();
}

#[test]
fn pods_reach_services_by_clsact() {
    check(&["--attach", "clsact", "--socket-lb", "off"]).unwrap();
}

/// The first kernel whose IP tunnels show packets without their outer headers.
const HIDES_OUTER_HEADERS: (u32, u32) = (5, 14);
/// The cases whose packets pass a tunnel between the nodes.
const TUNNELLED: [&str; 6] = ["C03", "C08", "L02", "L06", "N02", "N12"];

#[test]
fn pods_behind_tunnels_of_the_kernel_reach_services() {
    let mut kinds = vec![TunnelKind::WireGuard];
    if kernel::version().unwrap() >= HIDES_OUTER_HEADERS {
        kinds.push(TunnelKind::Ip6Tnl);
    } else {
        println!("not run for IP tunnels: before Linux 5.14 they get no programs");
    }
    for kind in kinds {
        some(Layout::Tunnel(kind), Uplink::Card, &TUNNELLED)
            .with_context(|| format!("{kind:?}"))
            .unwrap();
    }
}

#[test]
fn nodes_on_a_vlan_serve() {
    some(Layout::Routed, Uplink::Vlan, SHAPED).unwrap();
}

#[test]
fn nodes_on_a_bond_serve() {
    some(Layout::Bridge, Uplink::Bond, SHAPED).unwrap();
}

#[test]
fn pods_on_macvlan_devices_reach_services() {
    some(Layout::Macvlan, Uplink::Card, SHAPED).unwrap();
}

/// A pod's outbound packet comes in by the uplink, and the reply leaves by the node's own ipvlan
/// device beside the pods'.
#[test]
fn pods_on_ipvlan_devices_reach_other_services() {
    some(Layout::Ipvlan, Uplink::Card, ON_IPVLAN).unwrap();
}

#[test]
fn pods_on_netkit_pairs_reach_services() {
    for layer in [NetkitLayer::L2, NetkitLayer::L3] {
        some(Layout::Netkit(layer), Uplink::Card, SHAPED)
            .with_context(|| format!("{layer:?}"))
            .unwrap();
    }
}

fn some(layout: Layout, uplink: Uplink, cases: &[&str]) -> Result<()> {
    let lab = Lab::start_with(layout, uplink)?;
    // Only their addresses identify such pods.
    let compat = layout == Layout::Ipvlan;
    serve(
        &lab,
        if compat { compat_args() } else { Vec::new() },
        |results| {
            let plain = Setting::plain(lab.layout, compat);
            plain.apply(&lab)?;
            rows::run(
                &lab,
                &plain,
                CASES.iter().filter(|case| cases.contains(&case.id)),
                results,
            );
            Ok(())
        },
    )
}

/// Runs the cases with all offloads, without offloads, and without those of the nodes' links.
fn check(args: &[&str]) -> Result<()> {
    let lab = Lab::start(Layout::Routed)?;
    serve(
        &lab,
        args.iter().map(|&arg| arg.to_owned()).collect(),
        |results| {
            let plain = Setting::plain(lab.layout, false);
            for setting in [
                plain,
                Setting {
                    offload: false,
                    ..plain
                },
            ] {
                setting.apply(&lab)?;
                rows::run(&lab, &setting, CASES, results);
            }
            plain.apply(&lab)?;
            lab.set_uplink_offload(false)?;
            rows::run(&lab, &plain, CASES, results);
            Ok(())
        },
    )
}

/// Runs rows in a lab with kpx on both nodes, and fails at the end with all errors.
fn serve(lab: &Lab, args: Vec<String>, run: impl FnOnce(&mut Results) -> Result<()>) -> Result<()> {
    let servers = Servers::start()?;
    create_services(lab, &servers)?;
    let cluster = Cluster::with_manifests(lab)?;
    for object in services::services(lab)
        .iter()
        .flat_map(|service: &Service| service.objects(lab))
    {
        cluster.put(&object)?;
    }
    let fixture = Fixture::new(lab, &cluster, &args)?;
    let mut results = Results::default();
    run(&mut results)?;
    let logs = fixture.logs();
    fixture.stop()?;
    println!("{results}");
    results
        .into_result()
        .with_context(|| format!("logs of kpx:\n{logs}"))
}
