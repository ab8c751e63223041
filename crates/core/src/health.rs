//! Detects unresponsive backends from the programs' counts. [`Judge`] finds *silent* backends, as
//! the diagram shows; [`ServiceHealth`] decides how many of them a set can lose.
//!
//! ```text
//!   answers ── 3 failures of 2 clients in 10 s, and no answer between them ──▶ silent
//!      ▲                                                            back-off: 5 s, │
//!      │                                                          doubles to 300 s │
//!      └── an answer, at any time, even while silent ── probation ◀────────────────┘
//!                                                        ├── one failure ──▶ silent
//!                                                        └── neither ──▶ after 1.6 s on probation
//!                                                                        again, for twice as long
//! ```
//!
//! A probation is a short time with new connections, plus the time until the clients' next SYN, so
//! a dead backend costs few connections.
//!
//! Detection is independent of the mode: under `observe` silent backends are reported and keep
//! serving.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use proxy_common::addr::{Addr, Port, Proto, SockAddr};
use proxy_common::connect::Votes;
use proxy_common::frontend::{Backend, FrontendKey};

#[cfg(test)]
mod tests;

/// The action for silent backends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HealthMode {
    /// Nothing.
    Off,
    /// An Event and metrics.
    #[default]
    Observe,
    /// New connections of this node avoid the backend while other backends serve.
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

    /// Parses a name. The error lists the valid names.
    pub fn from_name(name: &str) -> Result<Self, String> {
        let named = Self::ALL.into_iter().find(|mode| mode.name() == name);
        named.ok_or_else(|| {
            format!(
                "{name:?} is not one of {}",
                Self::ALL.map(Self::name).join(", ")
            )
        })
    }
}

/// A TCP service port (its ClusterIP) and one of its backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Path {
    pub service: SocketAddr,
    pub backend: SocketAddr,
}

impl Path {
    pub fn new<A: Addr>(service: &FrontendKey<A>, backend: &SockAddr<A>) -> Self {
        Self {
            service: service.socket_addr(),
            backend: backend.socket_addr(),
        }
    }

    /// Returns the keys of the service port and the backend. `None` if their family is not `A`'s.
    pub fn in_family<A: Addr>(&self) -> Option<(FrontendKey<A>, SockAddr<A>)> {
        let service = FrontendKey::new(
            A::from_ip(self.service.ip())?,
            Port::new(self.service.port()),
            Proto::TCP,
        );
        Some((
            service,
            SockAddr::new(
                A::from_ip(self.backend.ip())?,
                Port::new(self.backend.port()),
            ),
        ))
    }
}

pub type Silent = BTreeSet<Path>;

/// The silent backends of one service port, under the mode of its Service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServiceHealth<'a> {
    /// `Off` for UDP and SCTP ports.
    pub(crate) mode: HealthMode,
    service: SocketAddr,
    silent: &'a Silent,
}

impl<'a> ServiceHealth<'a> {
    pub(crate) fn new<A: Addr>(
        mode: HealthMode,
        service: FrontendKey<A>,
        silent: &'a Silent,
    ) -> Self {
        let mode = if service.proto == Proto::TCP {
            mode
        } else {
            HealthMode::Off
        };
        Self {
            mode,
            service: service.socket_addr(),
            silent,
        }
    }

    /// Returns true if each serving set has another backend for flows that leave a silent backend.
    pub(crate) fn fails_over<A: Addr>(&self, cluster: &[Backend<A>], local: &[Backend<A>]) -> bool {
        self.mode == HealthMode::On
            && cluster.len() + local.len() > 1
            && cluster.len() != 1
            && local.len() != 1
    }

    /// Removes silent backends from the set and returns them. At most half of the set is removed:
    /// if more are silent, this node or the network is the likelier cause, and all stay.
    pub(crate) fn take_silent<A: Addr>(&self, set: &mut Vec<Backend<A>>) -> Vec<SockAddr<A>> {
        if self.mode != HealthMode::On || self.silent.is_empty() {
            return Vec::new();
        }
        let place = |backend: &Backend<A>| SockAddr::new(backend.addr, backend.port);
        let is_silent = |backend: &Backend<A>| {
            self.silent.contains(&Path {
                service: self.service,
                backend: place(backend).socket_addr(),
            })
        };
        let silent: Vec<_> = set
            .iter()
            .filter(|backend| is_silent(backend))
            .map(place)
            .collect();
        if silent.len() * 2 > set.len() {
            return Vec::new();
        }
        set.retain(|backend| !is_silent(backend));
        silent
    }
}

