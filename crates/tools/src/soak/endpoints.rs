//! Backends change continuously.

use std::collections::{BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::unistd::Pid;
use proxy_common::addr::{Addr, Port, Proto};
use proxy_common::frontend::{FrontendKey, Set, SlotKey};
use proxy_core::tables::FamilyTables;

use super::Scale;
use super::fixture::Fixture;
use super::report::Report;
use crate::load::Exchange;
use testbed::agent::{Cluster, SERVICE_PORT, Service, wait_until};
use testbed::kernel_tables;
use testbed::lab::{Family, Lab};

/// Consecutive sets share no backend, and each leaves out a backend that would be wrong.
const SETS: [[&str; 2]; 5] = [
    ["p1b", "p1c"],
    ["p2a", "p2b"],
    ["n2", "p1b"],
    ["p1c", "p2a"],
    ["p2b", "n2"],
];
/// The EndpointSlices that change with a set: two Services, each with two families.
const SLICES: u32 = 4;
const DEADLINE: Duration = Duration::from_secs(60);
/// The number of past sets kept: more than any connection's check needs.
const REMEMBERED: usize = 4096;

/// Replaces the backends of two Services as soon as the previous change is programmed.
pub fn endpoints(scale: Scale) -> Result<Report> {
    let fixture = Fixture::build(scale.place)?;
    let agent = fixture.kpx(&[])?;
    let history = History::default();
    let mut turns = Turns::new(&history);
    turns.next(&fixture, agent.pid())?;
    let load = fixture.load(scale.rate, history.judge())?;
    let started = Instant::now();
    while turns.changes < u64::from(scale.rounds) || started.elapsed() < scale.at_least {
        turns.next(&fixture, agent.pid())?;
    }
    let lasted = started.elapsed();
    let seen = load.finish()?;
    agent.stop()?;
    let changes = turns.changes;
    let slowest = turns.slowest;
    let what = format!(
        "{changes} EndpointSlices changed in {lasted:.1?}, in force within {slowest:.1?} at worst"
    );
    Ok(Report::new("endpoints", what, &seen))
}

pub(super) struct Turns<'a> {
    history: &'a History,
    turn: usize,
    /// The number of changed EndpointSlices.
    pub(super) changes: u64,
    /// The longest time from the first changed object until the kernel's tables match.
    pub(super) slowest: Duration,
}

impl<'a> Turns<'a> {
    pub(super) fn new(history: &'a History) -> Self {
        Self {
            history,
            turn: 0,
            changes: 0,
            slowest: Duration::ZERO,
        }
    }

    /// Changes the objects, and waits until the tables match.
    pub(super) fn next(&mut self, fixture: &Fixture, kpx: Pid) -> Result<()> {
        let begun = Instant::now();
        self.change(fixture)?;
        self.wait(fixture, kpx)?;
        self.slowest = self.slowest.max(begun.elapsed());
        Ok(())
    }

    /// Changes the objects. From now on both sets may answer.
    pub(super) fn change(&mut self, fixture: &Fixture) -> Result<()> {
        self.change_in(&fixture.cluster, &fixture.web, &fixture.lab)
    }

    pub(super) fn change_in(
        &mut self,
        cluster: &Cluster,
        services: &[Service],
        lab: &Lab,
    ) -> Result<()> {
        self.turn += 1;
        self.history.begin(self.set());
        for service in services {
            // The Service object stays unchanged.
            service
                .backed_by(&self.set())
                .objects(lab)
                .iter()
                .skip(1)
                .try_for_each(|slice| cluster.put(slice))?;
        }
        self.changes += u64::from(SLICES);
        Ok(())
    }

    /// Waits until the kernel's tables match. From now on only the new set may answer.
    pub(super) fn wait(&self, fixture: &Fixture, kpx: Pid) -> Result<()> {
        wait_until(DEADLINE, &format!("{:?} are in force", self.set()), || {
            self.is_in_force(fixture, kpx)
        })?;
        self.history.settle();
        Ok(())
    }

    fn is_in_force(&self, fixture: &Fixture, kpx: Pid) -> Result<bool> {
        let tables = kernel_tables::of(kpx)?;
        let lab = &fixture.lab;
        Ok(fixture.web.iter().all(|service| {
            let service = service.backed_by(&self.set());
            backends(&tables.v4, lab, &service, Family::V4)
                && backends(&tables.v6, lab, &service, Family::V6)
        }))
    }

