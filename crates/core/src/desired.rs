//! The desired state, updated incrementally. The unit of recomputation is one Service, so the cost
//! of a change is independent of the cluster's size.

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

mod concerned;
mod ejected;
mod family;
mod followers;
mod handover;
mod host_mode;
mod kept;
mod ledger;
mod placed;
mod portions;
mod redirects;
mod snapshot;
mod turns;

use family::Family;
use followers::Followers;
use ledger::Ledger;
use turns::Turns;

pub use snapshot::{Part, ServiceSnapshot, Snapshot};

/// The objects, their models and the tables. The tables equal [`Tables::of`] the objects once no
/// Service and no portion of rows waits.
#[derive(Debug)]
pub struct Desired {
    options: ModelOptions,
    store: Store,
    node: NodeModel,
    service_cidrs: Vec<IpNet>,
    /// The Services with a possibly outdated model.
    dirty: Turns,
    v4: Family<Addr4>,
    v6: Family<Addr6>,
    tables: Tables,
    health_checks: BTreeMap<ObjectName, HealthCheck>,
    followers: Followers,
    passes: u64,
    unreadable: Ledger<ObjectName>,
    /// The unreadable ServiceCIDRs, as one entry because a cluster has few.
    unreadable_cidrs: Ledger<()>,
    /// The ineffective parts of each LocalRedirect.
    bad_redirects: Ledger<ObjectName>,
    /// The LocalRedirects that the next pass checks.
    unjudged: BTreeSet<ObjectName>,
    /// The ledger entries added since the last sync.
    news: Vec<Skipped>,
    pending: Pending,
    /// The number of syncs that changed frontends.
    revision: u64,
}

/// The changes that still wait for a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    pub services: usize,
    pub slices: usize,
}

/// The result of one pass.
#[derive(Clone, Debug, Default)]
pub struct Sync {
    /// The ordered writes. Stopping after any of them is safe.
    pub changes: Vec<Change>,
    /// The objects that this pass skips for the first time, to be logged once. [`Desired::skipped`]
    /// returns all.
    pub skipped: Vec<Skipped>,
    /// The endpoint changes whose rows this pass completes, in order of arrival.
    pub triggers: Vec<Trigger>,
}

/// The models after all applied inputs, before the tables follow: see [`Desired::read`].
#[derive(Debug)]
#[must_use = "the tables are as they were"]
pub struct Models<'a> {
    desired: &'a mut Desired,
    /// The approximate number of rows for the pass. `None` means all rows.
    rows: Option<usize>,
}

impl Models<'_> {
    /// Completes [`Desired::sync`].
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

    /// Completes [`Desired::sync_from`].
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

/// The size of the programmed state, for `status` and metrics.
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
    /// The number of frontends, without whole-address rows.
    pub frontends: usize,
    /// The number of slots: a backend counts once for each set that contains it.
    pub backends: usize,
}

impl Desired {
    /// Creates an empty state. Endpoints with this `node_name`, as the API spells it, are local.
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

    /// Limits the tables to the maps' capacity. Call it before applying inputs.
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

    /// Updates the node's model. A change dirties every Service.
    fn rebuild_node(&mut self) {
        let node = NodeModel::of(&self.store, &self.options);
        if self.node != node {
            self.node = node;
            self.dirty
                .extend(self.store.services().map(|(name, _)| name.clone()));
        }
    }

    /// Returns true once every kind is listed. Until then an absent object is not a deleted object,
    /// so the desired state stays empty.
    pub fn is_complete(&self) -> bool {
        self.store.is_complete()
    }

    /// Returns true if a sync may change anything.
    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty() || !self.is_settled()
    }

    /// Returns true if the tables match the models.
    fn is_settled(&self) -> bool {
        self.v4.is_settled() && self.v6.is_settled()
    }

    pub fn pending(&self) -> Pending {
        self.pending
    }

    /// Reads all applied inputs: the first half of [`Self::sync`].
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

    /// Reads changed Services with about `rows` table rows in total, the namespaces in turn.
    /// Further Services wait while [`Self::is_dirty`]. The first sync must read all objects.
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

    /// Reads all applied inputs and returns the changes to the tables.
    pub fn sync(&mut self) -> Sync {
        self.read().sync()
    }

    /// Like [`Self::sync`], but returns the changes from `now`, the actual content of the maps. For
    /// the start, and after a failed write.
    pub fn sync_from(&mut self, now: &Tables) -> Sync {
        self.read().sync_from(now)
    }

    /// Returns the tables as of the last sync.
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Returns a number that changes with each sync that changes frontends. Callers can cache work
    /// that depends on frontends alone by this number.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Returns the programmed ClusterIPs that lie outside `ranges`, or inside a `shared` network.
    /// Most clusters have no such address. `shared` is sorted and its networks do not overlap.
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

    /// Returns the programmed frontends at external IPs and load balancer addresses: address,
    /// protocol, port.
    pub fn external_frontends(&self) -> impl Iterator<Item = (IpAddr, Proto, u16)> {
        self.claimed_externals().map(|(_, frontend)| frontend)
    }

    /// Returns the frontends of [`Self::external_frontends`] with their Services, in order of
    /// priority for a limited resource: the namespaces in turn, the oldest Service of each first.
    pub fn external_frontends_in_turn(&self) -> Vec<(ObjectName, (IpAddr, Proto, u16))> {
        shares::in_turn(
            self.claimed_externals()
                .map(|(claim, frontend)| (claim, (claim.service.clone(), frontend))),
        )
    }

    fn claimed_externals(&self) -> impl Iterator<Item = (&Claim, (IpAddr, Proto, u16))> {
        self.v4.externals().chain(self.v6.externals())
    }

    /// Returns the Service that holds an external frontend, and the field that contains its
    /// address.
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

    pub fn node(&self) -> &NodeModel {
        &self.node
    }

    /// Returns the load balancer health checks, which change only after the Service's rows.
    pub fn health_checks(&self) -> &BTreeMap<ObjectName, HealthCheck> {
        &self.health_checks
    }

    /// Returns the ServiceCIDRs, sorted. Empty if the cluster has none.
    pub fn service_cidrs(&self) -> &[IpNet] {
        &self.service_cidrs
    }

    /// Returns the ClusterIPs that other proxies serve.
    pub fn of_other_proxies(&self) -> &BTreeSet<IpAddr> {
        self.node.guard.of_other_proxies()
    }

    /// Returns this node's addresses from its Node object, internal addresses first.
    pub fn node_addresses(&self) -> Vec<IpAddr> {
        self.store
            .node()
            .map(model::node_addresses)
            .unwrap_or_default()
    }

    /// Returns true if load balancers may send new traffic to this node, by kube-proxy's rule. An
    /// unknown node, a deleted node and a node marked by the cluster autoscaler for removal are not
    /// eligible.
    pub fn is_node_eligible(&self) -> bool {
        self.store.node().is_some_and(model::is_node_eligible)
    }

    pub fn pod_cidrs(&self) -> Vec<IpNet> {
        self.store.node().map(model::pod_cidrs).unwrap_or_default()
    }

    /// Returns whether this node has a Node object. `None` if the API server refuses Nodes.
    pub fn has_node(&self) -> Option<bool> {
        (!self.store.is_node_refused()).then(|| self.store.node().is_some())
    }

    /// Returns the uid of an object: see [`Store::uid`].
    pub fn uid(&self, object: &ObjectRef) -> Option<&str> {
        self.store.uid(object)
    }

    /// Returns all skipped objects as of the last sync.
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