/// The failures within [`WINDOW`], without an answer between them, that make a backend silent.
const FAILURES: u32 = 3;
/// The minimum number of failing clients. A single client may be faulty or malicious.
const CLIENTS: u32 = 2;
const WINDOW: Duration = Duration::from_secs(10);
/// The first and the longest time for which a silent backend is ejected.
const BACK_OFF: Duration = Duration::from_secs(5);
const BACK_OFF_MAX: Duration = Duration::from_secs(300);
/// The initial length of a probation, and the wait for its failures afterwards.
const TRIAL: Duration = Duration::from_millis(200);
const VERDICT: Duration = Duration::from_millis(1_600);
/// The time after which past ejections no longer count.
const FORGET: Duration = Duration::from_secs(600);

/// A reported change. A flapping backend is reported again only after its last back-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// The backend became silent.
    Silent(Path),
    /// The silent backend answered.
    Answers(Path),
}

/// The programs' counts for one backend.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    pub votes: Votes,
    /// The number of answered connections. Any change means that the backend has answered.
    pub answered: u64,
}

/// The counts of backends with votes.
pub type Readings = BTreeMap<Path, Reading>;

/// The state of all recently failed backends on this node.
#[derive(Debug, Default)]
pub struct Judge {
    backends: BTreeMap<Path, Judged>,
    /// The backends reported as silent and not yet as answering.
    reported: BTreeSet<Path>,
    /// Set by the first reading. Earlier counts may belong to a previous owner of the address.
    has_begun: bool,
}

#[derive(Clone, Copy, Debug)]
struct Judged {
    /// The counts at the last reading.
    failures: u32,
    answered: u64,
    /// The start of the window, and the failures in it.
    window: (Duration, u32),
    state: State,
    /// The number of ejections, and the time of the last ejection.
    strikes: u32,
    struck: Duration,
    /// The start of the first probation after the last ejection.
    trial_from: Duration,
    /// No repeated report before this time.
    unreported_until: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Serves, or is not a backend any more.
    Serving,
    /// Ejected until the first time, then on probation for the second duration.
    Silent(Duration, Duration),
    /// On probation until the first time, for the second duration. No answer so far.
    OnTrial(Duration, Duration),
}

impl Judge {
    /// Applies new counts. `now` comes from any monotonic clock. `is_backend` returns true for
    /// current backends.
    pub fn read(
        &mut self,
        readings: &Readings,
        now: Duration,
        is_backend: impl Fn(&Path) -> bool,
    ) -> Vec<Change> {
        let has_votes = |path: &Path| {
            readings
                .get(path)
                .is_some_and(|reading| reading.votes != Votes::NONE)
        };
        for (_, judged) in self
            .backends
            .iter_mut()
            .filter(|(path, _)| !has_votes(path))
        {
            judged.answers();
        }
        for (&path, &reading) in readings.iter().filter(|(path, _)| has_votes(path)) {
            let failures = reading.votes.failures();
            let before = Reading {
                votes: if self.has_begun {
                    Votes::NONE
                } else {
                    reading.votes
                },
                ..reading
            };
            let judged = self
                .backends
                .entry(path)
                .or_insert_with(|| Judged::new(before, now));
            if !is_backend(&path) {
                // Another pod may reuse the address later.
                *judged = Judged::new(reading, now);
                self.reported.remove(&path);
                continue;
            }
            if reading.answered != judged.answered {
                judged.answers();
                // Clients that retry fast may add failures between that answer and this reading.
                (judged.failures, judged.answered) = (failures, reading.answered);
            }
            judged.fails(reading.votes, now);
        }
        self.has_begun = true;
        let changes = self
            .news(now)
            .into_iter()
            .filter(|change| is_backend(change.path()))
            .collect();
        self.pass(now);
        self.backends.retain(|path, judged| {
            judged.is_worth_keeping(now) && (judged.failures > 0 || is_backend(path))
        });
        changes
    }

