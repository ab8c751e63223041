//! Delays the effects of a Service's rows until the rows are in the tables: health checks, and the
//! times of changes.

use std::collections::BTreeMap;

use super::Desired;
use crate::input::{ObjectName, Trigger};
use crate::model::HealthCheck;

#[derive(Debug, Default)]
pub(super) struct Followers {
    /// The endpoint changes whose Services no pass has read yet.
    unread: Vec<Trigger>,
    /// The endpoint changes whose Services a pass has read, each with that pass.
    read: Vec<(u64, Trigger)>,
    /// The health checks of the Services that a pass has read.
    checks: BTreeMap<ObjectName, Checks>,
}

/// A Service's waiting health checks with their passes: the oldest and the newest.
#[derive(Debug)]
struct Checks {
    first: (u64, Option<HealthCheck>),
    last: Option<(u64, Option<HealthCheck>)>,
}

impl Followers {
    pub(super) fn triggered(&mut self, triggers: Vec<Trigger>) {
        self.unread.extend(triggers);
    }

    /// Records the health check of a Service that `pass` reads.
    pub(super) fn read(&mut self, service: &ObjectName, pass: u64, check: Option<HealthCheck>) {
        if let Some(checks) = self.checks.get_mut(service) {
            checks.last = Some((pass, check));
        } else {
            self.checks.insert(
                service.clone(),
                Checks {
                    first: (pass, check),
                    last: None,
                },
            );
        }
    }

    /// Takes the triggers of Services whose rows are in the tables. `waits` returns true if a
    /// Service has waited since that pass or earlier.
    fn take_due(&mut self, waits: impl Fn(&ObjectName, u64) -> bool) -> Vec<Trigger> {
        let (waiting, due): (Vec<_>, Vec<_>) = std::mem::take(&mut self.read)
            .into_iter()
            .partition(|(pass, trigger)| waits(&trigger.service, *pass));
        self.read = waiting;
        due.into_iter().map(|(_, trigger)| trigger).collect()
    }
}

impl Desired {
    /// Updates the health checks from the tables. Returns the endpoint changes that are in the
    /// tables.
    pub(super) fn follow_up(&mut self) -> Vec<Trigger> {
        let Self {
            followers,
            dirty,
            v4,
            v6,
            health_checks,
            passes,
            ..
        } = self;
        let (unread, read): (Vec<_>, Vec<_>) = std::mem::take(&mut followers.unread)
            .into_iter()
            .partition(|trigger| dirty.contains(&trigger.service));
        followers.unread = unread;
        followers
            .read
            .extend(read.into_iter().map(|trigger| (*passes, trigger)));
        if followers.read.is_empty() && followers.checks.is_empty() {
            return Vec::new();
        }
        let waiting = [v4.waiting(), v6.waiting()];
        // A Service that changes in each pass may always wait, but only for its newest changes.
        let waits = |service: &ObjectName, pass: u64| {
            waiting
                .iter()
                .filter_map(|waiting| waiting.get(service))
                .any(|since| *since <= pass)
        };
        followers.checks.retain(|service, checks| {
            while !waits(service, checks.first.0) {
                match checks.first.1.take() {
                    Some(check) => health_checks.insert(service.clone(), check),
                    None => health_checks.remove(service),
                };
                let Some(next) = checks.last.take() else {
                    return false;
                };
                checks.first = next;
            }
            true
        });
        followers.take_due(waits)
    }
}
