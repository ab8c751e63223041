//! The CPU's hardware events of a slice, if the machine lets the kernel count them.

use perf_event::events::{Event, Hardware};
use perf_event::{Builder, Counter};

/// The names of the events, in their order everywhere.
pub const EVENTS: [&str; 3] = ["cycles", "instructions", "cache misses"];

/// A counter per event. It counts everything on a CPU, including the kernel and its interrupts.
pub(super) struct Counters([Counter; 3]);

impl Counters {
    /// Starts counting; `None` if the machine or the kernel cannot.
    pub(super) fn start(cpu: usize) -> Option<Self> {
        let [cycles, instructions, misses] = [
            Hardware::CPU_CYCLES,
            Hardware::INSTRUCTIONS,
            Hardware::CACHE_MISSES,
        ];
        Some(Self([
            open(cycles, cpu)?,
            open(instructions, cpu)?,
            open(misses, cpu)?,
        ]))
    }

    pub(super) fn read(mut self) -> Option<[u64; 3]> {
        let [cycles, instructions, misses] = &mut self.0;
        Some([
            cycles.read().ok()?,
            instructions.read().ok()?,
            misses.read().ok()?,
        ])
    }
}

fn open(event: impl Event, cpu: usize) -> Option<Counter> {
    let mut counter = Builder::new(event)
        .any_pid()
        .one_cpu(cpu)
        .include_kernel()
        .build()
        .ok()?;
    counter.enable().ok()?;
    Some(counter)
}

#[cfg(test)]
mod tests {
    use super::*;
    use perf_event::events::Software;

    #[test]
    fn counter_counts_where_one_can_be_opened() {
        // A kernel without hardware counters, or without the right to count, opens none.
        if let Some(mut clock) = open(Software::CPU_CLOCK, 0) {
            let before = clock.read().unwrap();
            std::hint::black_box((0..1_000_000).sum::<u64>());
            assert!(clock.read().unwrap() > before);
        }
        if let Some(counters) = Counters::start(0) {
            assert!(counters.read().is_some());
        }
    }
}
