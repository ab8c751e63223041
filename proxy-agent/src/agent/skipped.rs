//! Reports parts of objects that have no effect.

use std::collections::BTreeSet;

use proxy_core::desired::Desired;
use proxy_core::model::{Cause, Skipped};
use tracing::{debug, warn};

use super::Agent;
use crate::node::Node;

impl Agent {
    /// Reports to Services which of their parts newly have no effect on this node.
    pub(super) fn report_left_out(&mut self) {
        let left_out: BTreeSet<_> = self
            .node
            .here()
            .map_or(&[][..], Node::left_out)
            .iter()
            .cloned()
            .collect();
        for skipped in left_out.difference(&self.left_out) {
            self.skip(skipped);
        }
        self.left_out = left_out;
    }

    /// Logs that a part of an object has no effect, and sends an Event to the object.
    pub(super) fn skip(&self, skipped: &Skipped) {
        if skipped.cause == Cause::NotTaken {
            debug!(object = %skipped.object, field = skipped.field, why = skipped.why, "not taken");
            return;
        }
        warn!(object = %skipped.object, field = skipped.field, why = skipped.why, "skipped");
        match self.desired.service_refused(skipped) {
            Some(service) => {
                self.reports.events.endpoint_refused(
                    service.clone(),
                    self.desired.uid(&service),
                    skipped,
                );
            }
            None => {
                let uid = self.desired.uid(&skipped.object);
                let concerned = self.desired.concerned(&skipped.object);
                self.reports.events.skipped(skipped, uid, &concerned);
            }
        }
    }
}

/// Counts the addresses that a host in mode `host` leaves to the network. Any number is normal, and
/// not a problem.
pub(super) fn not_taken(desired: &Desired) -> Option<String> {
    let not_taken: Vec<_> = desired
        .skipped()
        .filter(|skipped| skipped.cause == Cause::NotTaken)
        .collect();
    let services = not_taken
        .iter()
        .map(|skipped| &skipped.object)
        .collect::<BTreeSet<_>>()
        .len();
    (services > 0).then(|| {
        let count = not_taken.len();
        format!(
            "{count} external addresses, of {services} Services, are left to the network: host mode takes those \
             within --external-ip-cidrs alone (kpx services -o wide)"
        )
    })
}
