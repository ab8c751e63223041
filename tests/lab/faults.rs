//! Faults of the machine under a running kpx: a stopped or OOM-killed process, maps without memory,
//! a full disk, no file descriptors, missing pins or BPF file system, IPv6 that goes and comes.

mod conntrack;
mod kernel;
mod memory;
mod mounts;
mod process;
mod rtnl;

use anyhow::Result;

use crate::churn::fixture::{Fixture, Running};

#[test]
fn agent_that_cannot_work_costs_no_service() -> Result<()> {
    let fixture = Fixture::new()?;
    let running = Running::start(&fixture, "tcx")?;
    testbed::cases!(
        &running;
        process::starved_agent_keeps_serving_and_follows_late,
        process::stopped_agent_keeps_serving_and_catches_up,
        rtnl::endpoints_change_while_the_work_on_devices_waits,
    )?;
    running.kpx.stop()
}
