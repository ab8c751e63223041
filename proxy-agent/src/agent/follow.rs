//! The last part of a pass: it updates the node's routes and rules after the frontends.

use std::time::Duration;

use anyhow::Result;
use proxy_metrics::Phase;
use proxy_source::health::Problem;
use tokio::time::{Instant, timeout};

use super::Agent;
use super::node_part::Errand;
use super::reports::Pass;
use crate::all::all;
use crate::choices::Mode;

/// The maximum time for which the loop waits for the node. The kernel changes routes and rules
/// within this time unless another program holds RTNL.
const AT_ONCE: Duration = Duration::from_millis(50);

/// A pass that ends when the node has updated routes and rules.
pub(super) struct Following {
    pass: Pass,
    started: Instant,
    written: bool,
    /// The result of the part that needs no RTNL.
    done: Result<()>,
}

impl Agent {
    /// Updates the node to the content of the maps. A node that is away is updated when it is back.
    pub(super) async fn follow(&mut self, pass: Pass, written: bool) -> Result<()> {
        let Some(node) = self.node.here_mut() else {
            self.node.owes_pass = true;
            // If an earlier pass still updates the node, this pass ends together with it.
            if !self.node.is_following() {
                self.reports.end(pass, |family| {
                    self.node.retry.is_none() && self.writer.is_whole(family)
                });
            }
            return Ok(());
        };
        let (is_due, done) = node.on_sync(&self.desired, written);
        let following = Following {
            pass,
            started: Instant::now(),
            written,
            done,
        };
        if !is_due {
            self.end(following, Ok(())).await;
            return Ok(());
        }
        let health = self.reports.health.clone();
        let work = self.reports.liveness.work();
        self.node.follow(following, health, work);
        if let Ok(back) = timeout(AT_ONCE, self.node.back()).await
            && let (Errand::Follow(following), result) = back?
        {
            self.end(following, result).await;
        }
        Ok(())
    }

    pub(super) async fn end(&mut self, following: Following, result: Result<()>) {
        let Following {
            mut pass,
            started,
            written,
            done,
        } = following;
        let result = all([result, done]);
        pass.passed(Phase::Node, started.elapsed());
        self.node.retry = result
            .is_err()
            .then(|| Instant::now() + self.passes.schedule.sync_period);
        self.reports.end(pass, |family| {
            result.is_ok() && self.writer.is_whole(family)
        });
        // After a change of ranges the node has read its routes again.
        if let Some(node) = self.node.here_mut()
            && node.share_networks(&mut self.desired)
        {
            self.passes.schedule.ask_again();
        }
        // The Node object decides which of the machine's addresses are the node's.
        if let Some(node) = self.node.here() {
            self.health_checks.listen_on(node.listen_addresses()).await;
        }
        if written && self.mode == Mode::Node {
            self.port_conflicts.scan(
                &self.desired,
                self.node.own_addresses(),
                &self.reports.events,
            );
        }
        self.record(&Problem::Node, result);
        self.report_left_out();
    }
}
