//! The anchor of this node: its MTU, state and sysctls.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use proxy_net::Handle;
use proxy_net::anchor::{self, Anchor, Ensured, anchor_mtu};
use proxy_net::link::Link;
use tracing::debug;

/// The anchor device, as last created.
pub(super) struct AnchorDevice {
    handle: Handle,
    device: Anchor,
    mtu: u32,
    /// Set if node ports are reachable at 127.0.0.1.
    serves_localhost: bool,
}

/// The state of the anchor after a check. [`AnchorDevice::set`] stores it once the rest of the node
/// has adapted.
pub(super) struct AnchorState {
    pub(super) device: Anchor,
    /// Set if the anchor existed and was up.
    pub(super) was_up: bool,
    /// The number of restored sysctls; 0 if the anchor was missing or down.
    pub(super) sysctls: u64,
    mtu: u32,
}

impl AnchorDevice {
    /// Creates the anchor. It keeps its present MTU until devices are known.
    pub(super) async fn start(handle: Handle, serves_localhost: bool) -> Result<Self> {
        let present = anchor::present_mtu(&handle)
            .await
            .context("look for the anchor")?;
        let mtu = present.unwrap_or_else(|| anchor_mtu(&BTreeMap::new()));
        let device = anchor::ensure(&handle, mtu)
            .await
            .context("make the anchor")?
            .anchor;
        anchor::set_localhost(&handle, serves_localhost).await?;
        Ok(Self {
            handle,
            device,
            mtu,
            serves_localhost,
        })
    }

    pub(super) fn device(&self) -> Anchor {
        self.device
    }

    pub(super) fn ifindex(&self) -> u32 {
        self.device.ifindex
    }

    /// Restores the anchor if it is missing or down, or if its MTU differs from the uplinks'.
    /// `listed` forces a full check, because some damage does not show. Returns `None` if nothing
    /// was due.
    pub(super) async fn fit(
        &self,
        links: &BTreeMap<u32, Link>,
        listed: bool,
    ) -> Result<Option<AnchorState>> {
        let mtu = anchor_mtu(links);
        let up = links.contains_key(&self.ifindex()) && anchor::is_up(links);
        if mtu == self.mtu && up && !listed {
            return Ok(None);
        }
        // `links` may be older than the anchor's present state.
        let Ensured {
            anchor: device,
            was_up,
            sysctls,
        } = anchor::ensure(&self.handle, mtu)
            .await
            .context("fit the anchor")?;
        let sysctls = sysctls + anchor::set_localhost(&self.handle, self.serves_localhost).await?;
        debug!(mtu, "anchor fitted");
        Ok(Some(AnchorState {
            device,
            was_up,
            sysctls: if was_up { sysctls } else { 0 },
            mtu,
        }))
    }

    pub(super) fn set(&mut self, anchor_state: &AnchorState) {
        (self.device, self.mtu) = (anchor_state.device, anchor_state.mtu);
    }
}
