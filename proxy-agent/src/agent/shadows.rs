//! Processes of this node that get no packets any more because a Service has their address and port: told, not hindered,
//! since kube-proxy serves such Services, and there are clusters that are entered so.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use proxy_common::addr::Proto;
use tracing::{debug, warn};

use crate::desired::Desired;
use crate::events::Events;
use crate::net::listeners::Listeners;

#[derive(Debug, Default)]
pub(super) struct Shadows {
    /// External frontends at the node's own addresses, as of the last look.
    known: BTreeSet<(IpAddr, Proto, u16)>,
    /// What that look was at.
    seen: Option<(u64, BTreeSet<IpAddr>)>,
}

impl Shadows {
    /// Looks for processes behind what is new among the frontends at the node's `own` addresses.
    pub(super) fn look(&mut self, desired: &Desired, own: BTreeSet<IpAddr>, events: &Events) {
        if self.seen.as_ref().is_some_and(|(revision, seen)| (*revision, seen) == (desired.revision(), &own)) {
            return;
        }
        let now: BTreeSet<_> = desired.external_frontends().filter(|(addr, ..)| own.contains(addr)).collect();
        self.seen = Some((desired.revision(), own));
        let new: Vec<_> = now.difference(&self.known).copied().collect();
        self.known = now;
        if new.is_empty() {
            return;
        }
        let listeners = Listeners::read().unwrap_or_else(|error| {
            debug!(error = format!("{error:#}"), "cannot list the sockets that listen on this node");
            Listeners::default()
        });
        for (addr, proto, port) in new.into_iter().filter(|&(addr, proto, port)| listeners.take(addr, proto, port)) {
            let Some((service, field)) = desired.said_by(addr, proto, port) else { continue };
            let at = SocketAddr::new(addr, port);
            let note =
                format!("{field}: a process listens at {at}/{proto:?}, and what is sent there goes to this Service");
            warn!(%service, field, address = %at, ?proto, "a process of this node is cut off by a Service");
            events.shadows(&service, desired.uid(&service), note);
        }
    }
}
