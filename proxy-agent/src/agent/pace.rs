//! When a pass may come: writing is what costs, so an operator may have it done only so often.

use std::time::Duration;

use tokio::time::Instant;

/// How often passes may come, and whether one waits.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    /// At most one pass in this time.
    min_period: Duration,
    last: Option<Instant>,
    is_waiting: bool,
}

impl Pace {
    pub fn new(min_period: Duration) -> Self {
        Self { min_period, ..Self::default() }
    }

    /// Something has changed. Whether a pass may come at once; if not, it waits.
    pub(super) fn ask(&mut self) -> bool {
        self.is_waiting = self.last.is_some_and(|last| last.elapsed() < self.min_period);
        !self.is_waiting
    }

    /// When the pass may come that waits.
    pub(super) fn due(&self) -> Option<Instant> {
        self.last.filter(|_| self.is_waiting).map(|last| last + self.min_period)
    }

    /// A pass begins, which may find that there is nothing yet to go by.
    pub(super) fn begin(&mut self) {
        self.is_waiting = false;
    }

    /// It counts.
    pub(super) fn count(&mut self) {
        self.last = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn what_comes_too_early_waits_for_its_time() {
        let mut pace = Pace::new(SECOND);
        assert!(pace.ask(), "the first comes at once");
        pass(&mut pace);
        let first = Instant::now();
        advance(SECOND / 4).await;
        assert!(!pace.ask());
        advance(SECOND / 4).await;
        assert!(!pace.ask(), "and all others with it");
        assert_eq!(pace.due(), Some(first + SECOND));
        advance(SECOND / 2).await;
        pass(&mut pace);
        assert_eq!(pace.due(), None);
        assert!(!pace.ask());
        advance(SECOND).await;
        assert!(pace.ask());
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_waits_unless_it_was_asked_for() {
        let mut pace = Pace::default();
        pass(&mut pace);
        assert!(pace.ask());
        assert_eq!(pace.due(), None);
        let mut early = Pace::new(SECOND);
        assert!(early.ask());
        early.begin();
        assert!(early.ask(), "what came to nothing does not count");
    }

    fn pass(pace: &mut Pace) {
        pace.begin();
        pace.count();
    }
}
