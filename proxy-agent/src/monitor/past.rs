//! Stores the last decisions and refusals, for `kpx monitor --since`.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use jiff::Timestamp;

use super::event::Event;

/// The past events. Decisions and refusals each have this limit, so that a flood of one kind does
/// not evict the other kind.
#[derive(Debug)]
pub(super) struct Past {
    most: usize,
    decisions: Kept,
    refusals: Kept,
}

#[derive(Debug, Default)]
struct Kept {
    events: VecDeque<Arc<Event>>,
    /// The number of evicted events, which is the number of the first stored event.
    gone: u64,
}

/// A reader's position: for each kind, the number of the next event, and of the end.
///
/// A position holds no events, so a stopped reader keeps none in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place([Range<u64>; 2]);

impl Past {
    /// Creates the store of at most `most` decisions and as many refusals; `None` for 0.
    pub(super) fn of(most: usize) -> Option<Self> {
        (most > 0).then(|| Self {
            most,
            decisions: Kept::default(),
            refusals: Kept::default(),
        })
    }

    pub(super) fn keep(&mut self, event: Arc<Event>) {
        let kept = if event.what == "decision" {
            &mut self.decisions
        } else {
            &mut self.refusals
        };
        if kept.events.len() >= self.most {
            kept.events.pop_front();
            kept.gone += 1;
        }
        kept.events.push_back(event);
    }

    /// Returns the position of the first event since a time. With `follows` it has no end.
    pub(super) fn place(&self, time: Timestamp, follows: bool) -> Place {
        Place([&self.decisions, &self.refusals].map(|kept| {
            let before = kept
                .events
                .iter()
                .position(|event| event.time >= time)
                .unwrap_or(kept.events.len());
            let end = if follows {
                u64::MAX
            } else {
                kept.gone + kept.events.len() as u64
            };
            kept.gone + before as u64..end
        }))
    }

    /// Returns about `most` next events, the oldest first, and advances the position. Events
    /// evicted before they were read count as lost. An empty result is the end.
    pub(super) fn next(&self, place: &mut Place, most: usize) -> Vec<Arc<Event>> {
        let kinds = [&self.decisions, &self.refusals];
        let mut lost = 0;
        for (kept, wanted) in kinds.iter().zip(&mut place.0) {
            let first = kept.gone.clamp(wanted.start, wanted.end);
            lost += first - wanted.start;
            wanted.start = first;
        }
        let mut events: Vec<_> = (lost > 0)
            .then(|| Arc::new(Event::lost(lost)))
            .into_iter()
            .collect();
        while events.len() < most {
            let heads = kinds.iter().zip(&mut place.0).filter_map(|(kept, wanted)| {
                let index = wanted
                    .start
                    .checked_sub(kept.gone)
                    .filter(|_| !wanted.is_empty())?;
                Some((kept.events.get(usize::try_from(index).ok()?)?, wanted))
            });
            let Some((event, wanted)) = heads.min_by_key(|(event, _)| event.time) else {
                break;
            };
            wanted.start += 1;
            events.push(Arc::clone(event));
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(second: i64, what: &str) -> Arc<Event> {
        Arc::new(Event {
            time: Timestamp::from_second(second).unwrap(),
            what: what.to_owned(),
            ..Event::lost(0)
        })
    }

    #[test]
    fn flood_of_refusals_leaves_decisions_and_the_newest_refusals() {
        assert!(Past::of(0).is_none());
        let mut past = Past::of(2).unwrap();
        past.keep(event(1, "decision"));
        (2..10).for_each(|second| past.keep(event(second, "drop")));
        past.keep(event(5, "decision"));
        let seconds = |since| -> Vec<_> {
            let events = past.next(
                &mut past.place(Timestamp::from_second(since).unwrap(), false),
                100,
            );
            events.iter().map(|event| event.time.as_second()).collect()
        };
        assert_eq!(
            [seconds(0), seconds(5), seconds(9)],
            [vec![1, 5, 8, 9], vec![5, 8, 9], vec![9]]
        );
    }

    #[test]
    fn slow_reader_holds_nothing_and_hears_of_what_it_lost() {
        let mut past = Past::of(3).unwrap();
        (0..3).for_each(|second| past.keep(event(second, "drop")));
        let (mut follows, mut ends) = (
            past.place(Timestamp::UNIX_EPOCH, true),
            past.place(Timestamp::UNIX_EPOCH, false),
        );
        assert_eq!(past.next(&mut follows, 1).len(), 1);
        (3..8).for_each(|second| past.keep(event(second, "drop")));
        assert_eq!(
            past.refusals
                .events
                .iter()
                .map(Arc::strong_count)
                .collect::<Vec<_>>(),
            [1, 1, 1]
        );
        let reported = |place: &mut Place| -> Vec<_> {
            past.next(place, 100)
                .iter()
                .map(|event| (event.lost, event.what.clone()))
                .collect()
        };
        let drop = || (0, "drop".to_owned());
        assert_eq!(
            reported(&mut follows),
            [(4, "lost".to_owned()), drop(), drop(), drop()]
        );
        assert_eq!(reported(&mut ends), [(3, "lost".to_owned())]);
        assert!(reported(&mut follows).is_empty() && reported(&mut ends).is_empty());
    }

    #[test]
    fn event_takes_less_than_a_kilobyte() {
        // All texts are short: the programs' words, and a device's name.
        const TEXTS: usize = 9 * 32;
        assert!(size_of::<Event>() + TEXTS < 1_024, "{}", size_of::<Event>());
    }
}
