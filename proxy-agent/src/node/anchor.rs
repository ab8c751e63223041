//! The anchor of this node: of the right MTU, up, and with its parameters.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use proxy_net::Handle;
use proxy_net::anchor::{self, Anchor, anchor_mtu};
use proxy_net::link::Link;
use tracing::debug;

/// The anchor's device, as it was last made.
pub(super) struct AnchorDevice {
    handle: Handle,
    device: Anchor,
    mtu: u32,
    /// As of the last event.
    up: bool,
}

/// What was done to the anchor. [`AnchorDevice::set`] takes it in, once the rest of the node goes by it.
pub(super) struct Fitted {
    pub(super) device: Anchor,
    /// It was there before.
    pub(super) stood: bool,
    mtu: u32,
}

impl AnchorDevice {
    /// Makes the anchor. Until devices are known it has the MTU that it had.
    pub(super) async fn start(handle: Handle) -> Result<Self> {
        let present = anchor::present_mtu(&handle).await.context("look for the anchor")?;
        let mtu = present.unwrap_or_else(|| anchor_mtu(&BTreeMap::new()));
        let device = anchor::ensure(&handle, mtu).await.context("make the anchor")?;
        Ok(Self { handle, device, mtu, up: false })
    }

    pub(super) fn device(&self) -> Anchor {
        self.device
    }

    pub(super) fn ifindex(&self) -> u32 {
        self.device.ifindex
    }

    /// Makes the anchor as it should be, if it is not there, not up, or of another MTU than the ways out; and now and
    /// then, for what does not show. None if nothing had to be done.
    pub(super) async fn fit(&mut self, links: &BTreeMap<u32, Link>, listed: bool) -> Result<Option<Fitted>> {
        let mtu = anchor_mtu(links);
        let up = links.contains_key(&self.ifindex()) && anchor::is_up(links);
        self.up = up;
        if mtu == self.mtu && up && !listed {
            return Ok(None);
        }
        // What is known of devices is a moment old, and in that moment it may have come up and gone down again.
        let stood = anchor::stands(&self.handle).await.context("look at the anchor")?;
        let device = anchor::ensure(&self.handle, mtu).await.context("fit the anchor")?;
        debug!(mtu, "anchor fitted");
        Ok(Some(Fitted { device, stood, mtu }))
    }

    pub(super) fn set(&mut self, fitted: &Fitted) {
        (self.device, self.mtu) = (fitted.device, fitted.mtu);
    }

    /// Sets parameters back that somebody has changed, and says how many. Those of an anchor that is gone, or was, come
    /// with it.
    pub(super) fn verify_sysctls(&self, links: &BTreeMap<u32, Link>) -> Result<u64> {
        if self.up && links.contains_key(&self.ifindex()) { anchor::set_sysctls() } else { Ok(0) }
    }
}
