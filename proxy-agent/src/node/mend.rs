//! What others may undo at any time: noticed once in a sync period, if no event tells sooner, and mended.

use anyhow::{Context, Result};
use tracing::{debug, warn};

use super::Node;
use super::ways::{Changed, Ways};
use crate::datapath::{Hooks, Missing};
use crate::health::Health;
use crate::net::anchor::{self, anchor_mtu};

/// How much of a node has been put back after others had undone it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mended {
    /// Programs that somebody had taken off a device.
    pub programs: u64,
    /// Times that the anchor was gone or down.
    pub anchors: u64,
    /// Routes to it, gone or changed.
    pub routes: u64,
    /// Rules that lead there.
    pub rules: u64,
    /// Kernel parameters.
    pub sysctls: u64,
}

impl Mended {
    pub(super) fn ways(&mut self, Changed { routes, rules }: Changed) {
        if routes + rules > 0 {
            warn!(routes, rules, "ways to the anchor were gone or changed, and are put back");
        }
        self.routes += routes;
        self.rules += rules;
    }
}

impl Node {
    /// What was mended since this was last asked.
    pub fn take_mended(&mut self) -> Mended {
        std::mem::take(&mut self.mended)
    }

    /// Puts programs back that somebody has taken off. Whoever lost one serves nobody, so that the device's other one is
    /// missing for a moment as well harms nobody.
    pub(super) async fn verify_programs(&mut self, health: &Health) -> Result<()> {
        let missing = self.attachments.verify(&self.handle).await.context("look for programs that were taken off")?;
        for Missing { ifindex, hook } in &missing {
            if let Some(attached) = self.attachments.detach(*ifindex) {
                warn!(device = attached.name, hook = hook.name(), "the program was taken off, attaching it again");
            }
            self.mended.programs += 1;
        }
        if !missing.is_empty() {
            self.attach(health);
            self.attachments.attach(self.anchor.ifindex, anchor::NAME, Hooks::Anchor)?;
        }
        // Last: nobody looks again for what was detached above.
        let sockets = self.attachments.mend_sockets().context("look for programs that were taken off sockets")?;
        self.mended.programs += sockets;
        Ok(())
    }

    /// Parameters that somebody has set back, as systemd-sysctl does whenever it is run. Those of an anchor that is gone, or
    /// was, come with it.
    pub(super) fn verify_sysctls(&mut self) -> Result<()> {
        if self.anchor_up && self.links.contains_key(&self.anchor.ifindex) {
            self.mended.sysctls += anchor::set_sysctls()?;
        }
        if let Some(changes) = self.attachments.changes() {
            changes.keep_qdiscs(|ifindex| self.links.contains_key(&ifindex))?;
            self.mended.sysctls += u64::from(changes.reserve_ports()?);
        }
        Ok(())
    }

    /// Makes the anchor as it should be, if it is not there, not up, or of another MTU than the ways out; and now and
    /// then, for what does not show. True if anything was done: then routes may have been lost.
    pub(super) async fn fit_anchor(&mut self, listed: bool) -> Result<bool> {
        let mtu = anchor_mtu(&self.links);
        let up = self.links.contains_key(&self.anchor.ifindex) && anchor::is_up(&self.links);
        self.anchor_up = up;
        if mtu == self.anchor_mtu && up && !listed {
            return Ok(false);
        }
        // What is known of devices is a moment old, and in that moment it may have come up and gone down again.
        let stood = anchor::stands(&self.handle).await.context("look at the anchor")?;
        let anchor = anchor::ensure(&self.handle, mtu).await.context("fit the anchor")?;
        self.mended.anchors += u64::from(!stood);
        if anchor != self.anchor {
            warn!(ifindex = anchor.ifindex, "the anchor was gone, making it again");
            self.attachments.detach(self.anchor.ifindex);
            self.attachments.attach(anchor.ifindex, anchor::NAME, Hooks::Anchor)?;
            self.ways = Ways::open(&self.handle, anchor.ifindex).await?;
            self.anchor = anchor;
            self.write_node()?;
        }
        debug!(mtu, "anchor fitted");
        self.anchor_mtu = mtu;
        Ok(true)
    }
}