    /// Returns the changes to report, and records them as reported.
    fn news(&mut self, now: Duration) -> Vec<Change> {
        let Self {
            backends, reported, ..
        } = self;
        let is_silent = |path: &Path| {
            backends
                .get(path)
                .is_some_and(|own| own.state != State::Serving)
        };
        let answer: Vec<_> = reported.extract_if(.., |path| !is_silent(path)).collect();
        for path in &answer {
            if let Some(own) = backends.get_mut(path) {
                own.unreported_until = now + back_off(own.strikes.saturating_sub(1));
            }
        }
        let silent: BTreeSet<_> = backends
            .iter()
            .filter(|(path, own)| {
                own.state != State::Serving
                    && !reported.contains(path)
                    && now >= own.unreported_until
            })
            .map(|(path, _)| *path)
            .collect();
        reported.extend(&silent);
        silent
            .into_iter()
            .map(Change::Silent)
            .chain(answer.into_iter().map(Change::Answers))
            .collect()
    }

    /// Starts and ends due probations.
    pub fn pass(&mut self, now: Duration) {
        for (path, own) in &mut self.backends {
            if own.pass(now) {
                self.reported.remove(path);
            }
        }
    }

    /// Returns the ejected backends.
    pub fn silent(&self) -> Silent {
        self.backends
            .iter()
            .filter(|(_, judged)| judged.is_out())
            .map(|(path, _)| *path)
            .collect()
    }

    /// Returns true if a reading may change the state without new failures.
    pub fn waits(&self) -> bool {
        self.backends
            .values()
            .any(|judged| judged.state != State::Serving)
    }
}

impl Judged {
    const fn new(Reading { votes, answered }: Reading, now: Duration) -> Self {
        Self {
            failures: votes.failures(),
            answered,
            window: (now, 0),
            state: State::Serving,
            strikes: 0,
            struck: Duration::ZERO,
            trial_from: Duration::ZERO,
            unreported_until: Duration::ZERO,
        }
    }

    /// Returns true if the backend gets no connections.
    const fn is_out(&self) -> bool {
        matches!(self.state, State::Silent(..))
    }

    /// Starts or ends a due probation. Returns true if the silence is older than [`FORGET`].
    fn pass(&mut self, now: Duration) -> bool {
        let is_forgotten = self.state != State::Serving && now.saturating_sub(self.struck) > FORGET;
        self.state = match self.state {
            _ if is_forgotten => State::Serving,
            State::Silent(until, trial) if until <= now => State::OnTrial(now + trial, trial),
            State::OnTrial(until, trial) if until <= now => State::Silent(now + VERDICT, trial * 2),
            state => state,
        };
        is_forgotten
    }

    const fn answers(&mut self) {
        self.failures = 0;
        self.window.1 = 0;
        self.state = State::Serving;
    }

    /// Records the failures since the last answer.
    fn fails(&mut self, votes: Votes, now: Duration) {
        let more = votes.failures_since(std::mem::replace(&mut self.failures, votes.failures()));
        match self.state {
            State::Serving => {
                if now.saturating_sub(self.window.0) > WINDOW {
                    // The newest failures may start a new series.
                    self.window = (now, 0);
                }
                self.window.1 = self.window.1.saturating_add(more);
                if self.window.1 >= FAILURES && votes.clients() >= CLIENTS {
                    self.strike(now);
                }
            }
            // Failures of a probation's connections may arrive late, between probations.
            State::OnTrial(..) | State::Silent(..) => {
                if more > 0 && now >= self.trial_from {
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
        (self.state, self.struck, self.trial_from) =
            (State::Silent(now + back_off, TRIAL), now, now + back_off);
        self.strikes = self.strikes.saturating_add(1);
    }

    fn is_worth_keeping(&self, now: Duration) -> bool {
        self.failures > 0
            || self.state != State::Serving
            || self.strikes > 0 && now.saturating_sub(self.struck) <= FORGET
    }
}

impl Change {
    pub const fn path(&self) -> &Path {
        match self {
            Self::Silent(path) | Self::Answers(path) => path,
        }
    }
}

/// Returns the ejection time after this many previous ejections.
fn back_off(strikes: u32) -> Duration {
    BACK_OFF
        .saturating_mul(1 << strikes.min(8))
        .min(BACK_OFF_MAX)
}
