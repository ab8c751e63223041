//! Durations in Go's notation.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::{Serialize, Serializer};

/// A duration in nanoseconds, as Go's `time.Duration`: `1h30m0s`, `1.5s`, `-2ms`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct GoDuration(i64);

const SECOND: i64 = 1_000_000_000;

/// The units in nanoseconds; of units with a common prefix the longest is first. Go accepts both
/// micro signs.
const UNITS: [(&str, i64); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("\u{b5}s", 1_000),
    ("\u{3bc}s", 1_000),
    ("ms", 1_000_000),
    ("s", SECOND),
    ("m", 60 * SECOND),
    ("h", 3_600 * SECOND),
];

impl GoDuration {
    pub const ZERO: Self = Self(0);

    pub const fn secs(secs: i64) -> Self {
        Self(secs * SECOND)
    }

    pub const fn nanos(nanos: i64) -> Self {
        Self(nanos)
    }

    /// Returns the duration; `None` if negative.
    pub fn std(self) -> Option<Duration> {
        u64::try_from(self.0).ok().map(Duration::from_nanos)
    }
}

impl FromStr for GoDuration {
    type Err = NoDuration;

    fn from_str(text: &str) -> Result<Self, NoDuration> {
        let (sign, mut rest) = match text.strip_prefix('-') {
            Some(rest) => (-1, rest),
            None => (1, text.strip_prefix('+').unwrap_or(text)),
        };
        if rest == "0" {
            return Ok(Self::ZERO);
        }
        let mut nanos = 0_i128;
        let mut parts = 0;
        while !rest.is_empty() {
            let (part, after) = part(rest).ok_or(NoDuration)?;
            (nanos, rest, parts) = (nanos + part, after, parts + 1);
        }
        let nanos = i64::try_from(sign * nanos).ok().filter(|_| parts > 0);
        nanos.map(Self).ok_or(NoDuration)
    }
}

/// Parses one number with its unit, and returns the rest of the text.
fn part(text: &str) -> Option<(i128, &str)> {
    let (whole, rest) = digits(text);
    let (fraction, rest) = match rest.strip_prefix('.') {
        Some(rest) => digits(rest),
        None => ("", rest),
    };
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let (unit, rest) = UNITS
        .into_iter()
        .find_map(|(name, unit)| rest.strip_prefix(name).map(|rest| (i128::from(unit), rest)))?;
    // Further digits are below a nanosecond in every unit.
    let fraction = &fraction[..fraction.len().min(15)];
    let whole: i128 = if whole.is_empty() {
        0
    } else {
        whole.parse::<u64>().ok()?.into()
    };
    let parts: i128 = if fraction.is_empty() {
        0
    } else {
        fraction.parse().ok()?
    };
    Some((
        whole * unit + parts * unit / 10_i128.pow(u32::try_from(fraction.len()).ok()?),
        rest,
    ))
}

fn digits(text: &str) -> (&str, &str) {
    text.split_at(
        text.find(|digit: char| !digit.is_ascii_digit())
            .unwrap_or(text.len()),
    )
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoDuration;

impl fmt::Display for NoDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("must be a duration such as 30s, 15m0s or 1h")
    }
}

impl std::error::Error for NoDuration {}

impl fmt::Display for GoDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        let nanos = self.0.unsigned_abs();
        let second = SECOND.unsigned_abs();
        let hours = nanos / second / 3600;
        let minutes = nanos / second / 60 % 60;
        let below = nanos % (60 * second);
        match nanos {
            0 => f.write_str("0s"),
            1..1_000 => write!(f, "{sign}{nanos}ns"),
            1_000..1_000_000 => write!(f, "{sign}{}\u{b5}s", decimal(nanos, 1_000)),
            1_000_000..1_000_000_000 => write!(f, "{sign}{}ms", decimal(nanos, 1_000_000)),
            _ if hours > 0 => write!(f, "{sign}{hours}h{minutes}m{}s", decimal(below, second)),
            _ if minutes > 0 => write!(f, "{sign}{minutes}m{}s", decimal(below, second)),
            _ => write!(f, "{sign}{}s", decimal(below, second)),
        }
    }
}

/// Formats `nanos` in a unit that is a power of ten.
fn decimal(nanos: u64, unit: u64) -> String {
    let digits = usize::try_from(unit.ilog10()).expect("a few digits");
    let text = format!("{}.{:0digits$}", nanos / unit, nanos % unit);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

impl Serialize for GoDuration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for GoDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DurationVisitor { takes_nanos: false })
    }
}

/// Deserialises `logging.flushFrequency`, which was once a number of nanoseconds.
pub(super) fn nanos_or_text<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<GoDuration, D::Error> {
    deserializer.deserialize_any(DurationVisitor { takes_nanos: true })
}

struct DurationVisitor {
    takes_nanos: bool,
}

impl Visitor<'_> for DurationVisitor {
    type Value = GoDuration;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a duration such as \"30s\", \"15m0s\" or \"1h\"")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<GoDuration, E> {
        text.parse()
            .map_err(|_| E::invalid_value(de::Unexpected::Str(text), &self))
    }

    fn visit_u64<E: de::Error>(self, nanos: u64) -> Result<GoDuration, E> {
        match i64::try_from(nanos) {
            Ok(nanos) if self.takes_nanos => Ok(GoDuration(nanos)),
            _ => Err(E::invalid_type(de::Unexpected::Unsigned(nanos), &self)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn durations_are_read_and_written_as_go_does() {
        for (text, nanos, written) in [
            ("0", 0, "0s"),
            ("0s", 0, "0s"),
            ("30s", 30 * SECOND, "30s"),
            ("15m", 900 * SECOND, "15m0s"),
            ("1h", 3600 * SECOND, "1h0m0s"),
            ("24h0m0s", 86_400 * SECOND, "24h0m0s"),
            ("1h15m30.918s", 4530 * SECOND + 918_000_000, "1h15m30.918s"),
            ("1.5s", 1_500_000_000, "1.5s"),
            (".5s", 500_000_000, "500ms"),
            ("1.s", SECOND, "1s"),
            ("250ms", 250_000_000, "250ms"),
            ("7us", 7_000, "7\u{b5}s"),
            ("7.25\u{3bc}s", 7_250, "7.25\u{b5}s"),
            ("9ns", 9, "9ns"),
            ("-1m5s", -65 * SECOND, "-1m5s"),
            ("+2s", 2 * SECOND, "2s"),
        ] {
            let duration: GoDuration = text
                .parse()
                .unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(
                (duration.0, duration.to_string().as_str()),
                (nanos, written),
                "{text}"
            );
        }
        for text in [
            "",
            "30",
            "s",
            "1x",
            "1s x",
            ".s",
            "-",
            "1 s",
            "3000000h",
            "99999999999999999999999s",
        ] {
            assert_eq!(text.parse::<GoDuration>(), Err(NoDuration), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn written_duration_reads_the_same(nanos in any::<i64>()) {
            prop_assume!(nanos != i64::MIN);
            prop_assert_eq!(GoDuration(nanos).to_string().parse(), Ok(GoDuration(nanos)));
        }
    }
}
