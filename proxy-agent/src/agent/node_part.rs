//! The node's part of the agent, which may be away to work on devices, routes and rules.
//!
//! The kernel changes all of these, and attaches programs, under RTNL, which any program can hold
//! for long. That work runs on its own thread, and the loop continues with Services and endpoints.
//!
//! ```text
//!   Here ── task: devices, a pass to follow, routes, rule check ──▶ Away
//!    ▲                                                              │
//!    └────────────────── back: the task and its result ─────────────┘
//! ```

use std::collections::BTreeSet;
use std::net::IpAddr;

use anyhow::{Context, Result};
use proxy_datapath::PersistenceKind;
use proxy_net::LinkEvent;
use proxy_source::health::Health;
use proxy_source::peers::Peers;
use tokio::runtime::Handle;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::Instant;

use super::follow::Following;
use crate::control::{QUEUE, Query};
use crate::liveness::Work;
use crate::node::Node;

pub(super) struct NodePart {
    state: State,
    last: LastKnown,
    /// Set if a pass was skipped because the node was away.
    pub(super) owes_pass: bool,
    /// The time of the next attempt after a failed update of the node.
    pub(super) retry: Option<Instant>,
    /// The queries that wait for the node.
    waiting: Vec<Query>,
}

enum State {
    Here(Box<Node>),
    Away(Errand, JoinHandle<(Box<Node>, Result<()>)>),
    /// A task has panicked, and the agent ends.
    Lost,
}

/// The task of a node that is away.
pub(super) enum Errand {
    /// Process device events.
    Devices,
    /// Update routes and rules after a pass.
    Follow(Following),
    Routes,
    /// Evaluate netfilter's rules: which packets may bypass the network stack.
    Judgement,
    /// Accept the packets that other nodes hand over.
    Peers,
}

/// The node's facts that the loop needs while the node is away.
struct LastKnown {
    own_addresses: BTreeSet<IpAddr>,
    persistence: PersistenceKind,
}

impl NodePart {
    pub(super) fn new(node: Node) -> Self {
        Self {
            last: LastKnown::of(&node),
            state: State::Here(Box::new(node)),
            owes_pass: false,
            retry: None,
            waiting: Vec::new(),
        }
    }

    pub(super) fn is_here(&self) -> bool {
        matches!(self.state, State::Here(_))
    }

    pub(super) fn is_following(&self) -> bool {
        matches!(self.state, State::Away(Errand::Follow(_), _))
    }

    pub(super) fn here(&self) -> Option<&Node> {
        match &self.state {
            State::Here(node) => Some(node),
            State::Away(..) | State::Lost => None,
        }
    }

    pub(super) fn here_mut(&mut self) -> Option<&mut Node> {
        match &mut self.state {
            State::Here(node) => Some(node),
            State::Away(..) | State::Lost => None,
        }
    }

    pub(super) fn take_in(&mut self, events: Vec<LinkEvent>, health: Health, work: Work) {
        self.send(Errand::Devices, work, async move |node| {
            node.on_links(events, &health).await
        });
    }

    pub(super) fn follow(&mut self, following: Following, health: Health, work: Work) {
        self.send(Errand::Follow(following), work, async move |node| {
            node.follow(&health).await
        });
    }

    pub(super) fn repair_routes(&mut self, health: Health, work: Work) {
        self.send(Errand::Routes, work, async move |node| {
            node.repair_routes(&health).await
        });
    }

    pub(super) fn take_peers(&mut self, peers: Peers, work: Work) {
        self.send(Errand::Peers, work, async move |node| {
            node.take_peers(peers).await
        });
    }

    pub(super) fn judge(&mut self, work: Work) {
        self.send(Errand::Judgement, work, async move |node| {
            node.judge_fast_path().await
        });
    }

    /// Sends the node away with a task. Has no effect while the node is away.
    fn send(
        &mut self,
        errand: Errand,
        work: Work,
        run: impl AsyncFnOnce(&mut Node) -> Result<()> + Send + 'static,
    ) {
        let mut node = match std::mem::replace(&mut self.state, State::Lost) {
            State::Here(node) => node,
            other => {
                self.state = other;
                return;
            }
        };
        self.last = LastKnown::of(&node);
        let runtime = Handle::current();
        let task = spawn_blocking(move || {
            let result = runtime.block_on(run(&mut node));
            drop(work);
            (node, result)
        });
        self.state = State::Away(errand, task);
    }

    /// Waits until the node is back, and returns its task and the task's result. Never returns
    /// while the node is here. The outer error means that the task panicked.
    pub(super) async fn back(&mut self) -> Result<(Errand, Result<()>)> {
        let State::Away(_, task) = &mut self.state else {
            return std::future::pending().await;
        };
        let ended = task.await;
        let State::Away(errand, _) = std::mem::replace(&mut self.state, State::Lost) else {
            unreachable!("the state changes only here once the node is away");
        };
        let (node, result) = ended.context("the work on devices")?;
        self.state = State::Here(node);
        Ok((errand, result))
    }

    /// Returns the node, once it is here.
    pub(super) async fn into_node(mut self) -> Result<Node> {
        if let State::Away(..) = self.state {
            // The result does not matter: the agent ends, and the next agent completes the work.
            let _ended = self.back().await?;
        }
        match self.state {
            State::Here(node) => Ok(*node),
            State::Away(..) | State::Lost => {
                anyhow::bail!("the task that configures the node has ended")
            }
        }
    }

    /// Keeps a query until the node is back, and drops queries whose client is gone.
    pub(super) fn keep_waiting(&mut self, query: Query) {
        self.waiting.retain(|query| !query.is_abandoned());
        if self.waiting.len() < QUEUE {
            self.waiting.push(query);
        }
    }

    pub(super) fn take_waiting(&mut self) -> Vec<Query> {
        std::mem::take(&mut self.waiting)
    }

    pub(super) fn own_addresses(&self) -> BTreeSet<IpAddr> {
        self.here()
            .map_or_else(|| self.last.own_addresses.clone(), Node::own_addresses)
    }

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
