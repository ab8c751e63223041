//! A value that is made for a limited part of the time.

use std::sync::Arc;
use std::time::{Duration, Instant};

/// The last value, and the time until which it stays.
pub(super) struct Paced<T> {
    made: Option<(Arc<T>, Instant)>,
}

impl<T> Default for Paced<T> {
    fn default() -> Self {
        Self { made: None }
    }
}

impl<T> Paced<T> {
    /// Returns the last value, or makes a new one with the time for which it stays.
    pub(super) fn get(
        &mut self,
        now: impl Fn() -> Instant,
        make: impl FnOnce() -> (T, Duration),
    ) -> Arc<T> {
        if let Some((value, until)) = &self.made
            && now() < *until
        {
            return Arc::clone(value);
        }
        let (value, rest) = make();
        let value = Arc::new(value);
        self.made = Some((Arc::clone(&value), now() + rest));
        value
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn costly_value_is_made_for_a_small_part_of_the_time() {
        let clock = Cell::new(Instant::now());
        let pass = |millis| clock.set(clock.get() + Duration::from_millis(millis));
        let made = Cell::new(0);
        let mut paced = Paced::default();
        let mut reads = |cost, times| {
            made.set(0);
            for _ in 0..times {
                let make = || {
                    pass(cost);
                    made.set(made.get() + 1);
                    ((), Duration::from_millis(16 * cost))
                };
                paced.get(|| clock.get(), make);
                pass(2_000);
            }
            made.get()
        };
        // A reader asks every 2 s, for a minute.
        assert_eq!(reads(1, 30), 30);
        assert_eq!(reads(500, 30), 8);
    }
}
