//! The backends ejected because their node does not respond.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proxy_common::connect::Votes;

use super::{BACK_OFF, FORGET, Judged, Path, Reading, Readings, State};

/// The maximum members of one group and of all groups. Tenants choose how many endpoints a node
/// has.
const MEMBERS: usize = 1_024;
const MEMBERS_OF_ALL: usize = 16_384;

/// The groups of backends on one unresponsive node and service port. A group is ejected together
/// and on probation together.
///
/// An answer of any member ends the ejection for all. Ended groups are remembered, so that the next
/// ejection lasts longer. Each backend's own failures count as well.
#[derive(Debug, Default)]
pub(super) struct UnresponsiveGroups {
    groups: BTreeMap<u64, Judged>,
    members: BTreeMap<Path, Member>,
    next: u64,
}

/// A backend, as of the last reading.
#[derive(Debug)]
struct Member {
    group: u64,
    failures: u32,
    /// `None` before the first reading.
    answered: Option<u64>,
}

impl UnresponsiveGroups {
    pub(super) fn read(
        &mut self,
        readings: &Readings,
        now: Duration,
        is_backend: impl Fn(&Path) -> bool,
    ) {
        // Another pod may reuse a deleted backend's address.
        self.members.retain(|path, _| is_backend(path));
        let mut failed = BTreeMap::<u64, u32>::new();
        for (path, member) in &mut self.members {
            let reading = readings.get(path).copied().unwrap_or(Reading::NOTHING);
            let answered = member.answered.replace(reading.answered);
            // A smaller count means that the agent has deleted the row since, and it restarted at
            // 0.
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

    /// Ejects the backends of an unresponsive node, unless they are ejected or were recently.
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

    /// Starts and ends probations. Returns the backends of forgotten groups.
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

    pub(super) fn silent(&self) -> impl Iterator<Item = &Path> {
        self.of(Judged::is_out)
    }

    /// Returns the backends that are ejected or on probation.
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

    /// Returns true if the backend's group is ejected or on probation.
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

    /// Returns true if any group is ejected or on probation.
    pub(super) fn waits(&self) -> bool {
        self.groups
            .values()
            .any(|group| group.state != State::Serving)
    }
}

/// Returns true if a new ejection may follow after an answer has ended the last ejection.
fn is_over(group: &Judged, now: Duration) -> bool {
    now.saturating_sub(group.struck) > BACK_OFF
}

impl Reading {
    /// The reading of a backend without connections.
    const NOTHING: Self = Self {
        votes: Votes::NONE,
        answered: 0,
        unanswered: None,
    };
}
