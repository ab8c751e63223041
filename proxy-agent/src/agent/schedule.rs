//! Decides when a pass may begin. Passes cost writes, so the operator may limit their rate.

use std::time::Duration;

use tokio::time::Instant;

/// The rate limit on passes, and the pending pass.
#[derive(Clone, Debug)]
pub struct PassSchedule {
    /// The maximum time until failed work is retried.
    pub(super) sync_period: Duration,
    /// The minimum time between the starts of two passes.
    min_period: Duration,
    last: Option<Instant>,
    is_waiting: bool,
}

impl PassSchedule {
    pub fn new(sync_period: Duration, min_period: Duration) -> Self {
        Self {
            sync_period,
            min_period,
            last: None,
            is_waiting: false,
        }
    }

    /// Notes a change. Returns true if a pass may begin at once; otherwise the pass waits.
    pub(super) fn request(&mut self) -> bool {
        self.is_waiting = self
            .last
            .is_some_and(|last| last.elapsed() < self.min_period);
        !self.is_waiting
    }

    pub(super) fn ask_again(&mut self) {
        self.is_waiting = true;
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.last
            .filter(|_| self.is_waiting)
            .map(|last| last + self.min_period)
    }

    /// Notes the start of a pass, which may have nothing to write.
    pub(super) fn begin(&mut self) {
        self.is_waiting = false;
    }

    /// Makes the next pass wait for the minimum time after this pass.
    pub(super) fn count(&mut self) {
        self.last = Some(Instant::now());
    }
}

/// kube-proxy's sync period, and no minimum time between passes.
impl Default for PassSchedule {
    fn default() -> Self {
        Self::new(Duration::from_secs(30), Duration::ZERO)
    }
}

pub(super) async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn an_early_pass_waits_for_its_time() {
        let mut schedule = PassSchedule::new(30 * SECOND, SECOND);
        assert!(schedule.request(), "the first comes at once");
        pass(&mut schedule);
        let first = Instant::now();
        advance(SECOND / 4).await;
        assert!(!schedule.request());
        advance(SECOND / 4).await;
        assert!(!schedule.request(), "and all others with it");
        assert_eq!(schedule.due(), Some(first + SECOND));
        advance(SECOND / 2).await;
        pass(&mut schedule);
        assert_eq!(schedule.due(), None);
        assert!(!schedule.request());
        advance(SECOND).await;
        assert!(schedule.request());
    }

    #[tokio::test(start_paused = true)]
    async fn a_pass_waits_only_under_a_minimum_period() {
        let mut schedule = PassSchedule::default();
        pass(&mut schedule);
        assert!(schedule.request());
        assert_eq!(schedule.due(), None);
        let mut early = PassSchedule::new(30 * SECOND, SECOND);
        assert!(early.request());
        early.begin();
        assert!(early.request(), "a pass without work does not count");
    }

    fn pass(schedule: &mut PassSchedule) {
        schedule.begin();
        schedule.count();
    }
}
