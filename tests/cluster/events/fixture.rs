//! A node in its own namespace, its API server, and kpx.

use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};
use proxy_view::status::Status;
use serde_json::Value;
use testbed::agent::{Agent, DEADLINE, wait_until};
use testbed::http::METRICS;
use testbed::netns::NetNs;
use testbed::watched_node::{self, WatchedNode, node};

/// The size of the connection table is global to the machine; tests leave it alone.
const NO_CONNTRACK_SIZE: &str = "--conntrack-max-per-core 0";

pub(crate) struct Fixture(WatchedNode);

impl Deref for Fixture {
    type Target = WatchedNode;

    fn deref(&self) -> &WatchedNode {
        &self.0
    }
}

impl Fixture {
    /// Makes the node n1 at 192.0.2.1 and fd00::1, so far without a Node object. `wire` is the
    /// other end of its eth0.
    pub(crate) fn new() -> Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let ns = NetNs::machine(&format!("events{}", MADE.fetch_add(1, Ordering::Relaxed)))?;
        Ok(Self(WatchedNode::new(ns)?))
    }

    /// Makes the same with the Node object.
    pub(crate) fn with_node() -> Result<Self> {
        let fixture = Self::new()?;
        fixture.put(&node(&["192.0.2.1", "fd00::1"]))?;
        Ok(fixture)
    }

    /// Starts kpx, and waits until it answers.
    pub(crate) fn start(&self, arguments: &str) -> Result<Agent<'_>> {
        self.kpx(&format!("{arguments} {NO_CONNTRACK_SIZE}"))
    }

    /// Starts kpx, and waits until it is healthy.
    pub(crate) fn start_healthy(&self, arguments: &str) -> Result<Agent<'_>> {
        self.healthy_kpx(&format!("{arguments} {NO_CONNTRACK_SIZE}"))
    }

    /// Returns the Events, in the order of their first times.
    pub(crate) fn events(&self) -> Vec<Value> {
        let mut events = self.api.list("events.events.k8s.io");
        events.sort_by_key(|event| event["eventTime"].to_string());
        events
    }

    /// Waits for an Event with this reason for which `holds` returns true.
    pub(crate) fn reported(&self, reason: &str, holds: impl Fn(&Value) -> bool) -> Result<Value> {
        let find = || {
            self.events()
                .into_iter()
                .find(|event| event["reason"] == reason && holds(event))
        };
        wait_until(DEADLINE, &format!("{reason} is reported"), || {
            Ok(find().is_some())
        })
        .with_context(|| format!("reported: {:#?}\n{}", self.events(), self.log()))?;
        find().context("an event that stays")
    }

    /// Returns the body of `/metrics`.
    pub(crate) fn metrics(&self) -> Result<String> {
        Ok(self.get(METRICS, "/metrics")?.body)
    }
}

/// Waits until the agent's status has a problem.
pub(crate) fn wait_problem(kpx: &Agent, what: &str, why: &str) -> Result<()> {
    let is_it = |status: &Status| {
        status
            .problems
            .iter()
            .any(|problem| problem.what == what && problem.why.contains(why))
    };
    kpx.wait(DEADLINE, why, is_it)
}

/// Waits until the agent exits by itself with 1 and this reason.
pub(crate) fn fails(mut kpx: Agent, why: &str) -> Result<()> {
    let status = kpx.ended(DEADLINE)?;
    let log = kpx.log();
    ensure!(
        status.code() == Some(1) && log.contains(why),
        "{status}, and not {why:?}: {log}"
    );
    Ok(())
}

/// Returns a Service with one UDP port in both families: `nth` of the service network, port 53.
pub(crate) fn service(name: &str, nth: u8) -> Value {
    watched_node::service(name, nth, "UDP", 53)
}

/// Returns a slice with an endpoint of `service` at port 5353.
pub(crate) fn slice(service: &str, address: &str) -> Value {
    watched_node::slice(service, address, "UDP", 5353)
}
