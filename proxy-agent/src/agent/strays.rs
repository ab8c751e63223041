//! Pods of this node that detection takes for clients outside the cluster: they are served, and the operator is told.

use std::time::Duration;

use anyhow::Result;
use proxy_common::counter::Event;
use tokio::time::Instant;

use crate::datapath::Counters;
use crate::events::Events;
use crate::health::{Health, Problem};

/// A problem is over after this long without another such client.
const QUIET: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
pub(super) struct Strays {
    /// Connections counted as of the last look.
    seen: u64,
    last: Option<Instant>,
    /// The cluster is told once.
    told: bool,
}

impl Strays {
    /// Looks whether the programs have counted more of them.
    pub(super) fn look(&mut self, counters: &Counters, health: &Health, events: &Events) -> Result<()> {
        let now = counters.event(Event::PodOutside)?;
        if now == self.seen {
            if self.last.is_some_and(|last| last.elapsed() >= QUIET) {
                self.last = None;
                health.end(&Problem::PodsOutside);
            }
            return Ok(());
        }
        (self.seen, self.last) = (now, Some(Instant::now()));
        let why = "connections came from addresses in this node's podCIDRs through devices that kpx takes for no pod's; \
                   they are served, masqueraded where a client outside would be: `kpx devices` shows the roles, and \
                   --cluster-cidr or --detect-local-mode tells pods apart";
        health.begin(&Problem::PodsOutside, why);
        if !std::mem::replace(&mut self.told, true) {
            events.pods_outside(why);
        }
        Ok(())
    }
}
