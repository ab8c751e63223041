//! `kpx devices`.

use anyhow::Result;
use clap::Args;

use super::agent_args::AgentArgs;
use proxy_view::output::{Form, OutputArgs, cell};
use proxy_view::status::DeviceStatus;

/// List the devices with kpx's programs.
#[derive(Args, Debug)]
pub(super) struct DevicesArgs {
    #[command(flatten)]
    agent: AgentArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(super) async fn devices(args: &DevicesArgs) -> Result<()> {
    let devices = args.agent.client().status().await?.devices;
    args.output.print(&devices, |form| text(&devices, form))
}

pub(super) fn text(devices: &[DeviceStatus], form: Form) -> String {
    let row = |device: &DeviceStatus| {
        vec![
            cell(&device.name),
            cell(device.ifindex),
            cell(&device.role),
            cell(&device.attached_by),
        ]
    };
    form.table(
        &["DEVICE", "IFINDEX", "ROLE", "ATTACHED-BY"],
        devices.iter().map(row),
    )
}
