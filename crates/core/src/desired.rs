//! Keeps the desired state up to date. The unit of recomputation is a Service, so the cost of a
//! change does not grow with the cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto};
use proxy_common::frontend::FrontendKey;

use crate::diff::{Change, diff};
use crate::input::{Input, ObjectName, Trigger};
use crate::model::{
    self, Claim, HealthCheck, ModelOptions, NodeModel, ObjectRef, ServiceModel, Skipped,
};
use crate::shares::{self, Room};
use crate::store::{Dirty, Store};
use crate::tables::Tables;

mod aside;
mod concerned;
mod family;
mod followers;
mod host_mode;
mod kept;
mod ledger;
mod placed;
mod portions;
mod redirects;
mod snapshot;
mod turns;
mod unresponsive_backends;

use family::Family;
use followers::Followers;
use ledger::Ledger;
use turns::Turns;

pub use snapshot::{Part, ServiceSnapshot, Snapshot};

/// The objects, their model, and the tables that the maps should hold: [`Tables::of`] the objects,
/// once no Service and no portion of rows waits.
#[derive(Debug)]
pub struct Desired {
    options: ModelOptions,
    store: Store,
    node: NodeModel,
    service_cidrs: Vec<IpNet>,
    /// The Services whose model may be out of date.
    dirty: Turns,
    v4: Family<Addr4>,
    v6: Family<Addr6>,
    tables: Tables,
    health_checks: BTreeMap<ObjectName, HealthCheck>,
    followers: Followers,
    /// The number of passes.
    passes: u64,
    unreadable: Ledger<ObjectName>,
    /// The unreadable part of the ServiceCIDRs, which are too few to tell apart.
    unreadable_cidrs: Ledger<()>,
    /// The part of each LocalRedirect that has no effect.
    bad_redirects: Ledger<ObjectName>,
    /// The LocalRedirects to judge in the next pass.
    unjudged: BTreeSet<ObjectName>,
    /// The entries added to a ledger since the last sync.
    news: Vec<Skipped>,
    pending: Pending,
    /// The number of syncs that changed the frontends.
    revision: u64,
}

/// The number of changes that no pass has read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    pub services: usize,
    pub slices: usize,
}

/// The result of one pass.
#[derive(Clone, Debug, Default)]
pub struct Sync {
    /// The changes in this order. A stop after any one of them is safe.
    pub changes: Vec<Change>,
    /// The objects that are skipped since this pass and were not before, to be logged once.
    /// [`Desired::skipped`] returns all.
    pub skipped: Vec<Skipped>,
    /// The changes of endpoints that made the pass necessary, in the order of their arrival.
    pub triggers: Vec<Trigger>,
}

/// The models as of all that was applied, before the tables are made of them: see
/// [`Desired::read`].
#[derive(Debug)]
#[must_use = "the tables are as they were"]
pub struct Models<'a> {
    desired: &'a mut Desired,
    /// The rows that the pass is for, about; all of them if None.
    rows: Option<usize>,
}

impl Models<'_> {
    /// The second part of [`Desired::sync`].
    pub fn sync(self) -> Sync {
        let Self { desired, rows } = self;
        if !desired.is_complete() {
            return Sync::default();
        }
        desired.passes += 1;
        let is_all_read = desired.dirty.is_empty();
        let Desired {
            v4,
            v6,
            tables,
            news,
            revision,
            passes,
            pending,
            ..
        } = desired;
        let mut changes = Vec::new();
        changes.extend(
            v4.settle(&mut tables.v4, *passes, rows, news)
                .into_iter()
                .map(Change::V4),
        );
        changes.extend(
            v6.settle(&mut tables.v6, *passes, rows, news)
                .into_iter()
                .map(Change::V6),
        );
        *revision += u64::from(changes.iter().any(Change::is_of_frontend));
        if is_all_read {
            *pending = Pending::default();
        }
        let triggers = desired.follow_up();
        Sync {
            changes,
            skipped: std::mem::take(&mut desired.news),
            triggers,
        }
    }

    /// The second part of [`Desired::sync_from`].
    pub fn sync_from(self, now: &Tables) -> Sync {
        let Self { desired, rows } = self;
        let is_known = *now == desired.tables;
        let Sync {
            changes,
            skipped,
            triggers,
        } = Models { desired, rows }.sync();
        if is_known {
            return Sync {
                changes,
                skipped,
                triggers,
            };
        }
        let changes = if desired.is_complete() {
            diff(now, &desired.tables)
        } else {
            Vec::new()
        };
        Sync {
            changes,
            skipped,
            triggers,
        }
    }
}

/// The size of the state in force, for `status` and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub v4: FamilyCounts,
    pub v6: FamilyCounts,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FamilyCounts {
    /// The number of Services with a ClusterIP.
    pub services: usize,
    pub service_ports: usize,
    /// The number of frontends, without the rows that stand for a whole address.
    pub frontends: usize,
    /// The number of slots: a backend counts once for each set of a service port that it is in.
    pub backends: usize,
}

