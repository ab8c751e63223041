//! How many packets were answered in this second.

use super::ANSWERED;

/// Answers of each CPU in one second. A flood in a victim's name must not become a flood of answers. The agent may set
/// another number before it loads the object.
#[cfg_attr(target_arch = "bpf", unsafe(no_mangle))]
static ANSWERS_PER_SEC: u32 = 1_024;

/// To whom an answer goes: each has a share, that a flood of others does not use up.
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum Asker {
    Host,
    Pod,
    Other,
}

impl Asker {
    pub const COUNT: u32 = Self::Other as u32 + 1;
}

/// May this CPU answer one more packet in this second? Then it is counted.
#[inline(always)]
pub fn may_answer(asker: Asker, now_secs: u32) -> bool {
    // SAFETY: it is initialised. Volatile, because the compiler would take it for what it says here.
    let limit = unsafe { (&raw const ANSWERS_PER_SEC).read_volatile() };
    answers_in(asker, now_secs) < limit
}

/// Counts an answer, and says how many this CPU gave before it in this second.
#[inline(always)]
fn answers_in(asker: Asker, now_secs: u32) -> u32 {
    let Some(answered) = ANSWERED.get_ptr_mut(asker as u32) else { return u32::MAX };
    // SAFETY: the slot is this CPU's own, and no other program runs on it before this one ends.
    unsafe {
        let (secs, count) = ((*answered >> 32) as u32, *answered as u32);
        let count = if secs == now_secs { count } else { 0 };
        *answered = u64::from(now_secs) << 32 | u64::from(count.saturating_add(1));
        count
    }
}
