//! The passes over the maps: past passes, and the time of the next.

use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

use super::schedule::PassSchedule;

/// The first wait before a refused write is retried. The longest wait is the sync period.
const RETRY_MIN: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Passes {
    pub(super) schedule: PassSchedule,
    retry: Option<Retry>,
    /// Set if the last pass left Services to the next.
    pub(super) is_behind: bool,
    /// Set by the first pass. Before it, the maps may hold a predecessor's rows.
    pub(super) has_synced: bool,
    /// The number of passes that changed a map, and the time of the last.
    pub(super) changing: u64,
    pub(super) last_change: Option<Timestamp>,
}

#[derive(Debug)]
struct Retry {
    at: Instant,
    wait: Duration,
}

impl Passes {
    pub(super) fn new(schedule: PassSchedule) -> Self {
        Self {
            schedule,
            ..Self::default()
        }
    }

    /// Returns the time of the next pass without a change of objects.
    pub(super) fn due(&self) -> Option<Instant> {
        let retry = self.retry.as_ref().map(|retry| retry.at);
        let behind = self.is_behind.then(Instant::now);
        let scheduled = self.schedule.due();
        retry.into_iter().chain(behind).chain(scheduled).min()
    }

    pub(super) fn has_refused(&self) -> bool {
        self.retry.is_some()
    }

    /// Returns false while a refused write must wait longer.
    pub(super) fn may_write(&self) -> bool {
        self.retry
            .as_ref()
            .is_none_or(|retry| retry.at <= Instant::now())
    }

    pub(super) fn written(&mut self) {
        self.retry = None;
    }

    /// Notes a refused write. Each refusal doubles the wait.
    pub(super) fn refused(&mut self) {
        let wait = self.retry.as_ref().map_or(RETRY_MIN, |retry| {
            (retry.wait * 2).min(self.schedule.sync_period)
        });
        self.retry = Some(Retry {
            at: Instant::now() + wait,
            wait,
        });
    }

    pub(super) fn count_change(&mut self) {
        self.changing += 1;
        self.last_change = Some(Timestamp::now());
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn refused_write_waits_longer_each_time_up_to_the_sync_period() {
        let mut passes = Passes::default();
        assert!(passes.may_write() && passes.due().is_none());
        let mut waits = Vec::new();
        for _ in 0..7 {
            passes.refused();
            assert!(!passes.may_write());
            let wait = passes.due().unwrap() - Instant::now();
            waits.push(wait.as_secs());
            advance(wait).await;
            assert!(passes.may_write() && passes.has_refused());
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 30, 30]);
        passes.written();
        assert!(!passes.has_refused() && passes.due().is_none());
    }
}
