//! The order of variants in a round.

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// Random orders that are the same in every run with a seed.
pub(crate) struct Order(StdRng);

impl Order {
    pub(crate) fn new(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }

    /// Returns the next order. Random orders keep a variant from always following the same other
    /// variant.
    pub(crate) fn shuffled<'a, T>(&mut self, of: &'a [T]) -> Vec<&'a T> {
        // One number per order, so that a longer list does not change later orders.
        let mut turn = StdRng::seed_from_u64(self.0.next_u64());
        let mut order: Vec<&T> = of.iter().collect();
        order.shuffle(&mut turn);
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn orders(seed: u64) -> Vec<Vec<u32>> {
        let mut order = Order::new(seed);
        (0..50)
            .map(|_| order.shuffled(&[1, 2, 3, 4]).into_iter().copied().collect())
            .collect()
    }

    #[test]
    fn seed_decides_order() {
        assert_eq!(orders(1), orders(1));
        assert_ne!(orders(1), orders(2));
    }

    #[test]
    fn every_variant_comes_first() {
        let orders = orders(1);
        for variant in 1..=4 {
            assert!(orders.iter().filter(|order| order[0] == variant).count() > 3);
        }
        assert!(orders.iter().all(|order| order.iter().sum::<u32>() == 10));
    }
}
