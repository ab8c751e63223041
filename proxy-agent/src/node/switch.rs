//! Switches the fast path as the rules of this host allow.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use ipnet::IpNet;
use proxy_datapath::Remaining;
use proxy_net::netfilter::{Netfilter, Refusal};
use proxy_net::{JudgedRules, RuleState};
use tracing::warn;

use super::Node;
use super::detect::Detector;
use super::fast_path::FastPathState;
use super::leaving;
use super::whole_connections::Facts;

/// The names of devices by which rules are judged.
pub(super) struct JudgedNames {
    /// Those that are no pods', and those of them by which no packet leaves.
    no_pods: [BTreeSet<String>; 2],
    /// Those of pods, if netfilter knows them by these names.
    pods: Option<BTreeSet<String>>,
    /// Those of uplinks by which UDP exchanges of clients outside skip the stack.
    ways: BTreeSet<String>,
}

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
        let netfilter = Netfilter::read().await;
        let no_pods = self.devices.surely_no_pods();
        let no_ways = self.devices.surely_no_ways();
        let pod_cidrs = self.rows.pod_cidrs().to_vec();
        let pods = self.devices.bare_pods();
        let ways = self.devices.ways();
        let facts = Facts {
            cluster,
            pod_cidrs,
            no_pods,
            no_ways,
            pods,
            ways,
        };
        self.judges_pods = false;
        if let Some(netfilter) = netfilter.as_ref().ok().filter(|_| !self.is_host_mode()) {
            self.note_refusals(netfilter, &facts);
        }
        self.fast_path
            .judge(
                &netfilter,
                self.programs.attachments.changes(),
                &self.handle,
                &facts,
            )
            .await;
        let written = self
            .rows
            .write_unchanged(&self.detection, self.fast_path.unchanged());
        // So that the next look tries again.
        written.inspect_err(|_| self.fast_path = before.clone())?;
        self.switch_fast_path(before)?;
        self.leave_whole_flows().await?;
        self.judged_rules.set(state);
        Ok(())
    }

    /// Has open connections that were opened past the stack take it, if rules may stop their
    /// packets. It begins once the node's networks are known, by which the rules have to be judged.
    async fn leave_whole_flows(&mut self) -> Result<()> {
        let Some(staying) = self
            .fast_path
            .staying()
            .filter(|_| !self.rows.is_inherited())
            .cloned()
        else {
            return Ok(());
        };
        let left = leaving::leave(&mut self.whole_flows, &staying, self.fast_path.tracks()).await;
        let before = self.fast_path.clone();
        self.fast_path
            .note_left(left.context("have open connections take the stack")?);
        self.switch_fast_path(before)
    }

    /// Returns the names of devices by which rules were judged.
    pub(super) fn judged_names(&self) -> JudgedNames {
        let no_pods = [self.devices.surely_no_pods(), self.devices.surely_no_ways()];
        JudgedNames {
            no_pods,
            pods: self.devices.bare_pods(),
            ways: self.devices.ways(),
        }
    }

    /// Returns true once if the rules have to be judged again for a pod's device or an uplink that
    /// is new.
    pub fn takes_judgement(&mut self) -> bool {
        std::mem::take(&mut self.judges_pods)
    }

    /// Looks again if one of these devices is gone, or of another kind. Call it before the programs
    /// know of that.
    ///
    /// For a pod's device or an uplink that is new, open connections take the stack until the rules
    /// are judged later: a new pod does not wait for that.
    pub(super) async fn judge_for_devices(&mut self, before: &JudgedNames) -> Result<()> {
        let now = self.judged_names();
        if before
            .no_pods
            .iter()
            .zip(&now.no_pods)
            .any(|(before, now)| !before.is_subset(now))
        {
            return self.judge_fast_path().await;
        }
        let is_known = before
            .pods
            .as_ref()
            .zip(now.pods.as_ref())
            .is_some_and(|(before, now)| now.is_subset(before));
        if is_known && now.ways.is_subset(&before.ways) || !self.knows_devices() {
            return Ok(());
        }
        let state = self.fast_path.clone();
        self.fast_path.forget_pods();
        self.judges_pods = true;
        self.switch_fast_path(state)
    }

    /// Returns the place of the rules' state that was judged last.
    pub fn judged_rules(&self) -> JudgedRules {
        self.judged_rules.clone()
    }

    /// Has flows that were opened past the stack go on past it, and others guarded, as long as
    /// there are any.
    pub fn keep_fast_flows(&mut self, remaining: Remaining) -> Result<()> {
        let before = self.fast_path.clone();
        if self.fast_path.keep(remaining) {
            self.judged_rules.set(None); // A program opened one while the rules were judged.
        }
        self.switch_fast_path(before)
    }

    /// Notes the chains that refuse what clients outside and the cluster's pods exchange, at least
    /// by some devices.
    fn note_refusals(&mut self, netfilter: &Netfilter, facts: &Facts) {
        let pods = IpNet::aggregate(&[&facts.cluster[..], &facts.pod_cidrs].concat());
        let refusals = netfilter
            .refusals(&pods)
            .into_iter()
            .filter(|refusal| !refusal.is_doubtful);
        let refusals = refusals.map(|Refusal { why, remedy, .. }| {
            format!("clients outside may not reach pods: {why}; accept pods: {remedy}")
        });
        let refusals: Vec<_> = refusals.collect();
        for notice in refusals
            .iter()
            .filter(|notice| !self.refusals.contains(notice))
        {
            warn!(
                notice,
                "other programs' rules drop packets that kpx forwards"
            );
        }
        self.refusals = refusals;
    }

    /// Returns the words about such chains, as of the last look.
    pub fn refusals(&self) -> &[String] {
        &self.refusals
    }

    fn switch_fast_path(&mut self, before: FastPathState) -> Result<()> {
        if before.flag() == self.fast_path.flag() {
            return Ok(());
        }
        self.write_node().inspect_err(|_| self.fast_path = before) // So that the next look tries again.
    }
}
