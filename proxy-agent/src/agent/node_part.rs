//! The node's part of the agent, which may be away at work on devices, routes and rules.
//!
//! The kernel changes all of these, and attaches programs, under one lock (RTNL), and any program
//! on the machine can hold it for long. So that work has a thread of its own, and the agent's loop
//! goes on with Services and endpoints meanwhile.

use std::collections::BTreeSet;
use std::net::IpAddr;

use anyhow::{Context, Result};
use proxy_datapath::PersistenceKind;
use proxy_net::LinkEvent;
use proxy_source::health::Health;
use tokio::runtime::Handle;
use tokio::task::{JoinHandle, spawn_blocking};

use crate::liveness::Work;
use crate::node::Node;

/// The node, or the work that has it.
pub(super) struct NodePart {
    here: Option<Box<Node>>,
    away: Option<JoinHandle<(Box<Node>, Result<()>)>>,
    last: LastKnown,
}

/// The facts of the node that the loop needs while it is away.
struct LastKnown {
    own_addresses: BTreeSet<IpAddr>,
    persistence: PersistenceKind,
}

impl NodePart {
    pub(super) fn new(node: Node) -> Self {
        let last = LastKnown::of(&node);
        Self {
            here: Some(Box::new(node)),
            away: None,
            last,
        }
    }

    pub(super) fn is_here(&self) -> bool {
        self.here.is_some()
    }

    /// Returns the node unless it is away.
    pub(super) fn here(&self) -> Option<&Node> {
        self.here.as_deref()
    }

    pub(super) fn here_mut(&mut self) -> Option<&mut Node> {
        self.here.as_deref_mut()
    }

    /// Sends the node away to take in changes of devices. Without effect while it is away.
    pub(super) fn take_in(&mut self, events: Vec<LinkEvent>, health: Health, work: Work) {
        self.send(work, async move |node| node.on_links(events, &health).await);
    }

    /// Sends the node away to follow the last sync. Without effect while it is away.
    pub(super) fn follow(&mut self, health: Health, work: Work) {
        self.send(work, async move |node| node.follow(&health).await);
    }

    /// Sends the node away to put routes and rules back. Without effect while it is away.
    pub(super) fn repair_routes(&mut self, health: Health, work: Work) {
        self.send(work, async move |node| node.repair_routes(&health).await);
    }

    /// Sends the node away to look which packets may skip the stack. Without effect while it is
    /// away.
    pub(super) fn judge(&mut self, work: Work) {
        self.send(work, async move |node| node.judge_fast_path().await);
    }

    fn send(
        &mut self,
        work: Work,
        errand: impl AsyncFnOnce(&mut Node) -> Result<()> + Send + 'static,
    ) {
        let Some(mut node) = self.here.take() else {
            return;
        };
        self.last = LastKnown::of(&node);
        let runtime = Handle::current();
        self.away = Some(spawn_blocking(move || {
            let result = runtime.block_on(errand(&mut node));
            drop(work);
            (node, result)
        }));
    }

    /// Waits until the node is back, for ever if it is not away. The outer error is a panic of its
    /// work.
    pub(super) async fn back(&mut self) -> Result<Result<()>> {
        let Some(away) = &mut self.away else {
            return std::future::pending().await;
        };
        let ended = away.await;
        self.away = None;
        let (node, result) = ended.context("the work on devices")?;
        self.here = Some(node);
        Ok(result)
    }

    /// Waits for a node that is away, and returns it.
    pub(super) async fn into_node(mut self) -> Result<Node> {
        if self.away.is_some() {
            // The agent ends: what is left to do the next one does.
            let _result = self.back().await?;
        }
        self.here.map(|node| *node).context("the node is lost")
    }

    /// Returns the addresses of all devices.
    pub(super) fn own_addresses(&self) -> BTreeSet<IpAddr> {
        self.here()
            .map_or_else(|| self.last.own_addresses.clone(), Node::own_addresses)
    }

    /// Returns what keeps the programs in the kernel after the agent's end.
    pub(super) fn persistence_kind(&self) -> PersistenceKind {
        self.here().map_or(self.last.persistence, |node| {
            node.attachments().persistence_kind()
        })
    }
}

impl LastKnown {
    fn of(node: &Node) -> Self {
        Self {
            own_addresses: node.own_addresses(),
            persistence: node.attachments().persistence_kind(),
        }
    }
}
