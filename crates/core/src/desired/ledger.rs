//! The skipped objects. Each is reported only once.

use std::collections::BTreeMap;

use crate::model::Skipped;

#[derive(Debug)]
pub(super) struct Ledger<K>(BTreeMap<K, Vec<Skipped>>);

impl<K> Default for Ledger<K> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord> Ledger<K> {
    /// Replaces the skipped objects of `key`, and appends new ones to `news`.
    pub(super) fn replace(&mut self, key: K, skipped: Vec<Skipped>, news: &mut Vec<Skipped>) {
        let before = self.0.remove(&key).unwrap_or_default();
        news.extend(
            skipped
                .iter()
                .filter(|skipped| !before.contains(skipped))
                .cloned(),
        );
        if !skipped.is_empty() {
            self.0.insert(key, skipped);
        }
    }

    pub(super) fn all(&self) -> &BTreeMap<K, Vec<Skipped>> {
        &self.0
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Skipped> {
        self.0.values().flatten()
    }
}
