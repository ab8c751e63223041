//! Distinguishes a lasting repair from a repair that another program undoes each time.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;

use proxy_metrics::Repairs;
use proxy_source::health::{Health, Problem};

/// The number of consecutive checks after which a finding becomes a problem.
const LOOKS: u32 = 3;

/// The objects that are missing at check after check.
#[derive(Debug, Default)]
pub(super) struct Relapses {
    /// The missing objects, with the number of consecutive checks that found each missing.
    looks: BTreeMap<String, u32>,
    /// The objects repaired since the last check.
    since: BTreeSet<String>,
}

impl Relapses {
    /// Returns true while the log still reports repairs of this object.
    pub(super) fn is_news(&self, what: &str) -> bool {
        self.looks.get(what).is_none_or(|looks| *looks < LOOKS) && !self.since.contains(what)
    }

    /// Notes a repair between two checks, for the next check.
    pub(super) fn note(&mut self, what: Option<&str>) {
        self.since.extend(what.map(str::to_owned));
    }

    /// Evaluates the repairs of a check: the counts after and before it, and the reattached
    /// programs.
    pub(super) fn looked(
        &mut self,
        after: Repairs,
        before: Repairs,
        programs: BTreeSet<String>,
        health: &Health,
    ) {
        let more = iter::zip(after.counts(), before.counts())
            .filter(|((_, after), (_, before))| after > before);
        let mut gone = std::mem::take(&mut self.since);
        gone.extend(more.map(|((what, _), _)| what.to_owned()));
        // Programs are identified by their devices.
        if !programs.is_empty() {
            gone.remove("program");
            gone.extend(programs);
        }
        let known = std::mem::take(&mut self.looks);
        let looks = |what: &String| known.get(what).map_or(1, |looks| looks + 1);
        self.looks = gone
            .into_iter()
            .map(|what| (looks(&what), what))
            .map(|(looks, what)| (what, looks))
            .collect();
        known
            .keys()
            .filter(|what| !self.looks.contains_key(*what))
            .for_each(|what| health.end(&problem(what)));
        for (what, _) in self.looks.iter().filter(|(_, looks)| **looks >= LOOKS) {
            health.begin(
                &problem(what),
                "another program removes it each time that kpx has put it back",
            );
        }
    }
}

fn problem(what: &str) -> Problem {
    Problem::Repairs(what.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repair_that_is_undone_each_time_is_a_problem_and_no_news() {
        let mut relapses = Relapses::default();
        let health = Health::default();
        let mut look = |routes: u64, programs: &[&str]| {
            let before = Repairs::default();
            let programs = programs.iter().map(|name| (*name).to_owned()).collect();
            relapses.looked(Repairs { routes, ..before }, before, programs, &health);
            (
                health.has(&problem("route")),
                relapses.is_news("route"),
                health.has(&problem("the programs of eth0")),
            )
        };
        assert_eq!(
            [look(2, &[]), look(1, &[]), look(0, &[])],
            [(false, true, false); 3],
            "it held once"
        );
        assert_eq!([look(1, &[]), look(1, &[])], [(false, true, false); 2]);
        assert_eq!(look(1, &["the programs of eth0"]), (true, false, false));
        assert_eq!(look(1, &["the programs of eth0"]), (true, false, false));
        assert_eq!(look(0, &["the programs of eth0"]), (false, true, true));
        assert_eq!(
            look(0, &["the programs of eth1"]),
            (false, true, false),
            "another device's"
        );
        for is_problem in [false, false, true] {
            relapses.note(Some("route"));
            assert!(!relapses.is_news("route"), "the log has it");
            let none = Repairs::default();
            relapses.looked(none, none, BTreeSet::new(), &health);
            assert_eq!(
                health.has(&problem("route")),
                is_problem,
                "put back between the looks"
            );
        }
    }
}
