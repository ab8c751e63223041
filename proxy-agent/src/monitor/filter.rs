//! Selects events for a watcher.

use std::net::IpAddr;

use super::event::Event;
use proxy_view::object_name::ObjectName;

/// A reader's selection; every field that is set must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Filter {
    pub(crate) service: Option<ObjectName>,
    pub(crate) namespace: Option<String>,
    pub(crate) client: Option<IpAddr>,
    pub(crate) reason: Option<String>,
    /// Set to select dropped and rejected packets only.
    pub(crate) unserved: bool,
    /// Set to select packets that open flows only.
    pub(crate) decisions: bool,
}

impl Filter {
    /// Returns true if the event matches. Lost events count as matching, because they might have
    /// matched.
    pub(crate) fn wants(&self, event: &Event) -> bool {
        let is_decision = event.what == "decision";
        let kind = if self.decisions {
            is_decision
        } else {
            !(self.unserved && is_decision)
        };
        event.lost > 0
            || kind
                && self
                    .reason
                    .as_ref()
                    .is_none_or(|reason| event.reason.as_ref() == Some(reason))
                && self
                    .client
                    .is_none_or(|client| event.client_ip() == Some(client))
                && self
                    .service
                    .as_ref()
                    .is_none_or(|service| event.is_to(service))
                && self
                    .namespace
                    .as_ref()
                    .is_none_or(|namespace| event.is_in(namespace))
    }
}
