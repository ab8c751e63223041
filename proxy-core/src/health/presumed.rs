//! The backends that are left out because their node does not respond.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proxy_common::connect::Votes;

use super::{BACK_OFF, Judged, Path, Reading, Readings, State};

/// The backends of all presumptions at most: tenants choose how many endpoints a node has.
const MEMBERS: usize = 4_096;

/// Presumptions, each of the backends of one node and service port. They are silent together, and on trial together.
///
/// An answer of any of them ends it for all. Each backend is judged by its own failures as well.
#[derive(Debug, Default)]
pub(super) struct Presumptions {
    /// By the number of a presumption.
    groups: BTreeMap<u64, Judged>,
    members: BTreeMap<Path, Member>,
    next: u64,
}

/// A backend, as the last reading had it.
#[derive(Debug)]
struct Member {
    group: u64,
    failures: u32,
    /// None before the first reading that was asked for it.
    answered: Option<u64>,
}

impl Presumptions {
    /// Takes in what was counted.
    pub(super) fn read(&mut self, readings: &Readings, now: Duration, is_backend: impl Fn(&Path) -> bool) {
        // The address of one that is gone may come again, with another pod.
        self.members.retain(|path, _| is_backend(path));
        let mut failed = BTreeMap::<u64, u32>::new();
        for (path, member) in &mut self.members {
            let reading = readings.get(path).copied().unwrap_or(Reading::NOTHING);
            let answered = member.answered.replace(reading.answered);
            if answered.is_some_and(|before| before != reading.answered)
                && let Some(group) = self.groups.get_mut(&member.group)
            {
                group.answers();
            }
            let failures = std::mem::replace(&mut member.failures, reading.votes.failures());
            if reading.votes != Votes::NONE {
                *failed.entry(member.group).or_default() += reading.votes.failures_since(failures);
            }
        }
        for (number, more) in failed {
            if let Some(group) = self.groups.get_mut(&number).filter(|group| group.state != State::Serving) {
                group.fails_on_trial(more, now);
            }
        }
    }

    /// Begins a presumption about the backends of a node that does not respond.
    pub(super) fn begin(&mut self, paths: &BTreeSet<Path>, readings: &Readings, now: Duration) {
        if self.members.len() + paths.len() > MEMBERS || paths.iter().any(|path| self.members.contains_key(path)) {
            return;
        }
        let mut group = Judged::new(Reading::NOTHING, now);
        group.strike(now);
        self.groups.insert(self.next, group);
        for path in paths {
            let failures = readings.get(path).map_or(0, |reading| reading.votes.failures());
            self.members.insert(*path, Member { group: self.next, failures, answered: None });
        }
        self.next += 1;
    }

    /// Begins and ends trials. A presumption that an answer has ended is kept for a while, so that none follows at once.
    pub(super) fn pass(&mut self, now: Duration) {
        let Self { groups, members, .. } = self;
        for group in groups.values_mut() {
            group.pass(now);
        }
        groups.retain(|_, group| group.state != State::Serving || now.saturating_sub(group.struck) <= BACK_OFF);
        members.retain(|_, member| groups.contains_key(&member.group));
    }

    /// Returns the backends that shall take no connections.
    pub(super) fn silent(&self) -> impl Iterator<Item = &Path> {
        self.of(Judged::is_out)
    }

    /// Returns those and the ones on trial.
    pub(super) fn all(&self) -> impl Iterator<Item = &Path> {
        self.of(|group| group.state != State::Serving)
    }

    fn of(&self, is_wanted: impl Fn(&Judged) -> bool) -> impl Iterator<Item = &Path> {
        let wanted: BTreeSet<_> =
            self.groups.iter().filter(|(_, group)| is_wanted(group)).map(|(number, _)| *number).collect();
        self.members.iter().filter(move |(_, member)| wanted.contains(&member.group)).map(|(path, _)| path)
    }

    /// Returns true if a presumption about this backend is in force.
    pub(super) fn has(&self, path: &Path) -> bool {
        let group = self.members.get(path).and_then(|member| self.groups.get(&member.group));
        group.is_some_and(|group| group.state != State::Serving)
    }

    pub(super) fn knows(&self, path: &Path) -> bool {
        self.members.contains_key(path)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }
}

impl Reading {
    /// Of a backend that was not dialled.
    const NOTHING: Self = Self { votes: Votes::NONE, answered: 0, owed: None };
}
