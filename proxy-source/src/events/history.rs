//! What was told before: what is told again is counted, and nobody hears too much of one object.
//!
//! The limits are those of client-go's event broadcasters.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::{Event, Regarding};

/// Events of one object that may be sent at once...
const BURST: f64 = 25.0;
/// ...and in which time one more may.
const REFILL: Duration = Duration::from_secs(300);
/// What is told again after this long is told anew.
const SERIES: Duration = Duration::from_secs(360);
/// Events and objects that are remembered.
const CAPACITY: usize = 4_096;

#[derive(Debug, Default)]
pub(crate) struct History {
    budgets: BTreeMap<Regarding, Budget>,
    series: BTreeMap<Event, Series>,
}

/// What is to be done about an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// To be created under this name.
    Create(String),
    /// The event of this name was told so many times.
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
    /// Enters an event that is told now. `name` is for the object that tells of it, should it be the first.
    pub(crate) fn enter(&mut self, event: &Event, name: impl FnOnce() -> String, now: Instant) -> Step {
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
            self.series.insert(event.clone(), Series { name: name.clone(), count: 1, last: now });
            return Step::Create(name);
        };
        Step::Count(name, count)
    }

    /// The event is not, or no longer, where it was left: it is to be told anew.
    pub(crate) fn forget(&mut self, event: &Event) {
        self.series.remove(event);
    }

    fn afford(&mut self, regarding: &Regarding, now: Instant) -> bool {
        if !self.budgets.contains_key(regarding) {
            make_room(&mut self.budgets, |budget| budget.last);
        }
        let budget = self.budgets.entry(regarding.clone()).or_insert(Budget { left: BURST, last: now });
        let gained = (now - budget.last).as_secs_f64() / REFILL.as_secs_f64();
        (budget.left, budget.last) = ((budget.left + gained).min(BURST), now);
        let affords = budget.left >= 1.0;
        if affords {
            budget.left -= 1.0;
        }
        affords
    }
}

/// Forgets what was used the longest time ago, if there is no room.
fn make_room<K: Clone + Ord, V>(entries: &mut BTreeMap<K, V>, last: impl Fn(&V) -> Instant) {
    if entries.len() < CAPACITY {
        return;
    }
    let oldest = entries.iter().min_by_key(|(_, entry)| last(entry)).map(|(key, _)| key.clone());
    oldest.and_then(|key| entries.remove(&key));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Severity;
    use proxy_core::input::ObjectName;
    use proxy_core::model::ObjectRef;

    #[test]
    fn what_is_told_again_is_counted_and_after_a_while_told_anew() {
        let (mut history, start) = (History::default(), Instant::now());
        let mut names = (0..).map(|number| format!("n{number}"));
        let mut enter =
            |event: &Event, secs| history.enter(event, || names.next().unwrap(), start + Duration::from_secs(secs));
        let (one, other) = (event("web", "one"), event("web", "other"));
        assert_eq!(enter(&one, 0), Step::Create("n0".into()));
        assert_eq!(enter(&one, 1), Step::Count("n0".into(), 2));
        assert_eq!(enter(&other, 1), Step::Create("n1".into()), "another note is other news");
        assert_eq!(enter(&one, 300), Step::Count("n0".into(), 3));
        assert_eq!(enter(&one, 659), Step::Count("n0".into(), 4));
        assert_eq!(enter(&one, 659 + 360), Step::Create("n2".into()));
        history.forget(&one);
        assert_eq!(history.enter(&one, || "n3".into(), start), Step::Create("n3".into()));
    }

    #[test]
    fn one_object_has_a_budget_and_others_have_their_own() {
        let (mut history, start) = (History::default(), Instant::now());
        let mut sent = |name: &str, note: &str, secs| {
            history.enter(&event(name, note), String::new, start + Duration::from_secs(secs)) != Step::Nothing
        };
        let burst = (0..100).filter(|number| sent("web", &number.to_string(), 0)).count();
        assert_eq!(burst, 25);
        assert!(sent("other", "", 0));
        assert!(!sent("web", "", 299));
        assert!(sent("web", "", 300));
        assert!(!sent("web", "", 301));
    }

    #[test]
    fn what_was_not_sent_is_counted_all_the_same() {
        let (mut history, start) = (History::default(), Instant::now());
        let web = event("web", "");
        let mut last = Step::Nothing;
        for _ in 0..100 {
            last = history.enter(&web, String::new, start);
        }
        assert_eq!(last, Step::Nothing);
        let later = start + Duration::from_secs(300);
        assert_eq!(history.enter(&web, String::new, later), Step::Count(String::new(), 101));
    }

    #[test]
    fn memory_has_a_bound_and_the_newest_stay() {
        let (mut history, start) = (History::default(), Instant::now());
        for number in 0..CAPACITY + 10 {
            let at = start + Duration::from_millis(number as u64);
            assert!(matches!(history.enter(&event(&number.to_string(), ""), String::new, at), Step::Create(_)));
        }
        assert_eq!((history.series.len(), history.budgets.len()), (CAPACITY, CAPACITY));
        let newest = event(&(CAPACITY + 9).to_string(), "");
        assert!(matches!(history.enter(&newest, String::new, start + Duration::from_secs(10)), Step::Count(_, 2)));
    }

    fn event(service: &str, note: &str) -> Event {
        let object = ObjectRef { kind: "Service", name: ObjectName::new("default", service) };
        Event {
            regarding: Regarding { object, uid: None },
            severity: Severity::Warning,
            reason: "InvalidField",
            action: "Sync",
            note: note.to_owned(),
        }
    }
}
