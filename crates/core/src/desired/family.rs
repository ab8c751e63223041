//! The models of one family, and the choice of each frontend's holder among several claims.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use proxy_common::addr::{Addr, Proto};
use proxy_common::frontend::{FrontendKey, FrontendKind};

use super::FamilyCounts;
use super::ledger::Ledger;
use super::portions::{Facts, Limits, Portions};
use crate::diff::{FamilyChange, diff_family};
use crate::input::ObjectName;
use crate::model::{self, Cause, Claim, FamilyModel, ObjectRef, Skipped};
use crate::room::{Rows, without_tables};
use crate::shares::{self, Room, Shares};
use crate::tables::FamilyTables;

#[derive(Debug)]
pub(super) struct Family<A: Addr> {
    pub(super) models: BTreeMap<ObjectName, Arc<FamilyModel<A>>>,
    /// The claims in order of priority. The first claim normally holds the frontend; second claims
    /// are rare.
    claims: BTreeMap<FrontendKey<A>, Vec<Claim>>,
    /// The frontends whose claims, models or space have changed since the last pass.
    touched: BTreeSet<FrontendKey<A>>,
    /// The frontends with possibly outdated rows: touched frontends and their dependents.
    portions: Portions<A>,
    conflicts: Ledger<FrontendKey<A>>,
    pub(super) shares: Shares<A>,
    left_out: Ledger<ObjectName>,
    /// The Services with unreachable backends, in host mode only.
    pub(super) out_of_reach: BTreeSet<ObjectName>,
    /// The programmed ClusterIPs.
    addresses: BTreeSet<A>,
    /// The programmed frontends at external IPs and load balancer addresses, usually a small
    /// subset.
    externals: BTreeSet<FrontendKey<A>>,
}

impl<A: Addr> Default for Family<A> {
    fn default() -> Self {
        Self {
            models: BTreeMap::new(),
            claims: BTreeMap::new(),
            touched: BTreeSet::new(),
            portions: Portions::default(),
            conflicts: Ledger::default(),
            shares: Shares::default(),
            left_out: Ledger::default(),
            out_of_reach: BTreeSet::new(),
            addresses: BTreeSet::new(),
            externals: BTreeSet::new(),
        }
    }
}

impl<A: Addr> Family<A> {
    pub(super) fn new(room: Room) -> Self {
        Self {
            shares: Shares::new(room),
            ..Self::default()
        }
    }

    /// Replaces the model of a Service. `None` removes it.
    pub(super) fn replace(&mut self, service: &ObjectName, model: Option<FamilyModel<A>>) {
        let old = self.models.get(service).map(Arc::as_ref);
        if old == model.as_ref() {
            return;
        }
        // Most changes replace endpoints and keep the numbers of rows, so the capacity need not be
        // divided again, which iterates over every Service.
        let keeps_share = old
            .zip(model.as_ref())
            .is_some_and(|(old, new)| shares::take_same(old, new));
        if model
            .as_ref()
            .is_some_and(|model| !model.unreachable.is_empty())
        {
            self.out_of_reach.insert(service.clone());
        } else {
            self.out_of_reach.remove(service);
        }
        if let Some(old) = self.models.remove(service) {
            if !keeps_share {
                self.shares.remove(&old);
            }
            for key in old.frontends.keys() {
                if let Some(claims) = self.claims.get_mut(key) {
                    claims.retain(|claim| *claim != old.claim);
                    if claims.is_empty() {
                        self.claims.remove(key);
                    }
                }
                self.touched.insert(*key);
            }
        }
        if let Some(new) = model {
            for key in new.frontends.keys() {
                let claims = self
                    .claims
                    .entry(*key)
                    .or_insert_with(|| Vec::with_capacity(1));
                if let Err(place) = claims.binary_search(&new.claim) {
                    claims.insert(place, new.claim.clone());
                }
                self.touched.insert(*key);
            }
            if !keeps_share {
                self.shares.add(&new);
            }
            self.models.insert(service.clone(), Arc::new(new));
        }
    }