impl Desired {
    /// Creates an empty state. `node_name`, as the API spells it, decides which endpoints are
    /// local.
    pub fn new(node_name: impl Into<String>) -> Self {
        Self::with_options(node_name, ModelOptions::default())
    }

    pub fn with_options(node_name: impl Into<String>, options: ModelOptions) -> Self {
        let store = Store::new(node_name)
            .with_redirects(options.has_redirects, options.redirect_addresses.clone());
        Self {
            node: NodeModel::of(&store, &options),
            v4: Family::default(),
            v6: Family::default(),
            options,
            store,
            service_cidrs: Vec::new(),
            dirty: Turns::default(),
            tables: Tables::default(),
            health_checks: BTreeMap::new(),
            followers: Followers::default(),
            passes: 0,
            unreadable: Ledger::default(),
            unreadable_cidrs: Ledger::default(),
            bad_redirects: Ledger::default(),
            unjudged: BTreeSet::new(),
            news: Vec::new(),
            pending: Pending::default(),
            revision: 0,
        }
    }

    /// Limits the tables to the room of the maps. Call it before anything is applied.
    pub fn within(self, room: Room) -> Self {
        let options = ModelOptions {
            room,
            ..self.options
        };
        let node = NodeModel { room, ..self.node };
        Self {
            options,
            node,
            v4: Family::new(room),
            v6: Family::new(room),
            ..self
        }
    }

    pub fn apply(&mut self, input: Input) {
        match self.store.apply(input) {
            Dirty::Nothing => {}
            Dirty::Services {
                services,
                of_other_proxies,
            } => {
                self.pending.services += services.len();
                self.unjudge(&services);
                self.dirty.extend(services);
                if of_other_proxies {
                    self.rebuild_node();
                }
            }
            Dirty::Redirects { services, objects } => {
                if !objects.is_empty() {
                    self.unjudge(&services);
                    self.unjudged.extend(objects);
                }
                self.dirty.extend(services);
            }
            Dirty::Endpoints {
                services,
                slices,
                triggers,
            } => {
                self.pending.slices += slices;
                self.followers.triggered(triggers);
                if model::concerns_guard(services.iter()) {
                    self.rebuild_node();
                }
                self.dirty.extend(services);
            }
            Dirty::Node => self.rebuild_node(),
            Dirty::ServiceCidrs => {
                let (cidrs, skipped) = model::service_cidrs(self.store.service_cidrs());
                self.service_cidrs = cidrs;
                self.unreadable_cidrs.replace((), skipped, &mut self.news);
                self.rebuild_node();
            }
        }
    }

    /// Updates the model of the node, which every Service may depend on.
    fn rebuild_node(&mut self) {
        let node = NodeModel::of(&self.store, &self.options);
        if self.node != node {
            self.node = node;
            self.dirty
                .extend(self.store.services().map(|(name, _)| name.clone()));
        }
    }

    /// Returns true if every kind has been listed. Until then the desired state is empty, because
    /// an absent object is not yet a deleted one.
    pub fn is_complete(&self) -> bool {
        self.store.is_complete()
    }