    fn set(&self) -> [&'static str; 2] {
        SETS[self.turn % SETS.len()]
    }
}

/// Checks that connections to a Service go only to its backends.
fn backends<A: Addr + Ord>(
    tables: &FamilyTables<A>,
    lab: &Lab,
    service: &Service,
    family: Family,
) -> bool {
    let wanted: BTreeSet<IpAddr> = service
        .backends
        .iter()
        .map(|name| lab.host(name).addrs.ip(family))
        .collect();
    let Some(addr) = A::from_ip(service.cluster_ip().ip(family)) else {
        return false;
    };
    let key = FrontendKey::new(addr, Port::new(SERVICE_PORT), Proto::TCP);
    let count = tables
        .services
        .get(&key)
        .map_or(0, |service| service.count(Set::CLUSTER));
    let slots = (0..count).map(|index| tables.slots.get(&SlotKey::new(key, Set::CLUSTER, index)));
    slots
        .map(|slot| slot.map(|backend| backend.addr.ip()))
        .collect::<Option<BTreeSet<_>>>()
        == Some(wanted)
}

/// The allowed backends by time.
#[derive(Clone, Default)]
pub(super) struct History(Arc<Mutex<VecDeque<Era>>>);

struct Era {
    set: [&'static str; 2],
    /// When the first object of this set was changed.
    begun: Instant,
    /// When the next set was programmed.
    ended: Option<Instant>,
}

impl History {
    /// Records that the next set may answer in addition to the current set.
    pub(super) fn begin(&self, set: [&'static str; 2]) {
        let mut eras = self.eras();
        eras.push_back(Era {
            set,
            begun: Instant::now(),
            ended: None,
        });
        if eras.len() > REMEMBERED {
            eras.pop_front();
        }
    }

    /// Records that only the last set may answer.
    pub(super) fn settle(&self) {
        let now = Instant::now();
        let mut eras = self.eras();
        eras.iter_mut()
            .rev()
            .skip(1)
            .take_while(|era| era.ended.is_none())
            .for_each(|era| era.ended = Some(now));
    }

    pub(super) fn judge(&self) -> impl Fn(&Exchange) -> bool + Send + 'static {
        let this = self.clone();
        move |exchange| this.allows(exchange.backend, exchange.dialled, exchange.answered)
    }

    /// Returns true if the backend was allowed at some time between these two.
    fn allows(&self, backend: &str, from: Instant, to: Instant) -> bool {
        let eras = self.eras();
        let late = eras.iter().rev().skip_while(|era| era.begun > to);
        let mut during = late.take_while(|era| era.ended.is_none_or(|ended| ended >= from));
        during.any(|era| era.set.contains(&backend))
    }

    fn eras(&self) -> MutexGuard<'_, VecDeque<Era>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_sets_may_answer_between_begin_and_settle() {
        let history = History::default();
        let now = Instant::now;
        history.begin(["a", "b"]);
        history.settle();
        let first = now();
        let may = |backend, from, to| history.allows(backend, from, to);
        assert!(may("a", first, now()) && !may("c", first, now()));
        history.begin(["c", "d"]);
        let both = now();
        assert!(may("a", both, now()) && may("c", both, now()) && !may("e", both, now()));
        history.settle();
        let second = now() + Duration::from_nanos(1);
        assert!(!may("a", second, second) && may("c", second, second));
        // A client that dialled before the change, and was answered late, may get either backend.
        assert!(may("a", both, second) && may("c", first, second) && may("a", first, second));
        // A client with an answer before the change is unaffected by the change.
        assert!(!may("c", first, first));
    }

    #[test]
    fn successive_sets_leave_a_backend_out() {
        let all: BTreeSet<&str> = SETS.into_iter().flatten().collect();
        for (at, set) in SETS.iter().enumerate() {
            let next = SETS[(at + 1) % SETS.len()];
            let both: BTreeSet<&str> = set.iter().chain(&next).copied().collect();
            assert_eq!(both.len(), 4);
            assert!(both.len() < all.len());
        }
    }
}
