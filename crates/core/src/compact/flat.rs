//! Maps of few rows, for which a BTreeMap would allocate nodes of eleven rows.

use std::collections::BTreeMap;

/// An immutable map: one sorted, exactly sized slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flat<K, V>(Box<[(K, V)]>);

impl<K: Ord, V> Flat<K, V> {
    pub fn get(&self, key: &K) -> Option<&V> {
        let place = self.0.binary_search_by(|(known, _)| known.cmp(key)).ok()?;
        Some(&self.0[place].1)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.0.iter().map(|(key, value)| (key, value))
    }

    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.0.iter().map(|(key, _)| key)
    }

    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.0.iter().map(|(_, value)| value)
    }

    pub fn into_values(self) -> impl Iterator<Item = V> {
        self.0.into_iter().map(|(_, value)| value)
    }
}

impl<K, V> From<BTreeMap<K, V>> for Flat<K, V> {
    fn from(tree: BTreeMap<K, V>) -> Self {
        Self(tree.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flat_map_has_the_rows_of_the_tree() {
        let tree: BTreeMap<_, _> = [(3, "c"), (1, "a"), (2, "b")].into();
        let flat = Flat::from(tree.clone());
        assert!(
            flat.iter().eq(&tree) && flat.keys().eq(tree.keys()) && flat.values().eq(tree.values())
        );
        assert!((0..5).all(|key| flat.get(&key) == tree.get(&key)));
    }
}
