//! Judges backends by what the programs count of their connections: [`Judge`] finds those that are silent, and [`ServiceHealth`] decides
//! which of them a set can do without.
//!
//! ```text
//!   answers ◀──────────── 3 failures of 2 clients in 10 s, and no answer ────────────▶ silent
//!                                                                                       │ back-off: 5 s, twice as long each time, to 300 s
//!   answers ◀── an answer, at any time ── on trial ◀────────────────────────────────────┘
//!                                            ├── one failure ──▶ silent
//!                                            └── neither ──▶ on trial again, for twice as long
//! ```
//!
//! A trial is a moment in which the backend takes connections, and the time until the clients' next SYN. So a dead backend costs few of them.
//! A node whose backends all owe an answer ([`are_unresponsive`]) has them silent at once, and each comes back by its own trial.
//!
//! No function here knows whether silent backends are left out: under mode `observe` they are told of and serve on.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use proxy_common::addr::{Addr, Port, Proto, SockAddr};
use proxy_common::connect::Votes;
use proxy_common::frontend::{Backend, FrontendKey};

#[cfg(test)]
mod tests;
mod unresponsive;

pub use unresponsive::Owed;
pub(crate) use unresponsive::are_unresponsive;

/// What follows from a silent backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HealthMode {
    /// Nothing.
    Off,
    /// An Event and metrics.
    #[default]
    Observe,
    /// It takes no new connections of this node while others serve.
    On,
}

impl HealthMode {
    pub const ALL: [Self; 3] = [Self::Off, Self::Observe, Self::On];

    /// Returns the name in `backendHealth` and in the annotation.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Observe => "observe",
            Self::On => "on",
        }
    }

    /// Reads a name, or says which there are.
    pub fn from_name(name: &str) -> Result<Self, String> {
        let named = Self::ALL.into_iter().find(|mode| mode.name() == name);
        named.ok_or_else(|| format!("{name:?} is not one of {}", Self::ALL.map(Self::name).join(", ")))
    }
}

/// The way from a TCP service port, named by its ClusterIP, to a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Path {
    pub service: SocketAddr,
    pub backend: SocketAddr,
}

impl Path {
    pub fn new<A: Addr>(service: &FrontendKey<A>, backend: &SockAddr<A>) -> Self {
        Self { service: service.socket_addr(), backend: backend.socket_addr() }
    }

    /// Returns the keys of its ends; None in the other family.
    pub fn in_family<A: Addr>(&self) -> Option<(FrontendKey<A>, SockAddr<A>)> {
        let service = FrontendKey::new(A::from_ip(self.service.ip())?, Port::new(self.service.port()), Proto::TCP);
        Some((service, SockAddr::new(A::from_ip(self.backend.ip())?, Port::new(self.backend.port()))))
    }
}

/// The silent backends of one service port, as far as the mode of its Service heeds them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServiceHealth<'a> {
    /// Off for a port of another protocol than TCP.
    pub(crate) mode: HealthMode,
    service: SocketAddr,
    silent: &'a BTreeSet<Path>,
}

impl<'a> ServiceHealth<'a> {
    pub(crate) fn new<A: Addr>(mode: HealthMode, service: FrontendKey<A>, silent: &'a BTreeSet<Path>) -> Self {
        let mode = if service.proto == Proto::TCP { mode } else { HealthMode::Off };
        Self { mode, service: service.socket_addr(), silent }
    }

    /// Returns true if each set that serves has a backend for flows that leave another one.
    pub(crate) fn fails_over<A: Addr>(&self, cluster: &[Backend<A>], local: &[Backend<A>]) -> bool {
        self.mode == HealthMode::On && cluster.len() + local.len() > 1 && cluster.len() != 1 && local.len() != 1
    }

    /// Takes the silent backends out of a set and returns them, unless more than half of it is silent. Then the fault is more likely this
    /// node's or the network's, and each backend that is left would have to serve for several.
    pub(crate) fn take_silent<A: Addr>(&self, set: &mut Vec<Backend<A>>) -> Vec<SockAddr<A>> {
        let place = |backend: &Backend<A>| SockAddr::new(backend.addr, backend.port);
        let is_silent = |backend: &Backend<A>| {
            self.silent.contains(&Path { service: self.service, backend: place(backend).socket_addr() })
        };
        if self.mode != HealthMode::On || self.silent.is_empty() {
            return Vec::new();
        }
        let silent: Vec<_> = set.iter().filter(|backend| is_silent(backend)).map(place).collect();
        if silent.len() * 2 > set.len() {
            return Vec::new();
        }
        set.retain(|backend| !is_silent(backend));
        silent
    }
}

