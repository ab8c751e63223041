//! A value that is made for a limited part of the time.

use std::sync::Arc;
use std::time::{Duration, Instant};

/// The value is at least this many times as old as its making took, before it is made again.
const REST: u32 = 16;

/// The last value, and what it cost.
pub(super) struct Paced<T> {
    made: Option<(Arc<T>, Instant, Duration)>,
}

impl<T> Default for Paced<T> {
    fn default() -> Self {
        Self { made: None }
    }
}

impl<T> Paced<T> {
    /// Returns the last value, or a new one if the last is old enough.
    pub(super) fn get(&mut self, now: impl Fn() -> Instant, make: impl FnOnce() -> T) -> Arc<T> {
        let start = now();
        if let Some((value, since, took)) = &self.made
            && start.duration_since(*since) < *took * REST
        {
            return Arc::clone(value);
        }
        let value = Arc::new(make());
        let end = now();
        self.made = Some((Arc::clone(&value), end, end.duration_since(start)));
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
