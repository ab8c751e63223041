//! Files of packet rows: notation, alignment, update. `tests/kernel/rows/README.md` describes the
//! format.

pub mod parse;
pub mod step;
pub mod update;

use crate::test_run::Verdict;

/// The outcome of a row: verdict, packet out, and incremented counters in alphabetical order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub verdict: Verdict,
    pub out: String,
    pub counted: Vec<String>,
}

/// Returns the counters in `text`, in alphabetical order.
pub fn words(text: &str) -> Vec<String> {
    let mut words: Vec<_> = text.split_whitespace().map(str::to_owned).collect();
    words.sort();
    words
}
