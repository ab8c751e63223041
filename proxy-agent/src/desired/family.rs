//! The models of one family, and which of them holds a frontend that several claim.

use std::collections::{BTreeMap, BTreeSet};

use proxy_common::addr::Addr;
use proxy_common::frontend::FrontendKey;

use super::FamilyCounts;
use super::ledger::Ledger;
use crate::diff::{FamilyChange, diff_family};
use crate::input::ObjectName;
use crate::model::{Claim, FamilyModel, Skipped};
use crate::tables::FamilyTables;

#[derive(Debug)]
pub(super) struct Family<A: Addr> {
    models: BTreeMap<ObjectName, FamilyModel<A>>,
    /// The first claim holds the frontend.
    claims: BTreeMap<FrontendKey<A>, BTreeSet<Claim>>,
    /// Frontends whose rows may be out of date.
    touched: BTreeSet<FrontendKey<A>>,
    conflicts: Ledger<FrontendKey<A>>,
}

impl<A: Addr> Default for Family<A> {
    fn default() -> Self {
        Self {
            models: BTreeMap::new(),
            claims: BTreeMap::new(),
            touched: BTreeSet::new(),
            conflicts: Ledger::default(),
        }
    }
}

impl<A: Addr> Family<A> {
    pub(super) fn replace(&mut self, service: &ObjectName, model: Option<FamilyModel<A>>) {
        if self.models.get(service) == model.as_ref() {
            return;
        }
        if let Some(old) = self.models.remove(service) {
            for key in old.frontends.keys() {
                if let Some(claims) = self.claims.get_mut(key) {
                    claims.remove(&old.claim);
                    if claims.is_empty() {
                        self.claims.remove(key);
                    }
                }
                self.touched.insert(*key);
            }
        }
        if let Some(new) = model {
            for key in new.frontends.keys() {
                self.claims.entry(*key).or_default().insert(new.claim.clone());
                self.touched.insert(*key);
            }
            self.models.insert(service.clone(), new);
        }
    }

    /// Brings `tables` up to date with the models, and says how.
    pub(super) fn settle(&mut self, tables: &mut FamilyTables<A>, news: &mut Vec<Skipped>) -> Vec<FamilyChange<A>> {
        let touched = std::mem::take(&mut self.touched);
        let mut want = FamilyTables::default();
        for key in &touched {
            if let Some(holder) = self.claimants(key).next() {
                want.insert(key, holder);
            }
            self.conflicts.replace(*key, self.conflicts_at(key), news);
        }
        let changes: Vec<_> = diff_family(&tables.part(touched.iter()), &want).collect();
        for change in &changes {
            tables.apply(change);
        }
        changes
    }

    fn claimants(&self, key: &FrontendKey<A>) -> impl Iterator<Item = &FamilyModel<A>> {
        let claims = self.claims.get(key).into_iter().flatten();
        claims.filter_map(|claim| self.models.get(&claim.service))
    }

    /// The service ports that lose this frontend. Services may share an address, so long as their ports differ.
    fn conflicts_at(&self, key: &FrontendKey<A>) -> Vec<Skipped> {
        let mut claimants = self.claimants(key);
        let Some(holder) = claimants.next() else { return Vec::new() };
        let lost = claimants.filter_map(|model| Some((&model.claim.service, model.ports.get(key)?)));
        lost.map(|(service, port)| Skipped {
            object: format!("Service {service}"),
            field: format!("spec.ports[{}]", port.index),
            why: format!("{key:?} is held by Service {}", holder.claim.service),
        })
        .collect()
    }

    pub(super) fn conflicts(&self) -> impl Iterator<Item = &Skipped> {
        self.conflicts.iter()
    }

    pub(super) fn counts(&self, tables: &FamilyTables<A>) -> FamilyCounts {
        FamilyCounts {
            services: self.models.len(),
            service_ports: tables.services.len(),
            frontends: tables.frontends.keys().filter(|key| **key != FrontendKey::address(key.addr)).count(),
            backends: tables.slots.len(),
        }
    }
}
