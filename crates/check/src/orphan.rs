//! Finds programs of kpx that serve without an agent.

use anyhow::{Result, bail};
use proxy_datapath::is_attached;
use proxy_net::{self as net, filter};

use crate::processes::holds_lock;

/// The description of a host whose agent ended without a successor.
pub const ORPHANED: &str =
    "kpx's programs serve here without an agent: Services stay in their last known state";

/// Returns true if this network namespace has kpx's programs and no agent.
pub async fn is_orphaned() -> Result<bool> {
    if holds_lock()? {
        return Ok(false);
    }
    let (driver, handle) = net::connect()?;
    let filters = tokio::select! {
        filters = filter::ours(&handle) => filters?,
        () = driver => bail!("the netlink socket has failed"),
    };
    Ok(is_attached(&filters))
}
