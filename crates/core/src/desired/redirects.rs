//! Judges LocalRedirects, which have no tables of their own.

use std::collections::BTreeSet;

use super::Desired;
use crate::compact::Compact;
use crate::input::ObjectName;
use crate::model;

impl Desired {
    /// Notes that the LocalRedirects of these Services are to be judged.
    pub(super) fn unjudge(&mut self, services: &BTreeSet<ObjectName>) {
        let objects = services
            .iter()
            .flat_map(|service| self.store.redirects_of(service))
            .map(Compact::name);
        self.unjudged.extend(objects);
    }

    /// Judges the LocalRedirects that changed, and those beside them. A tenant with thousands must
    /// not cost each change all of them.
    pub(super) fn judge_redirects(&mut self) {
        let due = std::mem::take(&mut self.unjudged);
        for (name, skipped) in model::skipped_redirects(&self.store, due) {
            self.bad_redirects.replace(name, skipped, &mut self.news);
        }
    }
}
