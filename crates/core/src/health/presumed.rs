//! The backends that are left out because their node does not respond.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proxy_common::connect::Votes;

use super::{BACK_OFF, FORGET, Judged, Path, Reading, Readings, State};

/// The backends of one presumption, and of all, at most: tenants choose how many endpoints a node
/// has.
const MEMBERS: usize = 1_024;
const MEMBERS_OF_ALL: usize = 16_384;

/// Presumptions, each of the backends of one node and service port. They are silent together, and
/// on trial together.
///
/// An answer of any of them ends it for all. A presumption that has ended is remembered, so that
/// the next one lasts longer. Each backend is judged by its own failures as well.
#[derive(Debug, Default)]
pub(super) struct Presumptions {
    /// The state of each presumption.
    groups: BTreeMap<u64, Judged>,
    members: BTreeMap<Path, Member>,
    next: u64,
}

/// A backend, as the last reading had it.
#[derive(Debug)]
struct Member {
    group: u64,
    failures: u32,
    /// None if no reading has had it yet.
    answered: Option<u64>,
}

impl Presumptions {
    /// Takes in what was counted.
    pub(super) fn read(
        &mut self,
        readings: &Readings,
        now: Duration,
        is_backend: impl Fn(&Path) -> bool,
    ) {
        // The address of one that is gone may come again, with another pod.
        self.members.retain(|path, _| is_backend(path));
        let mut failed = BTreeMap::<u64, u32>::new();
        for (path, member) in &mut self.members {
            let reading = readings.get(path).copied().unwrap_or(Reading::NOTHING);
            let answered = member.answered.replace(reading.answered);
            // A row that the agent has tidied away begins at 0 again.
            if answered.is_some_and(|before| reading.answered > before)
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
            if let Some(group) = self
                .groups
                .get_mut(&number)
                .filter(|group| group.state != State::Serving)
            {
                group.fails_on_trial(more, now);
            }
        }
    }

    /// Begins a presumption about the backends of a node that does not respond, unless one is in
    /// force or has just ended.
    pub(super) fn begin(&mut self, paths: &BTreeSet<Path>, readings: &Readings, now: Duration) {
        let before = paths
            .iter()
            .find_map(|path| Some(self.members.get(path)?.group));
        let number = match before.and_then(|number| Some((number, self.groups.get(&number)?))) {
            Some((_, group)) if group.state != State::Serving || !is_over(group, now) => return,
            Some((number, _)) => number,
            None => self.next,
        };
        if paths.len() > MEMBERS || self.members.len() + paths.len() > MEMBERS_OF_ALL {
            return;
        }
        self.next = self.next.max(number + 1);
        self.members
            .retain(|path, member| member.group != number || paths.contains(path));
        self.groups
            .entry(number)
            .or_insert_with(|| Judged::new(Reading::NOTHING, now))
            .strike(now);
        for path in paths {
            let reading = readings.get(path);
            let failures = reading.map_or(0, |reading| reading.votes.failures());
            let answered = reading.map(|reading| reading.answered);
            self.members.insert(
                *path,
                Member {
                    group: number,
                    failures,
                    answered,
                },
            );
        }
    }

    /// Begins and ends trials. Returns the backends whose presumption is forgotten.
    pub(super) fn pass(&mut self, now: Duration) -> Vec<Path> {
        let Self {
            groups, members, ..
        } = self;
        let forgotten: BTreeSet<_> = groups
            .iter_mut()
            .filter_map(|(number, group)| group.pass(now).then_some(*number))
            .collect();
        let forgotten = members
            .iter()
            .filter(|(_, member)| forgotten.contains(&member.group))
            .map(|(path, _)| *path);
        let forgotten = forgotten.collect();
        let used: BTreeSet<_> = members.values().map(|member| member.group).collect();
        groups.retain(|number, group| {
            used.contains(number) && now.saturating_sub(group.struck) <= FORGET
        });
        members.retain(|_, member| groups.contains_key(&member.group));
        forgotten
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
        let wanted: BTreeSet<_> = self
            .groups
            .iter()
            .filter(|(_, group)| is_wanted(group))
            .map(|(number, _)| *number)
            .collect();
        self.members
            .iter()
            .filter(move |(_, member)| wanted.contains(&member.group))
            .map(|(path, _)| path)
    }

    /// Returns true if a presumption about this backend is in force.
    pub(super) fn has(&self, path: &Path) -> bool {
        let group = self
            .members
            .get(path)
            .and_then(|member| self.groups.get(&member.group));
        group.is_some_and(|group| group.state != State::Serving)
    }

    pub(super) fn knows(&self, path: &Path) -> bool {
        self.members.contains_key(path)
    }

    /// Returns true if one is in force.
    pub(super) fn waits(&self) -> bool {
        self.groups
            .values()
            .any(|group| group.state != State::Serving)
    }
}

/// Returns true if another presumption may follow one that an answer has ended.
fn is_over(group: &Judged, now: Duration) -> bool {
    now.saturating_sub(group.struck) > BACK_OFF
}

impl Reading {
    /// A reading of a backend that was not dialled.
    const NOTHING: Self = Self {
        votes: Votes::NONE,
        answered: 0,
        owed: None,
    };
}
