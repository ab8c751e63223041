//! Notices and repairs changes by other programs, which may come at any time. A check runs once in a sync period,
//! unless an event comes sooner.

use anyhow::{Context, Result};
use tracing::{debug, warn};

use super::Node;
use super::ways::{Changed, Ways};
use crate::datapath::{Hooks, Missing};
use crate::health::Health;
use crate::net::anchor::{self, anchor_mtu};

/// The number of repairs after changes by other programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mended {
    /// The programs that were removed from a device.
    pub programs: u64,
    /// The times that the anchor was gone or down.
    pub anchors: u64,
    /// The routes to the anchor that were gone or changed.
    pub routes: u64,
    /// The rules that lead to the anchor.
    pub rules: u64,
    /// The kernel parameters.
    pub sysctls: u64,
}

impl Mended {
    pub(super) fn ways(&mut self, Changed { routes, rules }: Changed) {
        if routes + rules > 0 {
            warn!(routes, rules, "routes or rules to the anchor were gone or changed, and are restored");
        }
        self.routes += routes;
        self.rules += rules;
    }
}

impl Node {
    /// Returns the repairs since the last call.
    pub fn take_mended(&mut self) -> Mended {
        std::mem::take(&mut self.mended)
    }

    /// Reattaches programs that were removed from outside. A device that lost one program serves no flow, so it may
    /// lose the other one for a moment.
    pub(super) async fn verify_programs(&mut self, health: &Health) -> Result<()> {
        let missing = self.attachments.verify(&self.handle).await.context("look for programs that were removed")?;
        for Missing { ifindex, hook } in &missing {
            if let Some(attached) = self.attachments.detach(*ifindex) {
                warn!(device = attached.name, hook = hook.name(), "the program was removed, reattaching");
            }
            self.mended.programs += 1;
        }
        if !missing.is_empty() {
            self.attach(health);
            self.attachments.attach(self.anchor.ifindex, anchor::NAME, Hooks::Anchor)?;
        }
        // Sockets come last: no later step checks the devices detached above.
        let sockets = self.attachments.mend_sockets().context("look for programs that were removed from sockets")?;
        self.mended.programs += sockets;
        Ok(())
    }

    /// Sets parameters again that were reset from outside, as systemd-sysctl does on each run. The parameters of a
    /// missing anchor are set when it is made.
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

    /// Repairs the anchor if it is missing, down, or of another MTU than the ways out. A listing repairs it always,
    /// because some changes are not visible. Returns true if anything was done: then routes may have been lost.
    pub(super) async fn fit_anchor(&mut self, listed: bool) -> Result<bool> {
        let mtu = anchor_mtu(&self.links);
        let up = self.links.contains_key(&self.anchor.ifindex) && anchor::is_up(&self.links);
        self.anchor_up = up;
        if mtu == self.anchor_mtu && up && !listed {
            return Ok(false);
        }
        // The known state of devices is a moment old. Since then the anchor may have come up and gone down again.
        let stood = anchor::stands(&self.handle).await.context("look at the anchor")?;
        let anchor = anchor::ensure(&self.handle, mtu).await.context("fit the anchor")?;
        self.mended.anchors += u64::from(!stood);
        if anchor != self.anchor {
            warn!(ifindex = anchor.ifindex, "the anchor was gone and has been made again");
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