/// The failures since a backend's last answer that make it silent, if they come within [`WINDOW`].
const FAILURES: u32 = 3;
/// The clients that must have met them: one alone may be at fault, or of ill will.
const CLIENTS: u32 = 2;
const WINDOW: Duration = Duration::from_secs(10);
/// The first time for which a silent backend gets no connections, and the longest one.
const BACK_OFF: Duration = Duration::from_secs(5);
const BACK_OFF_MAX: Duration = Duration::from_secs(300);
/// The time for which a backend on trial takes connections at first, and the time after that in which its failures come.
const TRIAL: Duration = Duration::from_millis(200);
const VERDICT: Duration = Duration::from_millis(1_600);
/// The time after which it is forgotten how often a backend was silent.
const FORGET: Duration = Duration::from_secs(600);

/// A change that operators are told of. A backend that comes and goes is told of no sooner again than after its last back-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// The backend has become silent.
    Silent(Path),
    /// A silent backend has answered.
    Answers(Path),
}

/// What the programs have counted of one backend.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    pub votes: Votes,
    /// The connections that the backend has answered: any other number than before says that it has answered.
    pub answered: u64,
    /// None if it was sent no SYN of late that the programs noted.
    pub owed: Option<Owed>,
}

/// What the programs have counted of the backends with votes, of those with SYNs of late, and of those that the judge knows.
pub type Readings = BTreeMap<Path, Reading>;

/// What is known of all backends of this node that have failed of late.
#[derive(Debug, Default)]
pub struct Judge {
    backends: BTreeMap<Path, Judged>,
    /// Set by the first reading: what was counted before may be of an earlier owner of the address.
    has_begun: bool,
}

#[derive(Clone, Copy, Debug)]
struct Judged {
    /// The failures and the answered connections at the last reading.
    failures: u32,
    answered: u64,
    /// When the window began, and the failures in it.
    window: (Duration, u32),
    state: State,
    /// How often the backend was silent, and when last.
    strikes: u32,
    struck: Duration,
    /// When the first trial after that began, or begins.
    trial_from: Duration,
    /// Operators have been told that the backend is silent, and not yet that it answers.
    is_told: bool,
    /// Until then they are not told again that it is.
    untold_until: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Serves, or is no backend any more.
    Serving,
    /// Takes no connections until then, and after that a trial of such a length.
    Silent(Duration, Duration),
    /// Takes connections again until then, in a trial of such a length, and has not answered any.
    OnTrial(Duration, Duration),
}

impl Judge {
    /// Takes in what was counted, at a moment of any clock that does not go back. Backends that are `unresponsive` with all of their node are silent
    /// without failures of their own. `is_backend` tells whether a path leads to a backend of now.
    pub fn read(
        &mut self,
        readings: &Readings,
        unresponsive: &BTreeSet<Path>,
        now: Duration,
        is_backend: impl Fn(&Path) -> bool,
    ) -> Vec<Change> {
        for (_, judged) in self.backends.iter_mut().filter(|(path, _)| !readings.contains_key(path)) {
            judged.has_no_row();
        }
        for (path, reading) in readings {
            self.take_in(*path, *reading, now, is_backend(path));
        }
        for path in unresponsive.iter().filter(|path| self.has_begun && is_backend(path)) {
            let reading = readings.get(path).copied().unwrap_or(Reading::NOTHING);
            let judged = self.backends.entry(*path).or_insert_with(|| Judged::new(reading, now));
            if judged.state == State::Serving {
                judged.strike(now);
            }
        }
        self.has_begun = true;
        let news = self.backends.iter_mut().filter_map(|(path, judged)| Some((*path, judged.news(now)?)));
        let news = news.filter(|(path, _)| is_backend(path));
        let changes =
            news.map(|(path, is_silent)| if is_silent { Change::Silent(path) } else { Change::Answers(path) });
        let changes = changes.collect();
        self.pass(now);
        self.backends.retain(|path, judged| judged.is_worth_keeping(now) && (judged.failures > 0 || is_backend(path)));
        changes
    }

    fn take_in(&mut self, path: Path, reading: Reading, now: Duration, is_backend: bool) {
        let has_votes = reading.votes != Votes::NONE;
        if !has_votes && !self.knows(&path) {
            return;
        }
        let before = Reading { votes: if self.has_begun { Votes::NONE } else { reading.votes }, ..reading };
        let judged = self.backends.entry(path).or_insert_with(|| Judged::new(before, now));
        if !is_backend {
            // Its address may come again, with another pod.
            *judged = Judged::new(reading, now);
            return;
        }
        if reading.answered != judged.answered || !has_votes && judged.failures > 0 {
            judged.answers();
            // What has failed since that answer, and before this reading, came from clients who send fast.
            (judged.failures, judged.answered) = (reading.votes.failures(), reading.answered);
        }
        judged.fails(reading.votes, now);
    }

