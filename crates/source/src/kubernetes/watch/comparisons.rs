//! Compares the sent objects with a list of the server's metadata: whenever the server's history is
//! in doubt (it may have been restored), and every few hours. Each comparison costs a list, so
//! their rate is limited.

use std::collections::VecDeque;
use std::time::Duration;

use kube::{Client, Resource as _};
use proxy_core::compact::Compact;
use tokio::time::{Instant, sleep};
use tracing::{debug, warn};

use super::failure::WatchEnd;
use super::list::{Listed, Lister};
use super::marks::{Meta, Sent};
use super::selection::Selection;
use crate::kubernetes::outage::Outage;

/// The maximum time that an event is in transit.
const ON_THE_WAY: Duration = Duration::from_millis(500);

/// The maximum number of comparisons in [`SPAN`].
const MOST: usize = 6;
const SPAN: Duration = Duration::from_secs(720);
/// The range of the time between regular comparisons, in seconds. Random, so that nodes do not
/// coincide.
const REGULAR: std::ops::Range<u64> = 3 * 3_600..6 * 3_600;

#[derive(Debug)]
pub(super) struct Comparisons {
    last: VecDeque<Instant>,
    regular: Instant,
}

impl Default for Comparisons {
    fn default() -> Self {
        Self {
            last: VecDeque::new(),
            regular: regular(),
        }
    }
}

impl Comparisons {
    /// Returns the wait before the next comparison: `doubt`, or the rest of the regular interval;
    /// longer if too many precede.
    pub(super) fn delay(&self, doubt: Option<Duration>) -> Duration {
        let allowed = self
            .last
            .front()
            .filter(|_| self.last.len() >= MOST)
            .map(|first| *first + SPAN);
        let allowed = allowed.map_or(Duration::ZERO, |at| {
            at.saturating_duration_since(Instant::now())
        });
        doubt
            .unwrap_or_else(|| self.regular.saturating_duration_since(Instant::now()))
            .max(allowed)
    }

    /// Records a comparison. Returns the wait before the next regular comparison.
    pub(super) fn done(&mut self) -> Duration {
        if self.last.len() >= MOST {
            self.last.pop_front();
        }
        self.last.push_back(Instant::now());
        self.regular = regular();
        self.delay(None)
    }
}

fn regular() -> Instant {
    Instant::now() + Duration::from_secs(rand::random_range(REGULAR))
}

#[derive(Clone, Copy)]
pub(super) struct Wait {
    pub(super) delay: Duration,
    /// Set if an earlier failure may be an outage. The wait then ends with the outage.
    pub(super) may_be_outage: bool,
}

/// Compares after a wait, because a server that was away may have been restored from a backup. Such
/// a server grants a watch from a future version, which stays silent; and a watch from a version
/// that new writes have passed misses earlier changes. Returns the contradiction, if any.
pub(super) async fn compare<K: Compact + Clone>(
    client: Client,
    outage: Outage,
    wait: Wait,
    sent: Sent,
    selection: Selection,
    mut lister: Lister,
) -> Result<Option<String>, WatchEnd> {
    outage.wait(wait.delay, wait.may_be_outage).await;
    let comparison = sent.begin();
    let kind = K::Object::kind(&());
    let version = &comparison.version;
    let listed: Listed<Meta<K>> = lister
        .list(&client, &selection.metadata_at(version))
        .await?;
    debug!(%kind, version, now = listed.version, "listed metadata");
    if let Some(why) = disorder(&listed.version, version) {
        return Ok(Some(why));
    }
    if comparison.differences(&listed.marks) == 0 {
        return Ok(None);
    }
    sleep(ON_THE_WAY).await;
    let objects = comparison.differences(&listed.marks);
    if objects == 0 {
        return Ok(None);
    }
    warn!(%kind, objects, "the server's objects differ from its watch, as after a restored backup");
    Ok(Some(format!(
        "{objects} objects are not as the server has them"
    )))
}

/// Returns an error text if `version` is older than `after`. Servers other than Kubernetes' own may
/// have versions that are not numbers.
pub(super) fn disorder(version: &str, after: &str) -> Option<String> {
    let is_older = matches!((version.parse::<u64>(), after.parse::<u64>()), (Ok(version), Ok(after)) if version < after);
    is_older.then(|| format!("version {version} after {after}"))
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn doubts_in_a_row_wait_and_regular_comparisons_go_on() {
        let mut comparisons = Comparisons::default();
        let soon = Duration::from_secs(1);
        for _ in 0..MOST {
            assert_eq!(comparisons.delay(Some(soon)), soon);
            comparisons.done();
        }
        assert_eq!(comparisons.delay(Some(soon)), SPAN);
        advance(SPAN).await;
        assert_eq!(comparisons.delay(Some(soon)), soon);
        let regular = comparisons.delay(None).as_secs();
        assert!(
            (REGULAR.start - SPAN.as_secs()..REGULAR.end).contains(&regular),
            "{regular}"
        );
    }
}
