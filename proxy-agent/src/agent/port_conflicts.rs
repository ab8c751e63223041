//! Finds processes of this node that receive no packets because a Service has their address and
//! port. The agent reports them and keeps the Service: kube-proxy serves such Services, and some
//! clusters depend on them for ingress.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use proxy_common::addr::Proto;
use tracing::{debug, warn};

use proxy_core::desired::Desired;
use proxy_net::listeners::Listeners;
use proxy_source::events::Events;

#[derive(Debug, Default)]
pub(super) struct PortConflicts {
    /// The external frontends at the node's own addresses, as of the last scan.
    known: BTreeSet<(IpAddr, Proto, u16)>,
    /// The frontends' revision and the node's own addresses as of the last scan.
    seen: Option<(u64, BTreeSet<IpAddr>)>,
}

impl PortConflicts {
    /// Scans for processes behind the new frontends at the node's `own` addresses.
    pub(super) fn scan(&mut self, desired: &Desired, own: BTreeSet<IpAddr>, events: &Events) {
        if self
            .seen
            .as_ref()
            .is_some_and(|(revision, seen)| (*revision, seen) == (desired.revision(), &own))
        {
            return;
        }
        let now: BTreeSet<_> = desired
            .external_frontends()
            .filter(|(addr, ..)| own.contains(addr))
            .collect();
        self.seen = Some((desired.revision(), own));
        let new: Vec<_> = now.difference(&self.known).copied().collect();
        self.known = now;
        if new.is_empty() {
            return;
        }
        let listeners = Listeners::read().unwrap_or_else(|error| {
            debug!(
                error = format!("{error:#}"),
                "the listeners of this node cannot be read"
            );
            Listeners::default()
        });
        for (addr, proto, port) in new
            .into_iter()
            .filter(|&(addr, proto, port)| listeners.take(addr, proto, port))
        {
            let Some((service, field)) = desired.claimant(addr, proto, port) else {
                continue;
            };
            let at = SocketAddr::new(addr, port);
            let note = format!(
                "{field}: a process listens at {at}/{proto:?}, but packets to it go to this Service"
            );
            warn!(%service, field, address = %at, ?proto, "a process of this node is cut off by a Service");
            events.port_conflict(&service, desired.uid(&service), note);
        }
    }
}
