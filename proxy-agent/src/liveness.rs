//! Whether this node is being served: what `/livez`, `/healthz` and the health check ports answer. There is no other
//! notion of it. It is kube-proxy's (`pkg/proxy/healthcheck/proxy_health.go`): what is asked for gets into force in time.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::choices::Mode;
use proxy_core::ip_family::IpFamily;

/// The loop says here what it does; whoever is asked from outside reads it.
///
/// A family is healthy unless something has been asked of it for as long as [`Liveness::new`] allows and is not in force;
/// however long nothing is asked. A loop that hangs in its work, whatever it is, is unhealthy in both.
#[derive(Clone, Debug)]
pub struct Liveness {
    patience: Duration,
    state: watch::Sender<State>,
}

#[derive(Clone, Debug)]
struct State {
    families: BTreeMap<IpFamily, Family>,
    /// The loop is in the middle of something.
    working: Option<Instant>,
    node_eligible: bool,
}

#[derive(Clone, Copy, Debug)]
struct Family {
    last_updated: Timestamp,
    /// The oldest request that is not in force yet.
    queued: Option<Instant>,
}

/// How it is at one time.
#[derive(Clone, Debug)]
pub struct Report {
    /// The latest of the families'.
    pub last_updated: Timestamp,
    /// All families are healthy.
    pub live: bool,
    /// New load balancer traffic may be sent here.
    pub node_eligible: bool,
    pub families: BTreeMap<IpFamily, FamilyReport>,
}

#[derive(Clone, Copy, Debug)]
pub struct FamilyReport {
    /// When it was last brought into force; at first, when the agent started.
    pub last_updated: Timestamp,
    pub healthy: bool,
}

impl Liveness {
    /// What is asked for has twice `sync_period` to get into force. A host is no node, so nothing makes it ineligible.
    pub fn new(sync_period: Duration, mode: Mode) -> Self {
        let family = Family { last_updated: Timestamp::now(), queued: None };
        let families = IpFamily::ALL.map(|name| (name, family)).into();
        let state = State { families, working: None, node_eligible: mode == Mode::Host };
        Self { patience: 2 * sync_period, state: watch::Sender::new(state) }
    }

    /// Something is asked of this family that is not in force yet.
    pub fn queued(&self, family: IpFamily) {
        self.family(family, |family| family.queued = family.queued.or_else(|| Some(Instant::now())));
    }

    /// All that was asked of this family is in force.
    pub fn synced(&self, family: IpFamily) {
        self.family(family, |family| *family = Family { last_updated: Timestamp::now(), queued: None });
    }

    /// The loop is at work until the result is dropped.
    pub fn work(&self) -> Work {
        self.state.send_modify(|state| state.working = Some(Instant::now()));
        Work(self.state.clone())
    }

    pub fn set_node_eligible(&self, eligible: bool) {
        self.state.send_modify(|state| state.node_eligible = eligible);
    }

    /// What `/livez` answers.
    pub fn is_live(&self) -> bool {
        self.report().live
    }

    pub fn report(&self) -> Report {
        let state = self.state.borrow();
        let in_time = |since: Option<Instant>| since.is_none_or(|since| since.elapsed() < self.patience);
        let families = state.families.iter().map(|(name, family)| {
            let healthy = in_time(family.queued) && in_time(state.working);
            (*name, FamilyReport { last_updated: family.last_updated, healthy })
        });
        let families: BTreeMap<_, _> = families.collect();
        Report {
            last_updated: families.values().map(|family| family.last_updated).max().unwrap_or_default(),
            live: families.values().all(|family| family.healthy),
            node_eligible: state.node_eligible,
            families,
        }
    }

    fn family(&self, family: IpFamily, change: impl Fn(&mut Family)) {
        self.state.send_modify(|state| state.families.get_mut(&family).into_iter().for_each(change));
    }
}

/// Work of the loop, under way.
#[must_use]
#[derive(Debug)]
pub struct Work(watch::Sender<State>);

impl Drop for Work {
    fn drop(&mut self) {
        self.0.send_modify(|state| state.working = None);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const SYNC_PERIOD: Duration = Duration::from_secs(30);

    fn healthy(liveness: &Liveness) -> [bool; 2] {
        let report = liveness.report();
        assert_eq!(report.live, report.families.values().all(|family| family.healthy));
        IpFamily::ALL.map(|family| report.families[&family].healthy)
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_asked_for_has_two_sync_periods_from_the_oldest_request() {
        let liveness = Liveness::new(SYNC_PERIOD, Mode::Node);
        advance(100 * SYNC_PERIOD).await;
        assert_eq!(healthy(&liveness), [true, true], "nothing is asked");

        liveness.queued(IpFamily::V4);
        advance(SYNC_PERIOD).await;
        liveness.queued(IpFamily::V4);
        advance(SYNC_PERIOD - Duration::from_millis(1)).await;
        assert_eq!(healthy(&liveness), [true, true]);
        advance(Duration::from_millis(1)).await;
        assert_eq!(healthy(&liveness), [false, true], "a later request does not excuse the oldest");

        let before = liveness.report().last_updated;
        liveness.synced(IpFamily::V4);
        assert_eq!(healthy(&liveness), [true, true]);
        assert!(liveness.report().last_updated >= before);
    }

    #[tokio::test(start_paused = true)]
    async fn a_loop_that_hangs_is_not_live() {
        let liveness = Liveness::new(SYNC_PERIOD, Mode::Node);
        let work = liveness.work();
        advance(2 * SYNC_PERIOD).await;
        assert_eq!(healthy(&liveness), [false, false]);
        drop(work);
        assert!(liveness.is_live());
    }

    #[test]
    fn a_node_is_not_eligible_before_it_is_known_and_a_host_always() {
        let node = Liveness::new(SYNC_PERIOD, Mode::Node);
        assert!(!node.report().node_eligible && Liveness::new(SYNC_PERIOD, Mode::Host).report().node_eligible);
        node.set_node_eligible(true);
        assert!(node.report().node_eligible && node.is_live());
    }
}
