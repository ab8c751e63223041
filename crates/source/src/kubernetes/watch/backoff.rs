//! Decides the wait before the next request to a server.
//!
//! Three properties must hold together. A node is up to date within a second of the server's
//! recovery. Thousands of nodes do not delay a server's recovery. No fault, however odd, makes a
//! node send requests without end. Therefore:
//!
//! - A server that ends watches early is healthy: the next request comes within [`FLAP`].
//! - Lists are expensive. The first lists of a series come as soon as needed, later lists at
//!   growing intervals, up to [`SLOW`]. In between, a watch from the last version is tried, which
//!   is cheap, and replaces the list if the server has the version.
//! - A server that refuses, or does not answer, gets requests at growing intervals, as in client-go
//!   (0.8 s to 30 s). `outage.rs` probes for a quick recovery.
//! - A server that has just started denies access until it has loaded RBAC's objects, some seconds
//!   after `/readyz`. Denials after an outage, and at the first contact, are retried within
//!   [`WARM`], for [`WARM_UP`] at most. A longer denial is intended, and is retried like a failure.
//!
//! All waits have jitter, because all nodes begin to wait at the same time.

use std::time::Duration;

use tokio::time::Instant;

/// The initial wait between the end of a watch and the next watch.
const SOON: Duration = Duration::from_millis(100);
/// The maximum wait between watches.
const FLAP: Duration = Duration::from_millis(500);
/// The initial wait after a failure.
const FAILED: Duration = Duration::from_millis(800);
/// The maximum wait after a failure.
const SLOW: Duration = Duration::from_secs(30);
/// The initial wait after a denial by a server that may still be loading RBAC's objects.
const DENIED: Duration = Duration::from_millis(250);
/// The maximum wait after such a denial.
const WARM: Duration = Duration::from_secs(1);
/// The maximum loading time.
const WARM_UP: Duration = Duration::from_secs(30);
/// The number of lists of a series that may follow each other as fast as watches.
const EARLY_LISTS: u32 = 12;
/// The pause that ends a series of lists.
const ROW: Duration = Duration::from_secs(120);

#[derive(Debug, Default)]
pub(super) struct Backoff {
    /// The numbers of consecutive short watches, failures and denials, and of a series' lists.
    flaps: u32,
    failures: u32,
    denials: u32,
    lists: u32,
    last_list: Option<Instant>,
    /// The time by which a returned server has loaded RBAC's objects. `None`: no denial since its
    /// return.
    warm_by: Option<Instant>,
}

impl Backoff {
    pub(super) fn settled(&mut self) {
        (self.flaps, self.failures) = (0, 0);
        self.warm_by = Some(Instant::now());
    }

    /// Records the end of an outage: earlier ends of watches no longer count.
    pub(super) fn back(&mut self) {
        self.flaps = 0;
        self.away();
    }

    /// Records that the next server to answer may have just started.
    pub(super) fn away(&mut self) {
        (self.denials, self.warm_by) = (0, None);
    }

    /// Returns the number of consecutive watches that ended before they had settled.
    pub(super) fn ends(&self) -> u32 {
        self.flaps
    }

    pub(super) fn after_end(&mut self) -> Duration {
        self.failures = 0;
        jittered(doubled(SOON, self.flaps, FLAP), &mut self.flaps)
    }

    pub(super) fn after_failure(&mut self) -> Duration {
        jittered(doubled(FAILED, self.failures, SLOW), &mut self.failures)
    }

    pub(super) fn after_denial(&mut self) -> Duration {
        let warm_by = *self.warm_by.get_or_insert_with(|| Instant::now() + WARM_UP);
        match Instant::now() < warm_by {
            true => jittered(doubled(DENIED, self.denials, WARM), &mut self.denials),
            false => self.after_failure(),
        }
    }

    pub(super) fn may_list(&self) -> bool {
        let wait = match self.lists.checked_sub(EARLY_LISTS) {
            Some(late) => doubled(2 * FLAP, late, SLOW),
            None => Duration::ZERO,
        };
        self.last_list.is_none_or(|last| last.elapsed() >= wait)
    }

    /// Counts a list. Only a pause before its start ends a series, because the list itself may take
    /// longer than [`ROW`].
    pub(super) fn listed(&mut self, began: Instant) {
        if self
            .last_list
            .is_none_or(|last| began.duration_since(last) > ROW)
        {
            self.lists = 0;
        }
        (self.lists, self.last_list) = (self.lists.saturating_add(1), Some(Instant::now()));
    }
}

fn doubled(first: Duration, times: u32, most: Duration) -> Duration {
    first
        .saturating_mul(1_u32.checked_shl(times).unwrap_or(u32::MAX))
        .min(most)
}

/// Returns a random time between two thirds of the wait and the whole wait.
fn jittered(wait: Duration, count: &mut u32) -> Duration {
    *count = count.saturating_add(1);
    wait.mul_f32(rand::random_range(0.67..=1.0))
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[test]
    fn waits_grow_to_their_caps_and_restart_after_success() {
        let mut backoff = Backoff::default();
        let ends: Vec<_> = (0..50).map(|_| backoff.after_end()).collect();
        assert!(
            ends[0] <= SOON
                && ends[3..]
                    .iter()
                    .all(|wait| (FLAP.mul_f32(0.6)..=FLAP).contains(wait)),
            "{ends:?}"
        );
        let failures: Vec<_> = (0..50).map(|_| backoff.after_failure()).collect();
        assert!(
            failures[0] <= FAILED
                && failures[6..]
                    .iter()
                    .all(|wait| (SLOW.mul_f32(0.6)..=SLOW).contains(wait))
        );
        let different: std::collections::BTreeSet<_> = failures[6..].iter().collect();
        assert!(different.len() > 40, "no jitter");
        backoff.settled();
        assert!(backoff.after_end() <= SOON && backoff.after_failure() <= FAILED);
    }

    #[tokio::test(start_paused = true)]
    async fn denials_are_tried_again_soon_until_the_server_must_be_warm() {
        let mut backoff = Backoff::default();
        for contact in ["the first", "after an outage"] {
            let start = Instant::now();
            let mut denials = 0;
            while start.elapsed() < Duration::from_secs(600) {
                let wait = backoff.after_denial();
                assert!(
                    wait <= if start.elapsed() < WARM_UP {
                        WARM
                    } else {
                        SLOW
                    },
                    "{contact}: {wait:?}"
                );
                advance(wait).await;
                denials += 1;
            }
            assert!(
                (50..=90).contains(&denials),
                "{contact}: {denials} requests in 10 minutes"
            );
            backoff.back();
        }
        backoff.settled();
        assert!(
            (0..10).map(|_| backoff.after_denial()).max() > Some(WARM),
            "a server that let us in before is warm"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn lists_of_a_row_become_rare() {
        let mut backoff = Backoff::default();
        let mut lists = 0;
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(600) {
            if backoff.may_list() {
                backoff.listed(Instant::now());
                lists += 1;
            }
            advance(FLAP).await;
        }
        assert!(
            (20..=40).contains(&lists),
            "{lists} lists in 10 minutes of a storm"
        );
        advance(ROW).await;
        backoff.listed(Instant::now());
        assert!(backoff.may_list(), "a new row");
        for _ in 0..2 * EARLY_LISTS {
            let began = Instant::now();
            advance(2 * ROW).await;
            backoff.listed(began);
        }
        assert!(!backoff.may_list(), "a row of long lists");
    }
}
