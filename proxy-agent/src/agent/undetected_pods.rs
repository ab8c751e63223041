//! Finds pods of this node that detection classifies as clients outside the cluster. The programs
//! serve such pods, and the agent reports them.

use std::time::Duration;

use anyhow::Result;
use proxy_common::counter::Event;
use tokio::time::Instant;

use proxy_datapath::Counters;
use proxy_source::events::Events;
use proxy_source::health::{Health, Problem};

/// The problem ends after this time without such a connection.
const QUIET: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
pub(super) struct UndetectedPods {
    seen: u64,
    last: Option<Instant>,
    /// Set once the only Event is sent.
    reported: bool,
}

impl UndetectedPods {
    /// Checks whether the programs have counted more connections of such pods.
    pub(super) fn check(
        &mut self,
        counters: &Counters,
        health: &Health,
        events: &Events,
    ) -> Result<()> {
        let now = counters.event(Event::PodOutside)?;
        if now == self.seen {
            if self.last.is_some_and(|last| last.elapsed() >= QUIET) {
                self.last = None;
                health.end(&Problem::PodsOutside);
            }
            return Ok(());
        }
        (self.seen, self.last) = (now, Some(Instant::now()));
        let why = "connections from this node's podCIDRs arrived at devices that are not pods'; they are served, and masqueraded as external clients: see the roles in `kpx devices`, and set --cluster-cidr or --detect-local-mode";
        health.begin(&Problem::PodsOutside, why);
        if !std::mem::replace(&mut self.reported, true) {
            events.undetected_pods(why);
        }
        Ok(())
    }
}
