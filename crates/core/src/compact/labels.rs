//! An object's labels, up to a limit.

use super::Shared;

/// The maximum bytes of labels kept for an object. The API server limits only the whole object, to
/// 1.5 MiB, and each node keeps the labels of all Services.
const MOST: usize = 4_096;

/// The labels by key. Each takes 32 bytes; shared keys and values are interned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    kept: Box<[(Shared, Shared)]>,
    /// Set if some labels were dropped.
    is_cut: bool,
}

impl Labels {
    /// Keeps labels in key order, until a label does not fit.
    pub(crate) fn of<'a>(labels: impl Iterator<Item = (&'a String, &'a String)>) -> Self {
        let mut kept = Vec::new();
        let mut room = MOST;
        for (key, value) in labels {
            let Some(rest) = room.checked_sub(key.len() + value.len()) else {
                return Self {
                    kept: kept.into(),
                    is_cut: true,
                };
            };
            room = rest;
            kept.push((Shared::from(key), Shared::from(value)));
        }
        Self {
            kept: kept.into(),
            is_cut: false,
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.kept.iter().map(|(key, value)| (&**key, &**value))
    }

    pub const fn is_cut(&self) -> bool {
        self.is_cut
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn labels_beyond_the_room_are_left_out() {
        let labels = |number: usize| -> BTreeMap<_, _> {
            (0..number)
                .map(|n| (format!("key-{n:03}"), "v".repeat(57)))
                .collect()
        };
        let fit = MOST / 64;
        let kept = [fit, fit + 1, 10 * fit].map(|number| {
            let labels = Labels::of(labels(number).iter());
            (labels.iter().count(), labels.is_cut())
        });
        assert_eq!(kept, [(fit, false), (fit, true), (fit, true)]);
        assert_eq!(
            Labels::of(labels(2).iter()).iter().last(),
            Some(("key-001", "v".repeat(57).as_str()))
        );
    }
}