    /// Updates `tables` from the models and returns the changes. `rows` limits the update to a
    /// portion of about that size. `pass` increases with each call.
    pub(super) fn settle(
        &mut self,
        tables: &mut FamilyTables<A>,
        pass: u64,
        rows: Option<usize>,
        news: &mut Vec<Skipped>,
    ) -> Vec<FamilyChange<A>> {
        let divided = self.divide(news);
        let touched = std::mem::take(&mut self.touched);
        let affected = self.affected_by(&touched);
        let mut portions = std::mem::take(&mut self.portions);
        portions.extend(pass, divided);
        portions.extend(pass, affected);
        let portion = match rows {
            Some(rows) => {
                let limits = Limits {
                    rows,
                    room: self.shares.room(),
                    used: tables.rows(),
                };
                portions.take(limits, |key| self.facts(key, tables))
            }
            None => portions.take_all(),
        };
        self.portions = portions;
        let mut want = FamilyTables::default();
        for key in &portion {
            if let Some(holder) = self.holder(key) {
                want.insert(key, holder, &self.shares);
            }
            self.conflicts.replace(*key, self.conflicts_at(key), news);
        }
        let changes = diff_family(&tables.part(portion.iter()), &want);
        for change in &changes {
            tables.apply(change);
            self.index(change);
        }
        changes
    }

    fn index(&mut self, change: &FamilyChange<A>) {
        let (key, kind) = match change {
            FamilyChange::PutFrontend(key, frontend)
            | FamilyChange::MoveFrontend(key, frontend, _) => (key, Some(frontend.kind)),
            FamilyChange::DelFrontend(key, _) => (key, None),
            _ => return,
        };
        if *key == FrontendKey::address(key.addr) {
            set(
                &mut self.addresses,
                key.addr,
                kind == Some(FrontendKind::ADDRESS),
            );
        }
        let is_external = matches!(
            kind,
            Some(FrontendKind::EXTERNAL_IP | FrontendKind::LOAD_BALANCER)
        );
        set(&mut self.externals, *key, is_external);
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.addresses.iter().map(|addr| addr.ip())
    }

    /// Returns the programmed frontends at external IPs and load balancer addresses (address,
    /// protocol, port), with their claims.
    pub(super) fn externals(&self) -> impl Iterator<Item = (&Claim, (IpAddr, Proto, u16))> {
        self.externals
            .iter()
            .filter_map(|key| Some((self.claim(key)?, (key.addr.ip(), key.proto, key.port.get()))))
    }

    pub(super) fn is_settled(&self) -> bool {
        self.touched.is_empty() && self.portions.is_empty()
    }

    /// Returns the Services with waiting frontends, each with the pass of its first waiting
    /// frontend.
    pub(super) fn waiting(&self) -> BTreeMap<&ObjectName, u64> {
        let mut waiting = BTreeMap::new();
        for (key, since) in self.portions.iter() {
            for model in self.claimants(key) {
                let first = waiting.entry(&model.claim.service).or_insert(since);
                *first = since.min(*first);
            }
        }
        waiting
    }

    fn facts(&self, key: &FrontendKey<A>, tables: &FamilyTables<A>) -> Facts<A> {
        let holder = self.holder(key);
        let leads_to = holder.and_then(|model| Some(model.frontends.get(key)?.frontend));
        let led_to = tables.frontends.get(key);
        Facts {
            service_ports: [
                led_to.map(|frontend| frontend.service),
                leads_to.map(|frontend| frontend.service),
            ],
            before: tables.rows_of(key),
            after: holder.map_or(Rows::default(), |model| {
                let rows = shares::rows_of(model, key, 1);
                if self.shares.is_plain(&model.claim.service, key) {
                    without_tables(rows)
                } else {
                    rows
                }
            }),
        }
    }

    /// Divides the maps' capacity among the models. Returns the frontends that gain or lose their
    /// rows. No other frontend depends on them, because a frontend without space keeps its holder.
    fn divide(&mut self, news: &mut Vec<Skipped>) -> Vec<FrontendKey<A>> {
        let mut divided = Vec::new();
        for (service, keys) in self.shares.settle(self.models.values().map(Arc::as_ref)) {
            divided.extend(keys);
            let mut skipped = self
                .models
                .get(&service)
                .map(|model| self.shares.skipped(model))
                .unwrap_or_default();
            skipped.iter_mut().for_each(model::name_object);
            self.left_out.replace(service, skipped, news);
        }
        divided
    }

    /// Returns `touched` and its dependents: the other frontends at a ClusterIP, which give way to
    /// it, and each claimant's other frontends, because the claimant may gain or lose the service
    /// port.
    fn affected_by(&self, touched: &BTreeSet<FrontendKey<A>>) -> BTreeSet<FrontendKey<A>> {
        let addresses = touched
            .iter()
            .filter(|key| **key == FrontendKey::address(key.addr));
        let at = |address: &FrontendKey<A>| {
            let addr = address.addr;
            self.claims
                .range(address..)
                .map(|(key, _)| key)
                .take_while(move |key| key.addr == addr)
        };
        let claims = touched
            .iter()
            .filter_map(|key| self.claims.get(key))
            .flatten();
        let models: BTreeSet<_> = claims.map(|claim| &claim.service).collect();
        let offered = models
            .into_iter()
            .filter_map(|name| self.models.get(name))
            .flat_map(|model| model.frontends.keys());
        touched
            .iter()
            .chain(addresses.flat_map(at))
            .chain(offered)
            .copied()
            .collect()
    }

