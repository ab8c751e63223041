//! Keeps the last decisions and refusals, for `kpx monitor --since`.

use std::collections::VecDeque;
use std::sync::Arc;

use jiff::Timestamp;

use super::event::Event;

/// The events of the past: as many decisions as refusals, so that a flood of one kind pushes out none of the other.
#[derive(Debug)]
pub(super) struct Past {
    most: usize,
    decisions: VecDeque<Arc<Event>>,
    refusals: VecDeque<Arc<Event>>,
}

impl Past {
    /// Creates the memory of at most so many decisions, and of as many refusals; None for 0.
    pub(super) fn of(most: usize) -> Option<Self> {
        (most > 0).then(|| Self { most, decisions: VecDeque::new(), refusals: VecDeque::new() })
    }

    pub(super) fn keep(&mut self, event: Arc<Event>) {
        let events = if event.what == "decision" { &mut self.decisions } else { &mut self.refusals };
        if events.len() >= self.most {
            events.pop_front();
        }
        events.push_back(event);
    }

    /// Returns the events from a time on, the oldest first.
    pub(super) fn since(&self, time: Timestamp) -> Vec<Arc<Event>> {
        let both = self.decisions.iter().chain(&self.refusals);
        let mut events: Vec<_> = both.filter(|event| event.time >= time).cloned().collect();
        events.sort_by_key(|event| event.time);
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(second: i64, what: &str) -> Arc<Event> {
        Arc::new(Event { time: Timestamp::from_second(second).unwrap(), what: what.to_owned(), ..Event::lost(0) })
    }

    #[test]
    fn flood_of_refusals_leaves_decisions_and_the_newest_refusals() {
        assert!(Past::of(0).is_none());
        let mut past = Past::of(2).unwrap();
        past.keep(event(1, "decision"));
        (2..10).for_each(|second| past.keep(event(second, "drop")));
        past.keep(event(5, "decision"));
        let seconds = |since| -> Vec<_> {
            let events = past.since(Timestamp::from_second(since).unwrap());
            events.iter().map(|event| event.time.as_second()).collect()
        };
        assert_eq!([seconds(0), seconds(5), seconds(9)], [vec![1, 5, 8, 9], vec![5, 8, 9], vec![9]]);
    }

    #[test]
    fn event_takes_less_than_a_kilobyte() {
        // Its texts have some bytes each: words of the programs, and the name of a device.
        const TEXTS: usize = 9 * 32;
        assert!(size_of::<Event>() + TEXTS < 1_024, "{}", size_of::<Event>());
    }
}
