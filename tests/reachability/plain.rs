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
use testbed::lab::{Lab, Layout};

use super::fixture::{Fixture, create_services};
use super::results::Results;
use super::setting::Setting;
use super::table::CASES;

#[test]
fn pods_reach_services_by_the_default_mechanism() {
    check(&[]).unwrap();
}

#[test]
fn pods_reach_services_by_clsact() {
    check(&["--attach", "clsact"]).unwrap();
}

/// Everything as it is, without offloads, and without those of the nodes' links alone.
fn check(args: &[&str]) -> Result<()> {
    let lab = Lab::start(Layout::Routed)?;
    let servers = Servers::start()?;
    create_services(&lab, &servers)?;
    let cluster = Cluster::with_manifests(&lab)?;
    for object in services::services(&lab).iter().flat_map(|service: &Service| service.objects(&lab)) {
        cluster.put(&object)?;
    }
    let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
    let fixture = Fixture::new(&lab, &cluster, &args)?;
    let mut results = Results::default();
    let plain = Setting::plain(lab.layout, false);
    for setting in [plain, Setting { offload: false, ..plain }] {
        setting.apply(&lab)?;
        rows::run(&lab, &setting, CASES, &mut results);
    }
    plain.apply(&lab)?;
    lab.set_uplink_offload(false)?;
    rows::run(&lab, &plain, CASES, &mut results);
    let logs = fixture.logs();
    fixture.stop()?;
    println!("{results}");
    results.into_result().with_context(|| format!("logs of kpx:\n{logs}"))
}
