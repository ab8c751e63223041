//! Continues after work outside the loop: the node's tasks, the sweep, and the agent's end.

use std::time::Duration;

use anyhow::Result;
use proxy_source::health::Problem;
use tokio::time::Instant;
use tracing::warn;

use super::Agent;
use super::node_part::Errand;
use crate::node::Node;

impl Agent {
    pub(super) async fn on_node_back(&mut self, errand: Errand, result: Result<()>) -> Result<()> {
        let is_kept = match errand {
            Errand::Devices => {
                self.record(&Problem::Devices, result);
                let is_kept = self.on_facts().await;
                if self.node.here_mut().is_some_and(Node::takes_judgement) {
                    self.node.judge(self.reports.liveness.work());
                }
                is_kept
            }
            Errand::Follow(following) => {
                self.end(following, result).await;
                false
            }
            Errand::Routes => {
                if result.is_err() {
                    self.node.retry = Some(Instant::now() + self.passes.schedule.sync_period);
                    self.record(&Problem::Node, result);
                }
                self.on_facts().await
            }
            Errand::Judgement | Errand::Peers => {
                // The next full list of devices clears the problem.
                if result.is_err() {
                    self.record(&Problem::Devices, result);
                }
                false
            }
        };
        let owes_pass = std::mem::take(&mut self.node.owes_pass);
        if is_kept || owes_pass && self.passes.schedule.request() {
            self.sync().await
        } else {
            Ok(())
        }
    }

    /// Processes changed devices and routes. Returns true if a pass must follow at once: packets to
    /// an address that left the host must not wait for their Service.
    async fn on_facts(&mut self) -> bool {
        self.report_left_out();
        let Some(node) = self.node.here_mut() else {
            return false;
        };
        self.reports.repairs(node.take_repairs());
        self.health_checks.listen_on(node.listen_addresses()).await;
        let is_shared = node.share_networks(&mut self.desired);
        (self.desired.keep_by_host(node.kept_addresses()) || is_shared) && self.passes.has_synced
    }

    /// Leaves the programs to the next agent, which may have another version.
    pub async fn hand_over(self) {
        let flows = self.sweeper.flows();
        let left = tokio::task::spawn_blocking(move || flows.leave()).await;
        if let Err(error) = left.map_err(anyhow::Error::from).flatten() {
            warn!(
                error = format!("{error:#}"),
                "older versions of kpx, which ignore the marks of flows, cannot take over"
            );
        }
    }

    pub(super) fn record(&mut self, what: &Problem, result: Result<()>) {
        match result {
            Ok(()) => self.reports.health.end(what),
            Err(error) => self.reports.health.begin(what, format!("{error:#}")),
        }
    }

    pub(super) fn on_swept(&mut self, swept: Result<Duration>) {
        let has_swept = swept.is_ok();
        let swept = swept.map(|duration| self.reports.swept(duration, self.sweeper.expired()));
        self.record(&Problem::Flows, swept);
        let checked =
            self.undetected_pods
                .check(&self.counters, &self.reports.health, &self.reports.events);
        self.record(&Problem::Counters, checked);
        // A failed sweep has no new counts.
        let remaining = self.sweeper.fast();
        if has_swept && let Some(node) = self.node.here_mut() {
            let kept = node.keep_fast_flows(remaining);
            if kept.is_err() {
                self.record(&Problem::Devices, kept);
            }
        }
    }
}
