//! Spans of time as kubectl prints them: at most two units; the smaller unit only for short spans.

use jiff::Timestamp;

const MINUTE: u64 = 60;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;
const YEAR: u64 = 365 * DAY;

/// Formats the time from `then` until now. A moment in the future has the age 0.
pub fn since(then: Timestamp) -> String {
    span(
        Timestamp::now()
            .duration_since(then)
            .as_secs()
            .try_into()
            .unwrap_or_default(),
    )
}

pub fn span(secs: u64) -> String {
    let two = |big, big_name, small, small_name| match (secs % big) / small {
        0 => format!("{}{big_name}", secs / big),
        rest => format!("{}{big_name}{rest}{small_name}", secs / big),
    };
    match secs {
        0..120 => format!("{secs}s"),
        120..600 => two(MINUTE, "m", 1, "s"),
        600..10_800 => format!("{}m", secs / MINUTE),
        10_800..28_800 => two(HOUR, "h", MINUTE, "m"),
        28_800..172_800 => format!("{}h", secs / HOUR),
        172_800..691_200 => two(DAY, "d", HOUR, "h"),
        691_200..63_072_000 => format!("{}d", secs / DAY),
        _ => two(YEAR, "y", DAY, "d"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_have_at_most_two_units() {
        let cases = [
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (125, "2m5s"),
            (600, "10m"),
            (10_799, "179m"),
            (11_000, "3h3m"),
            (30_000, "8h"),
            (172_800, "2d"),
            (180_000, "2d2h"),
            (8 * DAY, "8d"),
            (3 * YEAR + 5 * DAY, "3y5d"),
        ];
        for (secs, text) in cases {
            assert_eq!(span(secs), text);
        }
    }
}
