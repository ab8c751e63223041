//! The cases in the default setting of a node, for kernels in virtual machines (`cargo xtask vmtest`). All settings
//! would take too long there. SCTP there is the kernel's own.
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
use testbed::lab::{Lab, Layout, TunnelKind};

use self::fixture::{Fixture, create_services};
use self::results::Results;
use self::setting::Setting;
use self::table::CASES;

#[test]
fn pods_reach_services_by_the_default_mechanism() {
    check(&[]).unwrap();
}

#[test]
fn pods_reach_services_by_clsact() {
    check(&["--attach", "clsact"]).unwrap();
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
        tunnelled(kind).with_context(|| format!("{kind:?}")).unwrap();
    }
}

fn tunnelled(kind: TunnelKind) -> Result<()> {
    let lab = Lab::start(Layout::Tunnel(kind))?;
    serve(&lab, &[], |results| {
        let plain = Setting::plain(lab.layout, false);
        plain.apply(&lab)?;
        rows::run(&lab, &plain, CASES.iter().filter(|case| TUNNELLED.contains(&case.id)), results);
        Ok(())
    })
}

/// Everything as it is, without offloads, and without those of the nodes' links alone.
fn check(args: &[&str]) -> Result<()> {
    let lab = Lab::start(Layout::Routed)?;
    serve(&lab, args, |results| {
        let plain = Setting::plain(lab.layout, false);
        for setting in [plain, Setting { offload: false, ..plain }] {
            setting.apply(&lab)?;
            rows::run(&lab, &setting, CASES, results);
        }
        plain.apply(&lab)?;
        lab.set_uplink_offload(false)?;
        rows::run(&lab, &plain, CASES, results);
        Ok(())
    })
}

/// Runs rows in a lab with kpx on both nodes, and only then fails, with all that went wrong.
fn serve(lab: &Lab, args: &[&str], run: impl FnOnce(&mut Results) -> Result<()>) -> Result<()> {
    let servers = Servers::start()?;
    create_services(lab, &servers)?;
    let cluster = Cluster::with_manifests(lab)?;
    for object in services::services(lab).iter().flat_map(|service: &Service| service.objects(lab)) {
        cluster.put(&object)?;
    }
    let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
    let fixture = Fixture::new(lab, &cluster, &args)?;
    let mut results = Results::default();
    run(&mut results)?;
    let logs = fixture.logs();
    fixture.stop()?;
    println!("{results}");
    results.into_result().with_context(|| format!("logs of kpx:\n{logs}"))
}
