//! Selects events by what a reader asks for.

use std::net::IpAddr;

use super::event::Event;
use proxy_view::object_name::ObjectName;

/// The events that a reader wants; every field that is set must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Filter {
    pub(crate) service: Option<ObjectName>,
    pub(crate) namespace: Option<String>,
    pub(crate) client: Option<IpAddr>,
    pub(crate) reason: Option<String>,
    /// True if only dropped and rejected packets are wanted.
    pub(crate) unserved: bool,
    /// True if only packets that open flows are wanted.
    pub(crate) decisions: bool,
}

impl Filter {
    /// Returns true if the event is wanted. Lost events might have been wanted, so they count as
    /// wanted.
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
