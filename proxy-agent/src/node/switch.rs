//! Switches the fast path as the rules of this host allow.

use std::collections::BTreeSet;

use anyhow::Result;
use proxy_net::{JudgedRules, RuleState};

use super::Node;
use super::detect::Detector;
use super::fast_path::FastPathState;
use super::whole::Facts;

impl Node {
    /// Looks which packets may skip the stack, and tells the programs.
    pub async fn judge_fast_path(&mut self) -> Result<()> {
        if !self.knows_devices() {
            return Ok(());
        }
        let before = self.fast_path.clone();
        // Rules may change while they are judged.
        let state = RuleState::read(&self.handle).await.ok();
        let cluster = match &self.options.detector {
            Detector::ClusterCidr(nets) => nets.clone(),
            _ => Vec::new(),
        };
        let (no_pods, no_ways) = (self.devices.surely_no_pods(), self.devices.surely_no_ways());
        let facts = Facts { cluster, pod_cidrs: self.rows.pod_cidrs().to_vec(), no_pods, no_ways };
        self.fast_path.judge(self.programs.attachments.changes(), &self.handle, &facts).await;
        let written = self.rows.write_unchanged(&self.detection, self.fast_path.unchanged());
        // So that the next look tries again.
        written.inspect_err(|_| self.fast_path = before.clone())?;
        self.switch_fast_path(before)?;
        self.judged_rules.set(state);
        Ok(())
    }

    /// Returns the names of devices by which rules were judged: those that are no pods', and those of them by which no packet leaves.
    pub(super) fn judged_names(&self) -> [BTreeSet<String>; 2] {
        [self.devices.surely_no_pods(), self.devices.surely_no_ways()]
    }

    /// Looks again if one of these devices is gone, or of another kind. Call it before the programs know of that.
    pub(super) async fn judge_for_devices(&mut self, before: &[BTreeSet<String>; 2]) -> Result<()> {
        let is_due = before.iter().zip(&self.judged_names()).any(|(before, now)| !before.is_subset(now));
        if is_due { self.judge_fast_path().await } else { Ok(()) }
    }

    /// Returns the place of the rules' state that was judged last.
    pub fn judged_rules(&self) -> JudgedRules {
        self.judged_rules.clone()
    }

    /// Has flows that were opened past the stack go on past it, as long as there are any.
    pub fn keep_whole_flows(&mut self, are_there: bool) -> Result<()> {
        let before = self.fast_path.clone();
        self.fast_path.keep_whole_flows(are_there);
        self.switch_fast_path(before)
    }

    fn switch_fast_path(&mut self, before: FastPathState) -> Result<()> {
        if before.flag() == self.fast_path.flag() {
            return Ok(());
        }
        self.write_node().inspect_err(|_| self.fast_path = before) // So that the next look tries again.
    }
}
