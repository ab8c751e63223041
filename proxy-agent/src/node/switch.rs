//! Switches the fast path as this host's rules allow.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use ipnet::IpNet;
use proxy_datapath::Remaining;
use proxy_net::netfilter::{Netfilter, Refusal};
use proxy_net::{JudgedRules, RuleState};
use tracing::warn;

use super::Node;
use super::bypass_connections::Facts;
use super::detect::Detector;
use super::fast_path::FastPathState;
use super::leaving;

/// The device names that the rules are evaluated for.
pub(super) struct JudgedNames {
    /// The devices of no pod, and those of them that are no uplink: see [`Facts`].
    no_pods: [BTreeSet<String>; 2],
    /// The pods' devices, if netfilter uses their names.
    pods: Option<BTreeSet<String>>,
    /// The uplinks where UDP exchanges with clients outside bypass the stack.
    ways: BTreeSet<String>,
}

impl Node {
    /// Evaluates which packets may bypass the stack, and updates the programs.
    pub async fn judge_fast_path(&mut self) -> Result<()> {
        if !self.knows_devices() {
            return Ok(());
        }
        let before = self.fast_path.clone();
        // The state precedes the evaluation, during which rules may change.
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
        // The next evaluation tries again.
        written.inspect_err(|_| self.fast_path = before.clone())?;
        // Before the state counts as evaluated: packets that are handed over pass no rule.
        if self.options.hands_over {
            self.write_devices()?;
        }
        self.switch_fast_path(before)?;
        self.leave_bypass_flows().await?;
        self.judged_rules.set(state);
        Ok(())
    }

    /// Moves bypass connections to the stack if rules may stop their packets. Does nothing before
    /// the node's networks are known, because the evaluation needs them.
    async fn leave_bypass_flows(&mut self) -> Result<()> {
        let Some(staying) = self
            .fast_path
            .staying()
            .filter(|_| !self.rows.is_inherited())
            .cloned()
        else {
            return Ok(());
        };
        let left = leaving::leave(&mut self.bypass_flows, &staying, self.fast_path.tracks()).await;
        let before = self.fast_path.clone();
        self.fast_path
            .note_left(left.context("have open connections take the stack")?);
        self.switch_fast_path(before)
    }

    pub(super) fn judged_names(&self) -> JudgedNames {
        let no_pods = [self.devices.surely_no_pods(), self.devices.surely_no_ways()];
        JudgedNames {
            no_pods,
            pods: self.devices.bare_pods(),
            ways: self.devices.ways(),
        }
    }

    /// Returns true once after a pod's device or an uplink appeared that needs another evaluation.
    pub fn takes_judgement(&mut self) -> bool {
        std::mem::take(&mut self.judges_pods)
    }

    /// Evaluates the rules again if one of these devices is gone or has another kind. Call it
    /// before the programs get the new rows.
    ///
    /// A new pod does not wait for an evaluation: if a pod's device or an uplink is new, open
    /// connections go through the stack until the later evaluation.
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

    pub fn judged_rules(&self) -> JudgedRules {
        self.judged_rules.clone()
    }

    /// Keeps bypass flows on the bypass, and liberal flows guarded, while any exist.
    pub fn keep_fast_flows(&mut self, remaining: Remaining) -> Result<()> {
        let before = self.fast_path.clone();
        if self.fast_path.keep(remaining) {
            self.judged_rules.set(None); // A program opened a flow during the evaluation.
        }
        self.switch_fast_path(before)
    }

    /// Notes the chains that drop traffic between clients outside the cluster and pods, on at least
    /// some devices.
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

    /// Returns the notices about chains that drop traffic from clients outside, as of the last
    /// evaluation.
    pub fn refusals(&self) -> &[String] {
        &self.refusals
    }

    fn switch_fast_path(&mut self, before: FastPathState) -> Result<()> {
        if before.flag() == self.fast_path.flag() {
            return Ok(());
        }
        self.write_node().inspect_err(|_| self.fast_path = before) // The next evaluation retries.
    }
}
