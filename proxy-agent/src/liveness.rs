//! Tracks whether this node is served, for `/livez`, `/healthz` and the health check ports. The
//! definition is kube-proxy's (`pkg/proxy/healthcheck/proxy_health.go`): desired state is applied
//! in time.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::choices::Mode;
use proxy_core::ip_family::IpFamily;

/// The health of this node. The agent's loop writes it and the servers read it.
///
/// A family is unhealthy if a request waits longer than [`Liveness::new`] allows, and healthy while
/// there is no request. If the agent hangs in any work, both families are unhealthy.
#[derive(Clone, Debug)]
pub struct Liveness {
    timeout: Duration,
    state: watch::Sender<State>,
}

#[derive(Clone, Debug)]
struct State {
    families: BTreeMap<IpFamily, Family>,
    /// The starts of the agent's current work items, by number.
    works: BTreeMap<u64, Instant>,
    next_work: u64,
    node_eligible: bool,
}

#[derive(Clone, Copy, Debug)]
struct Family {
    last_updated: Timestamp,
    /// The time of the oldest request that is not applied.
    queued: Option<Instant>,
}

/// The health at one moment.
#[derive(Clone, Debug)]
pub struct Report {
    /// The latest time at which either family was up to date.
    pub last_updated: Timestamp,
    /// Set if all families are healthy.
    pub live: bool,
    /// Set if load balancers may send new traffic to this node.
    pub node_eligible: bool,
    pub families: BTreeMap<IpFamily, FamilyReport>,
}

#[derive(Clone, Copy, Debug)]
pub struct FamilyReport {
    /// The time when the family was last up to date. At first, the agent's start.
    pub last_updated: Timestamp,
    pub healthy: bool,
}

impl Liveness {
    /// Creates the state of a new agent. A request may take twice `sync_period`. A host in host
    /// mode is always eligible.
    pub fn new(sync_period: Duration, mode: Mode) -> Self {
        let family = Family {
            last_updated: Timestamp::now(),
            queued: None,
        };
        let families = IpFamily::ALL.map(|name| (name, family)).into();
        let state = State {
            families,
            works: BTreeMap::new(),
            next_work: 0,
            node_eligible: mode == Mode::Host,
        };
        Self {
            timeout: 2 * sync_period,
            state: watch::Sender::new(state),
        }
    }

    /// Notes a pending request for this family.
    pub fn queued(&self, family: IpFamily) {
        self.family(family, |family| {
            family.queued = family.queued.or_else(|| Some(Instant::now()))
        });
    }

    /// Notes that all requests for this family are applied.
    pub fn synced(&self, family: IpFamily) {
        self.family(family, |family| {
            *family = Family {
                last_updated: Timestamp::now(),
                queued: None,
            }
        });
    }

    /// Marks the agent as working until the result is dropped.
    pub fn work(&self) -> Work {
        let mut number = 0;
        self.state.send_modify(|state| {
            number = state.next_work;
            state.next_work += 1;
            state.works.insert(number, Instant::now());
        });
        Work {
            state: self.state.clone(),
            number,
        }
    }

    pub fn set_node_eligible(&self, eligible: bool) {
        self.state
            .send_modify(|state| state.node_eligible = eligible);
    }

    /// Returns the answer of `/livez`.
    pub fn is_live(&self) -> bool {
        self.report().live
    }

    pub fn report(&self) -> Report {
        let state = self.state.borrow();
        let in_time =
            |since: Option<Instant>| since.is_none_or(|since| since.elapsed() < self.timeout);
        let families = state.families.iter().map(|(name, family)| {
            let healthy = in_time(family.queued) && in_time(state.works.values().min().copied());
            (
                *name,
                FamilyReport {
                    last_updated: family.last_updated,
                    healthy,
                },
            )
        });
        let families: BTreeMap<_, _> = families.collect();
        Report {
            last_updated: families
                .values()
                .map(|family| family.last_updated)
                .max()
                .unwrap_or_default(),
            live: families.values().all(|family| family.healthy),
            node_eligible: state.node_eligible,
            families,
        }
    }

    fn family(&self, family: IpFamily, change: impl Fn(&mut Family)) {
        self.state
            .send_modify(|state| state.families.get_mut(&family).into_iter().for_each(change));
    }
}

/// A work item of the agent in progress. Two can coexist: the loop's, and the node's.
#[must_use]
#[derive(Debug)]
pub struct Work {
    state: watch::Sender<State>,
    number: u64,
}

impl Drop for Work {
    fn drop(&mut self) {
        self.state.send_modify(|state| {
            state.works.remove(&self.number);
        });
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const SYNC_PERIOD: Duration = Duration::from_secs(30);

    fn healthy(liveness: &Liveness) -> [bool; 2] {
        let report = liveness.report();
        assert_eq!(
            report.live,
            report.families.values().all(|family| family.healthy)
        );
        IpFamily::ALL.map(|family| report.families[&family].healthy)
    }

    #[tokio::test(start_paused = true)]
    async fn oldest_request_may_take_two_sync_periods() {
        let liveness = Liveness::new(SYNC_PERIOD, Mode::Node);
        advance(100 * SYNC_PERIOD).await;
        assert_eq!(healthy(&liveness), [true, true], "no request waits");

        liveness.queued(IpFamily::V4);
        advance(SYNC_PERIOD).await;
        liveness.queued(IpFamily::V4);
        advance(SYNC_PERIOD - Duration::from_millis(1)).await;
        assert_eq!(healthy(&liveness), [true, true]);
        advance(Duration::from_millis(1)).await;
        assert_eq!(
            healthy(&liveness),
            [false, true],
            "a later request does not excuse the oldest"
        );

        let before = liveness.report().last_updated;
        liveness.synced(IpFamily::V4);
        assert_eq!(healthy(&liveness), [true, true]);
        assert!(liveness.report().last_updated >= before);
    }

    #[tokio::test(start_paused = true)]
    async fn hanging_loop_is_not_live() {
        let liveness = Liveness::new(SYNC_PERIOD, Mode::Node);
        let work = liveness.work();
        advance(SYNC_PERIOD).await;
        // A short concurrent work item hides nothing.
        drop(liveness.work());
        advance(SYNC_PERIOD).await;
        assert_eq!(healthy(&liveness), [false, false]);
        drop(work);
        assert!(liveness.is_live());
    }

    #[test]
    fn unknown_node_is_ineligible_and_host_always_eligible() {
        let node = Liveness::new(SYNC_PERIOD, Mode::Node);
        assert!(
            !node.report().node_eligible
                && Liveness::new(SYNC_PERIOD, Mode::Host)
                    .report()
                    .node_eligible
        );
        node.set_node_eligible(true);
        assert!(node.report().node_eligible && node.is_live());
    }
}
