//! Tells objects which of their parts have no effect.

use std::collections::BTreeSet;

use proxy_core::model::Skipped;
use tracing::warn;

use super::Agent;
use crate::node::Node;

impl Agent {
    /// Tells Services what they have begun to go without on this node.
    pub(super) fn tell_left_out(&mut self) {
        let left_out: BTreeSet<_> = self.node.here().map_or(&[][..], Node::left_out).iter().cloned().collect();
        for skipped in left_out.difference(&self.told_left_out) {
            self.skip(skipped);
        }
        self.told_left_out = left_out;
    }

    /// Logs that a part of an object has no effect, and tells the object.
    pub(super) fn skip(&self, skipped: &Skipped) {
        warn!(object = %skipped.object, field = skipped.field, why = skipped.why, "skipped");
        match self.desired.service_refused(skipped) {
            Some(service) => {
                self.reports.events.endpoint_refused(service.clone(), self.desired.uid(&service), skipped);
            }
            None => {
                let (uid, concerned) = (self.desired.uid(&skipped.object), self.desired.concerned(&skipped.object));
                self.reports.events.skipped(skipped, uid, &concerned);
            }
        }
    }
}