    /// Returns true if a sync may change anything.
    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty() || !self.is_settled()
    }

    /// Returns true if the tables are those of the models.
    fn is_settled(&self) -> bool {
        self.v4.is_settled() && self.v6.is_settled()
    }

    pub fn pending(&self) -> Pending {
        self.pending
    }

    /// Reads the objects that were applied since the last sync, which is the first part of one.
    pub fn read(&mut self) -> Models<'_> {
        let due = if self.is_complete() {
            self.dirty.take_all()
        } else {
            BTreeSet::new()
        };
        self.judge_redirects();
        self.model(due);
        Models {
            desired: self,
            rows: None,
        }
    }

    /// Reads a part of them, for about so many rows of the tables. Each namespace has its turn.
    /// While [`Self::is_dirty`], more parts remain. The first sync must have taken in all objects.
    pub fn read_in_turn(&mut self, rows: usize) -> Models<'_> {
        let rows_of =
            |service: &ObjectName| model::rows_at_most(&self.store, service, &self.options);
        let due = if self.is_complete() {
            self.dirty.take(rows, rows_of)
        } else {
            Vec::new()
        };
        self.judge_redirects();
        self.model(due);
        Models {
            desired: self,
            rows: Some(rows),
        }
    }

    fn model(&mut self, due: impl IntoIterator<Item = ObjectName>) {
        for name in due {
            let (
                ServiceModel {
                    v4,
                    v6,
                    health_check,
                },
                skipped,
            ) = ServiceModel::of(&self.store, &name, &self.node);
            self.v4.replace(&name, v4);
            self.v6.replace(&name, v6);
            self.followers.read(&name, self.passes + 1, health_check);
            self.unreadable.replace(name, skipped, &mut self.news);
        }
    }

    /// Takes in the objects applied since the last sync, and returns the changes to the tables.
    pub fn sync(&mut self) -> Sync {
        self.read().sync()
    }

    /// Syncs as [`Self::sync`] does, but returns the changes to what the maps really hold: at the
    /// start, and after a failed write.
    pub fn sync_from(&mut self, now: &Tables) -> Sync {
        self.read().sync_from(now)
    }

    /// Returns the tables that the maps should hold since the last sync.
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Returns a number that changes whenever a sync has changed the frontends, and so all that
    /// follows from frontends alone.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Returns the ClusterIPs in force since the last sync that are outside of these ranges, or in
    /// a network in them that is `shared` with others: most clusters have none. Those networks are
    /// in order, and none is in another.
    pub fn service_addresses_apart(&self, ranges: &[IpNet], shared: &[IpNet]) -> BTreeSet<IpAddr> {
        let is_shared = |addr: &IpAddr| {
            let behind = shared.partition_point(|net| net.addr() <= *addr);
            shared[..behind]
                .last()
                .is_some_and(|net| net.contains(addr))
        };
        let is_apart =
            |addr: &IpAddr| !ranges.iter().any(|range| range.contains(addr)) || is_shared(addr);
        self.v4
            .addresses()
            .chain(self.v6.addresses())
            .filter(is_apart)
            .collect()
    }

    /// Returns the frontends in force at external IPs and load balancer addresses since the last
    /// sync: address, protocol, port.
    pub fn external_frontends(&self) -> impl Iterator<Item = (IpAddr, Proto, u16)> {
        self.claimed_externals().map(|(_, frontend)| frontend)
    }

    /// Returns the same, each with its Service, in the order of their right to what is limited:
    /// each namespace in turn, its oldest Service first.
    pub fn external_frontends_in_turn(&self) -> Vec<(ObjectName, (IpAddr, Proto, u16))> {
        shares::in_turn(
            self.claimed_externals()
                .map(|(claim, frontend)| (claim, (claim.service.clone(), frontend))),
        )
    }

    fn claimed_externals(&self) -> impl Iterator<Item = (&Claim, (IpAddr, Proto, u16))> {
        self.v4.externals().chain(self.v6.externals())
    }

    /// Returns the Service of such a frontend, and the field with its address.
    pub fn claimant(&self, addr: IpAddr, proto: Proto, port: u16) -> Option<(ObjectRef, String)> {
        let port = Port::new(port);
        let v4 = Addr4::from_ip(addr)
            .and_then(|addr| self.v4.claimant(&FrontendKey::new(addr, port, proto)));
        let v6 = Addr6::from_ip(addr)
            .and_then(|addr| self.v6.claimant(&FrontendKey::new(addr, port, proto)));
        let (service, field) = v4.or(v6)?;
        Some((
            ObjectRef {
                kind: "Service",
                name: service.clone(),
            },
            field.to_owned(),
        ))
    }

    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the part of this node's state that matters to Services.
    pub fn node(&self) -> &NodeModel {
        &self.node
    }

    /// Returns the Services with a health check for load balancers, each as its rows in the tables
    /// allow.
    pub fn health_checks(&self) -> &BTreeMap<ObjectName, HealthCheck> {
        &self.health_checks
    }

    /// Returns the ranges of ClusterIPs, sorted, if the cluster has ServiceCIDRs.
    pub fn service_cidrs(&self) -> &[IpNet] {
        &self.service_cidrs
    }

    /// Returns the ClusterIPs of Services that other proxies serve.
    pub fn of_other_proxies(&self) -> &BTreeSet<IpAddr> {
        self.node.guard.of_other_proxies()
    }

    /// Returns this node's addresses from its Node object, those inside the cluster first.
    pub fn node_addresses(&self) -> Vec<IpAddr> {
        self.store
            .node()
            .map(model::node_addresses)
            .unwrap_or_default()
    }

    /// Returns true if load balancers may send new traffic to this node, by kube-proxy's rule. A
    /// node is not eligible if it is unknown, about to be deleted, or about to be removed by the
    /// cluster autoscaler.
    pub fn is_node_eligible(&self) -> bool {
        self.store.node().is_some_and(model::is_node_eligible)
    }

    /// Returns the ranges of this node's pod addresses, if its Node object has them.
    pub fn pod_cidrs(&self) -> Vec<IpNet> {
        self.store.node().map(model::pod_cidrs).unwrap_or_default()
    }

    /// Returns whether this node has a Node object, or None if the API server refuses Nodes.
    pub fn has_node(&self) -> Option<bool> {
        (!self.store.is_node_refused()).then(|| self.store.node().is_some())
    }

    /// Returns the uid of an object: see [`Store::uid`].
    pub fn uid(&self, object: &ObjectRef) -> Option<&str> {
        self.store.uid(object)
    }

    /// Returns all skipped objects since the last sync.
    pub fn skipped(&self) -> impl Iterator<Item = &Skipped> {
        let unreadable = self
            .unreadable
            .iter()
            .chain(self.unreadable_cidrs.iter())
            .chain(self.bad_redirects.iter());
        unreadable
            .chain(self.v4.conflicts())
            .chain(self.v6.conflicts())
    }

    pub fn counts(&self) -> Counts {
        Counts {
            v4: self.v4.counts(&self.tables.v4),
            v6: self.v6.counts(&self.tables.v6),
        }
    }
}

#[cfg(test)]
mod tests;
