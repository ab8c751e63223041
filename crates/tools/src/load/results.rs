//! The results of a dialer's connections.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::dialer::Exchange;

/// The maximum number of described faults; all are counted.
const TOLD: usize = 12;

/// The reason of a failed connection.
#[derive(Debug)]
pub(super) enum Fault {
    Io(io::Error),
    /// The step that was too late.
    Late(&'static str),
    /// By a FIN before the answer was complete.
    Closed,
    /// Another answer than expected.
    Corrupt,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => match error.raw_os_error() {
                Some(number) => write!(f, "{:?}", Errno::from_raw(number)),
                None => write!(f, "{error}"),
            },
            Self::Late(step) => f.write_str(step),
            Self::Closed => f.write_str("closed early"),
            Self::Corrupt => f.write_str("corrupt answer"),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Results {
    started: Instant,
    /// The duration of dialling.
    pub lasted: Duration,
    pub dialled: u64,
    pub ok: u64,
    /// By reason: an errno's name, or a text.
    pub failed: BTreeMap<String, u64>,
    /// The answers of backends that were not allowed.
    pub wrong: u64,
    pub by_backend: BTreeMap<String, u64>,
    /// The maximum delay of the dialler behind its rate: the machine was too slow.
    pub behind: Duration,
    /// The first faults, with the time since the start.
    pub reported: Vec<String>,
    /// From dialling to the complete answer, in microseconds.
    times: Vec<u32>,
}

impl Results {
    pub(super) fn new(started: Instant) -> Self {
        Self {
            started,
            lasted: Duration::ZERO,
            dialled: 0,
            ok: 0,
            failed: BTreeMap::new(),
            wrong: 0,
            by_backend: BTreeMap::new(),
            behind: Duration::ZERO,
            reported: Vec::new(),
            times: Vec::new(),
        }
    }

    pub(super) fn succeed(&mut self, exchange: &Exchange, allowed: bool) {
        self.ok += 1;
        let took = exchange.answered - exchange.dialled;
        self.times
            .push(u32::try_from(took.as_micros()).unwrap_or(u32::MAX));
        match self.by_backend.get_mut(exchange.backend) {
            Some(count) => *count += 1,
            None => drop(self.by_backend.insert(exchange.backend.to_owned(), 1)),
        }
        if !allowed {
            self.wrong += 1;
            self.report(
                exchange.target,
                exchange.dialled,
                &format!("answered by {}", exchange.backend),
            );
        }
    }

    pub(super) fn fail(&mut self, target: SocketAddr, dialled: Instant, fault: &Fault) {
        let reason = fault.to_string();
        self.report(target, dialled, &reason);
        *self.failed.entry(reason).or_default() += 1;
    }

    fn report(&mut self, target: SocketAddr, dialled: Instant, what: &str) {
        if self.reported.len() < TOLD {
            let since = dialled - self.started;
            let took = dialled.elapsed();
            self.reported.push(format!(
                "{what}: {target}, dialled at {since:.3?}, after {took:.3?}"
            ));
        }
    }

    /// Returns the number of connections without a correct answer.
    pub fn failures(&self) -> u64 {
        self.failed.values().sum()
    }

    /// Returns the number of RSTs on established connections (`ECONNRESET`) and in response to a
    /// SYN (`ECONNREFUSED`).
    pub fn resets(&self) -> u64 {
        ["ECONNRESET", "ECONNREFUSED"]
            .iter()
            .filter_map(|reason| self.failed.get(*reason))
            .sum()
    }

    /// Returns the number of answers beyond the threshold: a packet must have been lost and
    /// retransmitted.
    pub fn slow(&self, threshold: Duration) -> u64 {
        let limit = self.time(0.5) + threshold;
        self.times
            .iter()
            .filter(|micros| Duration::from_micros(u64::from(**micros)) > limit)
            .count() as u64
    }

    /// Returns the quantile `part` of the exchanges' durations: 0.5 is the median, 1.0 the maximum.
    pub fn time(&self, part: f64) -> Duration {
        let mut times = self.times.clone();
        if times.is_empty() {
            return Duration::ZERO;
        }
        let nth = ((times.len() - 1) as f64 * part) as usize;
        let (_, time, _) = times.select_nth_unstable(nth);
        Duration::from_micros(u64::from(*time))
    }
}