    /// Returns true if the next reading should have this backend, with votes or without.
    pub fn knows(&self, path: &Path) -> bool {
        self.backends.contains_key(path)
    }

    /// Begins and ends trials whose time has come.
    pub fn pass(&mut self, now: Duration) {
        for judged in self.backends.values_mut() {
            judged.state = match judged.state {
                State::OnTrial(..) | State::Silent(..) if now.saturating_sub(judged.struck) > FORGET => {
                    judged.is_told = false;
                    State::Serving
                }
                State::Silent(until, trial) if until <= now => State::OnTrial(now + trial, trial),
                State::OnTrial(until, trial) if until <= now => State::Silent(now + VERDICT, trial * 2),
                state => state,
            };
        }
    }

    /// Returns the backends that shall take no connections.
    pub fn silent(&self) -> BTreeSet<Path> {
        let silent = self.backends.iter().filter(|(_, judged)| matches!(judged.state, State::Silent(..)));
        silent.map(|(path, _)| *path).collect()
    }

    /// Returns true if a reading may change something though nothing has failed since the last one.
    pub fn waits(&self) -> bool {
        self.backends.values().any(|judged| judged.state != State::Serving)
    }
}

impl Reading {
    /// Of a backend that was never dialled.
    const NOTHING: Self = Self { votes: Votes::NONE, answered: 0, owed: None };
}

impl Judged {
    const fn new(Reading { votes, answered, .. }: Reading, now: Duration) -> Self {
        Self {
            failures: votes.failures(),
            answered,
            window: (now, 0),
            state: State::Serving,
            strikes: 0,
            struck: Duration::ZERO,
            trial_from: Duration::ZERO,
            is_told: false,
            untold_until: Duration::ZERO,
        }
    }

    /// Returns whether the backend is silent, if operators are to be told.
    fn news(&mut self, now: Duration) -> Option<bool> {
        let is_silent = self.state != State::Serving;
        if is_silent == self.is_told || is_silent && now < self.untold_until {
            return None;
        }
        self.is_told = is_silent;
        if !is_silent {
            self.untold_until = now + back_off(self.strikes.saturating_sub(1));
        }
        Some(is_silent)
    }

    /// Returns true if a failure of now may be of a connection that began in a trial.
    fn is_judged(&self, now: Duration) -> bool {
        now >= self.trial_from
    }

    /// Takes in that the backend has answered.
    const fn answers(&mut self) {
        self.failures = 0;
        self.window.1 = 0;
        self.state = State::Serving;
    }

    /// Takes in that the programs count nothing of it: its row is gone, or there never was one.
    const fn has_no_row(&mut self) {
        if self.failures > 0 || self.answered > 0 {
            self.answers();
            self.answered = 0;
        }
    }

    /// Takes in what has failed since the last answer.
    fn fails(&mut self, votes: Votes, now: Duration) {
        let more = votes.failures_since(std::mem::replace(&mut self.failures, votes.failures()));
        match self.state {
            State::Serving => {
                if now.saturating_sub(self.window.0) > WINDOW {
                    // The newest failures may be the first of a row.
                    self.window = (now, 0);
                }
                self.window.1 = self.window.1.saturating_add(more);
                if self.window.1 >= FAILURES && votes.clients() >= CLIENTS {
                    self.strike(now);
                }
            }
            // It may be heard of late, and while no connections begin.
            State::OnTrial(..) | State::Silent(..) => {
                if more > 0 && self.is_judged(now) {
                    self.strike(now);
                }
            }
        }
    }

    fn strike(&mut self, now: Duration) {
        if now.saturating_sub(self.struck) > FORGET {
            self.strikes = 0;
        }
        let back_off = back_off(self.strikes);
        (self.state, self.struck, self.trial_from) = (State::Silent(now + back_off, TRIAL), now, now + back_off);
        self.strikes = self.strikes.saturating_add(1);
    }

    fn is_worth_keeping(&self, now: Duration) -> bool {
        self.failures > 0
            || self.state != State::Serving
            || self.strikes > 0 && now.saturating_sub(self.struck) <= FORGET
    }
}

/// Returns how long a backend gets no connections that was silent so often before.
fn back_off(strikes: u32) -> Duration {
    BACK_OFF.saturating_mul(1 << strikes.min(8)).min(BACK_OFF_MAX)
}