    /// Returns the model whose rows are programmed.
    pub(super) fn holder(&self, key: &FrontendKey<A>) -> Option<&FamilyModel<A>> {
        self.owner(key)
            .filter(|model| !self.shares.leave_out(&model.claim.service, key))
    }

    /// Returns the model that holds the frontend, even if the maps have no space for its rows.
    /// Other claims never get such a frontend.
    fn owner(&self, key: &FrontendKey<A>) -> Option<&FamilyModel<A>> {
        self.claimants(key)
            .find(|model| self.refusal(key, model).is_none())
    }

    /// Returns the models that claim the frontend, the oldest first.
    fn claimants(&self, key: &FrontendKey<A>) -> impl Iterator<Item = &FamilyModel<A>> {
        let claims = self.claims.get(key).into_iter().flatten();
        claims.filter_map(|claim| self.models.get(&claim.service).map(Arc::as_ref))
    }

    /// Returns the reason why a model may not have a claimed frontend, regardless of other claims.
    fn refusal(&self, key: &FrontendKey<A>, model: &FamilyModel<A>) -> Option<String> {
        let frontend = model.frontends.get(key)?.frontend;
        if !frontend.kind.is_external() && !model.claim.yields {
            return None;
        }
        if let Some(owner) = self.claimants(&FrontendKey::address(key.addr)).next() {
            return Some(format!(
                "{key:?} is at the ClusterIP of Service {}",
                owner.claim.service
            ));
        }
        if model.claim.yields {
            return None;
        }
        let holder = self
            .owner(&frontend.service)
            .filter(|holder| holder.claim != model.claim)?;
        Some(format!(
            "{key:?} would reach {:?}, which is held by Service {}",
            frontend.service, holder.claim.service
        ))
    }

    /// Returns the losing claims to this frontend. Services may share an address as long as their
    /// ports differ.
    fn conflicts_at(&self, key: &FrontendKey<A>) -> Vec<Skipped> {
        // The Service's own report contains the rows that do not fit.
        let holder = self.owner(key).map(|holder| &holder.claim);
        let lost = self
            .claimants(key)
            .filter(|model| Some(&model.claim) != holder);
        let conflict = |model: &FamilyModel<A>| {
            let claimed = model
                .frontends
                .get(key)
                .filter(|claimed| claimed.frontend.kind != FrontendKind::ADDRESS)?;
            let held = || {
                Some(format!(
                    "{key:?} is held by {}",
                    model::claimant(&holder?.service)
                ))
            };
            let why = self.refusal(key, model).or_else(held)?;
            let object = ObjectRef {
                kind: "Service",
                name: model.claim.service.clone(),
            };
            let mut conflict = Skipped {
                object,
                field: claimed.field.to_string(),
                why,
                cause: Cause::Conflict,
            };
            model::name_object(&mut conflict);
            Some(conflict)
        };
        lost.filter_map(conflict).collect()
    }

    /// Returns the Service that holds a frontend, and its field with the address.
    pub(super) fn claimant(&self, key: &FrontendKey<A>) -> Option<(&ObjectName, &str)> {
        let model = self.holder(key)?;
        Some((&model.claim.service, &model.frontends.get(key)?.field))
    }

    pub(super) fn claim(&self, key: &FrontendKey<A>) -> Option<&Claim> {
        Some(&self.holder(key)?.claim)
    }

    pub(super) fn model(&self, service: &ObjectName) -> Option<&Arc<FamilyModel<A>>> {
        self.models.get(service)
    }

    pub(super) fn conflicts_by_frontend(&self) -> BTreeMap<FrontendKey<A>, Vec<Skipped>> {
        self.conflicts.all().clone()
    }

    pub(super) fn conflicts(&self) -> impl Iterator<Item = &Skipped> {
        self.conflicts.iter().chain(self.left_out.iter())
    }

    pub(super) fn counts(&self, tables: &FamilyTables<A>) -> FamilyCounts {
        FamilyCounts {
            services: self.models.len(),
            service_ports: tables.services.len(),
            frontends: tables
                .frontends
                .keys()
                .filter(|key| **key != FrontendKey::address(key.addr))
                .count(),
            backends: tables.slots.len(),
        }
    }
}

fn set<T: Ord>(elements: &mut BTreeSet<T>, element: T, is_in: bool) {
    if is_in {
        elements.insert(element);
    } else {
        elements.remove(&element);
    }
}
