//! What is done before capabilities are given up: all that takes more of them than serving does.

use std::os::unix::net::UnixListener;

use anyhow::{Context, Result, bail};
use tokio::runtime::Builder;
use tracing::warn;

use crate::control;
use crate::settings::Settings;
use proxy_datapath::{Cgroup, Pins, ensure_bpf_fs, ensure_no_hidden_links};
use proxy_net as net;
use proxy_net::filter::{self, Filter};

/// What takes more privileges than are kept.
pub struct Prepared {
    /// Keeps every other kpx from this network namespace.
    pub lock: UnixListener,
    /// With the maps of a predecessor in it, if one has left any.
    pub pins: Pins,
    /// Where sockets are served, if so asked.
    pub cgroup: Option<Cgroup>,
}

/// Reads what leads to the objects before anything of the host is touched; and locks this network namespace before any map
/// is looked for: the folder of pins may be this container's alone, and then its lock keeps no other kpx away.
///
/// To be called while there is one thread, which stays so.
pub fn prepare(settings: &Settings, object: &[u8]) -> Result<Prepared> {
    let runtime = Builder::new_current_thread().enable_all().build().context("start the runtime")?;
    runtime.block_on(settings.source.check()).context("the source")?;
    let lock = control::lock()?;
    let cgroup = settings.sockets.map(|_| Cgroup::open(settings.cgroup_root.as_deref())).transpose()?;
    let pins = Pins::open(&settings.bpf_dir, ensure_bpf_fs(&settings.bpf_dir)?)?;
    if pins.is_ours_alone() {
        ensure_no_hidden_links()?;
    }
    if !pins.has_maps()? {
        recover(&pins, object, &runtime.block_on(filters())?)?;
    }
    Ok(Prepared { lock, pins, cgroup })
}

/// Pins what a predecessor has left whose pins are gone.
fn recover(pins: &Pins, object: &[u8], filters: &[(String, Filter)]) -> Result<()> {
    if pins.may_open_by_id() {
        return pins.recover(object, filters).context("find the maps of the programs on this node");
    }
    if !filters.is_empty() {
        warn!(
            "the maps of the programs on this node are not pinned, and to find them takes CAP_SYS_ADMIN: what is open is cut"
        );
    }
    Ok(())
}

/// Ours, on all devices.
async fn filters() -> Result<Vec<(String, Filter)>> {
    let (driver, handle) = net::connect()?;
    tokio::select! {
        filters = filter::ours(&handle) => filters,
        () = driver => bail!("the netlink socket has failed"),
    }
}
