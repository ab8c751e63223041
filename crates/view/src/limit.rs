//! A limit on events per second.

use std::time::Duration;

use tokio::time::Instant;

/// Counts the lines of the current second, and drops lines above the limit.
#[derive(Debug)]
pub struct Limit {
    per_second: u32,
    since: Instant,
    shown: u32,
    lost: u64,
}

impl Limit {
    pub fn new(per_second: u32) -> Self {
        Self {
            per_second,
            since: Instant::now(),
            shown: 0,
            lost: 0,
        }
    }

    /// Returns the number of lines dropped in the last second, and whether one more line may be
    /// shown.
    pub fn ask(&mut self) -> (u64, bool) {
        let mut lost = 0;
        if self.since.elapsed() >= Duration::from_secs(1) {
            self.since = Instant::now();
            self.shown = 0;
            lost = std::mem::take(&mut self.lost);
        }
        let may = self.shown < self.per_second;
        self.shown += u32::from(may);
        self.lost += u64::from(!may);
        (lost, may)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn lines_beyond_the_limit_are_reported_a_second_later() {
        let mut limit = Limit::new(2);
        assert_eq!(
            [limit.ask(), limit.ask(), limit.ask(), limit.ask()],
            [(0, true), (0, true), (0, false), (0, false)]
        );
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!([limit.ask(), limit.ask()], [(2, true), (0, true)]);
    }
}
