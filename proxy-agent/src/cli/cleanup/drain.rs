//! `kpx cleanup --drain`: waits for the end of all open flows.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use tokio::time::{Instant, MissedTickBehavior, interval};

use proxy_datapath::object;
use proxy_datapath::{Drain, find};
use proxy_net::{Handle, filter};

/// Time between two counts of the flows.
const PERIOD: Duration = Duration::from_millis(500);

/// Drains, and prints each change of the number of open flows to standard error. Returns true if no
/// flow is left.
pub(super) async fn drain(bpf_dir: &Path, timeout: Duration, handle: &Handle) -> Result<bool> {
    let drain = match Drain::open(bpf_dir)? {
        // The pins are gone with a container, but the filters are still attached.
        None => Drain::of(find(object::embedded()?, &filter::ours(handle).await?)?)?,
        drain => drain,
    };
    let Some(mut drain) = drain else {
        return Ok(true);
    };
    drain.begin()?;
    let end = Instant::now() + timeout;
    let mut period = interval(PERIOD);
    period.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut before = None;
    loop {
        period.tick().await;
        let open = drain.open_flows()?;
        if before.replace(open) != Some(open) {
            eprintln!("draining: {open} flows are open");
        }
        if open == 0 || Instant::now() >= end {
            return Ok(open == 0);
        }
    }
}
