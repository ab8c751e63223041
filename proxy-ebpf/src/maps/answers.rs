//! The number of packets that this CPU has answered in the current second.

use proxy_common::counter::Counter;

use super::{COUNTERS, Find};
use crate::setting::ANSWERS_PER_SEC;

/// A kind of sender. Each kind has a separate limit, so that a flood of one kind leaves answers for
/// the rest.
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum SenderKind {
    Host,
    Pod,
    Other,
}

impl SenderKind {
    pub const COUNT: u32 = Self::Other as u32 + 1;
}

/// Counts an answer. Returns true if it is within this CPU's limit for the current second.
#[inline(always)]
pub fn may_answer(sender: SenderKind, now_secs: u32) -> bool {
    let limit = ANSWERS_PER_SEC.get();
    answers_in(sender, now_secs) < limit
}

/// Counts an answer, and returns the number of this CPU's earlier answers in this second. The upper
/// half of the counter is the second.
#[inline(always)]
fn answers_in(sender: SenderKind, now_secs: u32) -> u32 {
    let Some(answered) = COUNTERS.find_here(&(Counter::COUNT + sender as u32)) else {
        return u32::MAX;
    };
    let count_in = |answered: u64| {
        if (answered >> 32) as u32 == now_secs {
            answered as u32
        } else {
            0
        }
    };
    count_in(answered.update(|answered| {
        u64::from(now_secs) << 32 | u64::from(count_in(answered).saturating_add(1))
    }))
}
