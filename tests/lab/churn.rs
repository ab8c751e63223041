//! Changes of a node while kpx runs: devices come and go, other programs undo kpx's work,
//! kube-proxy precedes or follows kpx.

pub(crate) mod fixture;
mod kube_proxy;
pub(crate) mod links;
mod migration;
mod names;
pub(crate) mod neighbours;
mod pods;
mod refusals;
mod repairs;
mod stacked;
mod tunnel;

use anyhow::Result;

use fixture::{Fixture, Running};

#[test]
fn devices_change_under_links() -> Result<()> {
    let fixture = Fixture::new()?;
    let running = Running::start(&fixture, "tcx")?;
    testbed::cases!(
        &running;
        names::device_names_may_move_between_devices,
        names::devices_that_are_gone_again_are_no_problem,
        neighbours::foreign_filter_class_keeps_service_traffic,
        neighbours::others_programs_before_and_after_ours_change_nothing,
        pods::namespaces_may_go_while_programs_are_attached,
        repairs::every_repair_of_a_parameter_is_counted,
        stacked::a_macvlan_on_a_device_with_programs_serves_too,
    )?;
    running.kpx.stop()
}

#[test]
fn devices_change_under_filters() -> Result<()> {
    let fixture = Fixture::new()?;
    let running = Running::start(&fixture, "clsact")?;
    testbed::cases!(
        &running;
        neighbours::foreign_filter_class_keeps_service_traffic,
        neighbours::others_filters_before_and_after_ours_change_nothing,
        pods::namespaces_may_go_while_programs_are_attached,
        stacked::a_macvlan_on_a_device_with_programs_serves_too,
    )?;
    running.kpx.stop()
}
