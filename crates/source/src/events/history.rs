//! Counts repeated Events, and limits the Events about one object, as client-go's broadcasters do.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::{Event, Regarding};

/// The number of Events about one object that may be sent at once.
const BURST: f64 = 25.0;
/// The time after which one more Event may be sent.
const REFILL: Duration = Duration::from_secs(300);
/// The time after its last repetition when an Event is created anew.
const SERIES: Duration = Duration::from_secs(360);
/// The maximum number of remembered Events and objects.
const CAPACITY: usize = 4_096;

#[derive(Debug, Default)]
pub(crate) struct History {
    budgets: BTreeMap<Regarding, Budget>,
    series: BTreeMap<Event, Series>,
}

/// The request that an Event requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Create the Event under this name.
    Create(String),
    /// Set the count of the Event with this name.
    Count(String, i32),
    Nothing,
}

#[derive(Debug)]
struct Budget {
    left: f64,
    last: Instant,
}

#[derive(Debug)]
struct Series {
    name: String,
    count: i32,
    last: Instant,
}

impl History {
    /// Records an Event at the time `now`. `name` creates the name of a new API object.
    pub(crate) fn enter(
        &mut self,
        event: &Event,
        name: impl FnOnce() -> String,
        now: Instant,
    ) -> Step {
        self.series.retain(|_, series| now - series.last < SERIES);
        let known = self.series.get_mut(event).map(|series| {
            series.count = series.count.saturating_add(1);
            series.last = now;
            (series.name.clone(), series.count)
        });
        if !self.afford(&event.regarding, now) {
            return Step::Nothing;
        }
        let Some((name, count)) = known else {
            let name = name();
            make_room(&mut self.series, |series| series.last);
            self.series.insert(
                event.clone(),
                Series {
                    name: name.clone(),
                    count: 1,
                    last: now,
                },
            );
            return Step::Create(name);
        };
        Step::Count(name, count)
    }

    /// Forgets an Event whose API object is gone; the next equal Event creates a new object.
    pub(crate) fn forget(&mut self, event: &Event) {
        self.series.remove(event);
    }

    fn afford(&mut self, regarding: &Regarding, now: Instant) -> bool {
        if !self.budgets.contains_key(regarding) {
            make_room(&mut self.budgets, |budget| budget.last);
        }
        let budget = self.budgets.entry(regarding.clone()).or_insert(Budget {
            left: BURST,
            last: now,
        });
        let gained = (now - budget.last).as_secs_f64() / REFILL.as_secs_f64();
        (budget.left, budget.last) = ((budget.left + gained).min(BURST), now);
        let affords = budget.left >= 1.0;
        if affords {
            budget.left -= 1.0;
        }
        affords
    }
}

/// Removes the least recently used entry, if the map is full.
fn make_room<K: Clone + Ord, V>(entries: &mut BTreeMap<K, V>, last: impl Fn(&V) -> Instant) {
    if entries.len() < CAPACITY {
        return;
    }
    let oldest = entries
        .iter()
        .min_by_key(|(_, entry)| last(entry))
        .map(|(key, _)| key.clone());
    oldest.and_then(|key| entries.remove(&key));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Severity;
    use proxy_core::input::ObjectName;
    use proxy_core::model::ObjectRef;

    #[test]
    fn repeated_event_is_counted_and_later_created_again() {
        let mut history = History::default();
        let start = Instant::now();
        let mut names = (0..).map(|number| format!("n{number}"));
        let mut enter = |event: &Event, secs| {
            history.enter(
                event,
                || names.next().unwrap(),
                start + Duration::from_secs(secs),
            )
        };
        let one = event("web", "one");
        let other = event("web", "other");
        assert_eq!(enter(&one, 0), Step::Create("n0".into()));
        assert_eq!(enter(&one, 1), Step::Count("n0".into(), 2));
        assert_eq!(
            enter(&other, 1),
            Step::Create("n1".into()),
            "another note is another event"
        );
        assert_eq!(enter(&one, 300), Step::Count("n0".into(), 3));
        assert_eq!(enter(&one, 659), Step::Count("n0".into(), 4));
        assert_eq!(enter(&one, 659 + 360), Step::Create("n2".into()));
        history.forget(&one);
        assert_eq!(
            history.enter(&one, || "n3".into(), start),
            Step::Create("n3".into())
        );
    }

    #[test]
    fn each_object_has_a_budget_of_its_own() {
        let mut history = History::default();
        let start = Instant::now();
        let mut sent = |name: &str, note: &str, secs| {
            history.enter(
                &event(name, note),
                String::new,
                start + Duration::from_secs(secs),
            ) != Step::Nothing
        };
        let burst = (0..100)
            .filter(|number| sent("web", &number.to_string(), 0))
            .count();
        assert_eq!(burst, 25);
        assert!(sent("other", "", 0));
        assert!(!sent("web", "", 299));
        assert!(sent("web", "", 300));
        assert!(!sent("web", "", 301));
    }

    #[test]
    fn unsent_event_is_counted() {
        let mut history = History::default();
        let start = Instant::now();
        let web = event("web", "");
        let mut last = Step::Nothing;
        for _ in 0..100 {
            last = history.enter(&web, String::new, start);
        }
        assert_eq!(last, Step::Nothing);
        let later = start + Duration::from_secs(300);
        assert_eq!(
            history.enter(&web, String::new, later),
            Step::Count(String::new(), 101)
        );
    }

    #[test]
    fn history_is_bounded_and_keeps_the_newest() {
        let mut history = History::default();
        let start = Instant::now();
        for number in 0..CAPACITY + 10 {
            let at = start + Duration::from_millis(number as u64);
            assert!(matches!(
                history.enter(&event(&number.to_string(), ""), String::new, at),
                Step::Create(_)
            ));
        }
        assert_eq!(
            (history.series.len(), history.budgets.len()),
            (CAPACITY, CAPACITY)
        );
        let newest = event(&(CAPACITY + 9).to_string(), "");
        assert!(matches!(
            history.enter(&newest, String::new, start + Duration::from_secs(10)),
            Step::Count(_, 2)
        ));
    }

    fn event(service: &str, note: &str) -> Event {
        let object = ObjectRef {
            kind: "Service",
            name: ObjectName::new("default", service),
        };
        Event {
            regarding: Regarding { object, uid: None },
            severity: Severity::Warning,
            reason: "InvalidField",
            action: "Sync",
            note: note.to_owned(),
        }
    }
}
