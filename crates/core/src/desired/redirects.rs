//! Checks LocalRedirects, which have no tables of their own.

use std::collections::BTreeSet;

use super::Desired;
use crate::compact::Compact;
use crate::input::ObjectName;
use crate::model;

impl Desired {
    /// Schedules a check of these Services' LocalRedirects.
    pub(super) fn unjudge(&mut self, services: &BTreeSet<ObjectName>) {
        let objects = services
            .iter()
            .flat_map(|service| self.store.redirects_of(service))
            .map(Compact::name);
        self.unjudged.extend(objects);
    }

    /// Checks the changed LocalRedirects and their siblings only: a tenant may have thousands.
    pub(super) fn judge_redirects(&mut self) {
        let due = std::mem::take(&mut self.unjudged);
        for (name, skipped) in model::skipped_redirects(&self.store, due) {
            self.bad_redirects.replace(name, skipped, &mut self.news);
        }
    }
}
