//! Judges backends by what the programs count of their connections: [`Judge`] finds those that are
//! silent, and [`ServiceHealth`] decides which of them a set can do without.
//!
//! ```text
//!   answers ◀──────────── 3 failures of 2 clients in 10 s, and no answer ────────────▶ silent
//!                                                                                       │ back-off: 5 s, twice as long each time, to 300 s
//!   answers ◀── an answer, at any time ── on trial ◀────────────────────────────────────┘
//!                                            ├── one failure ──▶ silent
//!                                            └── neither ──▶ on trial again, for twice as long
//! ```
//!
//! A trial is a moment in which the backend takes connections, and the time until the clients' next
//! SYN. So a dead backend costs few of them. The backends of a node that does not respond are left
//! out together ([`Presumptions`]), before each of them has failed.
//!
//! No function here knows whether silent backends are left out: under mode `observe` they are told
//! of and serve on.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use proxy_common::addr::{Addr, Port, Proto, SockAddr};
use proxy_common::connect::Votes;
use proxy_common::frontend::{Backend, FrontendKey};

mod presumed;
#[cfg(test)]
mod tests;
mod unresponsive_nodes;

use presumed::Presumptions;
pub use unresponsive_nodes::Owed;
pub(crate) use unresponsive_nodes::{NodeOwes, unresponsive};

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
        named.ok_or_else(|| {
            format!(
                "{name:?} is not one of {}",
                Self::ALL.map(Self::name).join(", ")
            )
        })
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
        Self {
            service: service.socket_addr(),
            backend: backend.socket_addr(),
        }
    }

    /// Returns the keys of its ends; None in the other family.
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

/// The reason why a backend is taken for silent. The first ones weigh more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Evidence {
    /// It has failed itself.
    Own,
    /// Its node does not respond.
    Node,
}

/// The silent backends.
pub type Silent = BTreeMap<Path, Evidence>;

/// The silent backends of one service port, as far as the mode of its Service heeds them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServiceHealth<'a> {
    /// Off for a port of another protocol than TCP.
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

    /// Returns true if each set that serves has a backend for flows that leave another one.
    pub(crate) fn fails_over<A: Addr>(&self, cluster: &[Backend<A>], local: &[Backend<A>]) -> bool {
        self.mode == HealthMode::On
            && cluster.len() + local.len() > 1
            && cluster.len() != 1
            && local.len() != 1
    }

    /// Takes the silent backends out of a set and returns them, unless more than half of it is
    /// silent. Then the fault is more likely this node's or the network's, and each backend that is
    /// left would have to serve for several. Those of unresponsive nodes stay in first.
    pub(crate) fn take_silent<A: Addr>(&self, set: &mut Vec<Backend<A>>) -> Vec<SockAddr<A>> {
        if self.mode != HealthMode::On || self.silent.is_empty() {
            return Vec::new();
        }
        let place = |backend: &Backend<A>| SockAddr::new(backend.addr, backend.port);
        let evidence = |backend: &Backend<A>| {
            self.silent
                .get(&Path {
                    service: self.service,
                    backend: place(backend).socket_addr(),
                })
                .copied()
        };
        let is_silent = |backend: &Backend<A>, weakest| {
            evidence(backend).is_some_and(|evidence| evidence <= weakest)
        };
        let fits = |weakest: &Evidence| {
            set.iter()
                .filter(|backend| is_silent(backend, *weakest))
                .count()
                * 2
                <= set.len()
        };
        let Some(weakest) = [Evidence::Node, Evidence::Own].into_iter().find(fits) else {
            return Vec::new();
        };
        let silent = set
            .iter()
            .filter(|backend| is_silent(backend, weakest))
            .map(place)
            .collect();
        set.retain(|backend| !is_silent(backend, weakest));
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
/// The time for which a backend on trial takes connections at first, and the time after that in
/// which its failures come.
const TRIAL: Duration = Duration::from_millis(200);
const VERDICT: Duration = Duration::from_millis(1_600);
/// The time after which it is forgotten how often a backend was silent.
const FORGET: Duration = Duration::from_secs(600);

/// A change that operators are told of. A backend that comes and goes is told of no sooner again
/// than after its last back-off.
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
    /// The connections that the backend has answered: any other number than before says that it has
    /// answered.
    pub answered: u64,
    /// None if it was sent no SYN of late that the programs noted.
    pub owed: Option<Owed>,
}

/// What the programs have counted of the backends with votes, of those with SYNs of late, and of
/// those that the judge asks for.
pub type Readings = BTreeMap<Path, Reading>;

/// What is known of all backends of this node that have failed of late.
#[derive(Debug, Default)]
pub struct Judge {
    backends: BTreeMap<Path, Judged>,
    presumptions: Presumptions,
    /// The backends of which operators have been told that they are silent, and not yet that they
    /// answer.
    told: BTreeSet<Path>,
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
    /// Until then operators are not told again that it is silent.
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
    /// Takes in what was counted, and the backends of each node that does not respond, at a moment
    /// of any clock that does not go back. `is_backend` tells whether a path leads to a backend of
    /// now.
    pub fn read(
        &mut self,
        readings: &Readings,
        unresponsive: Vec<BTreeSet<Path>>,
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
                // Its address may come again, with another pod.
                *judged = Judged::new(reading, now);
                self.told.remove(&path);
                continue;
            }
            if reading.answered != judged.answered {
                judged.answers();
                // What has failed since that answer, and before this reading, came from clients who
                // send fast.
                (judged.failures, judged.answered) = (failures, reading.answered);
            }
            judged.fails(reading.votes, now);
        }
        self.has_begun = true;
        self.presumptions.read(readings, now, &is_backend);
        unresponsive
            .into_iter()
            .for_each(|paths| self.presumptions.begin(&paths, readings, now));
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

    /// Returns what operators are to be told, and remembers it.
    fn news(&mut self, now: Duration) -> Vec<Change> {
        let Self {
            backends,
            presumptions,
            told,
            ..
        } = self;
        let is_silent = |path: &Path, own: Option<&Judged>| {
            own.is_some_and(|own| own.state != State::Serving) || presumptions.has(path)
        };
        let answer: Vec<_> = told
            .extract_if(.., |path| !is_silent(path, backends.get(path)))
            .collect();
        for path in &answer {
            if let Some(own) = backends.get_mut(path) {
                own.untold_until = now + back_off(own.strikes.saturating_sub(1));
            }
        }
        let own = backends
            .iter()
            .filter(|(_, own)| own.state != State::Serving)
            .map(|(path, _)| path);
        let is_new = |path: &&Path| {
            !told.contains(path) && backends.get(path).is_none_or(|own| now >= own.untold_until)
        };
        let silent: BTreeSet<_> = own
            .chain(presumptions.all())
            .filter(is_new)
            .copied()
            .collect();
        told.extend(&silent);
        silent
            .into_iter()
            .map(Change::Silent)
            .chain(answer.into_iter().map(Change::Answers))
            .collect()
    }

    /// Begins and ends trials whose time has come.
    pub fn pass(&mut self, now: Duration) {
        let own = self
            .backends
            .iter_mut()
            .filter_map(|(path, own)| own.pass(now).then_some(*path));
        let mut forgotten: Vec<_> = own.collect();
        forgotten.extend(self.presumptions.pass(now));
        let is_silent = |path: &Path| {
            self.backends
                .get(path)
                .is_some_and(|own| own.state != State::Serving)
        };
        for path in forgotten
            .iter()
            .filter(|path| !is_silent(path) && !self.presumptions.has(path))
        {
            self.told.remove(path);
        }
    }

    /// Returns the backends that shall take no connections.
    pub fn silent(&self) -> Silent {
        let own = self
            .backends
            .iter()
            .filter(|(_, judged)| judged.is_out())
            .map(|(path, _)| (*path, Evidence::Own));
        // Later ones go before earlier ones of the same path.
        self.presumptions
            .silent()
            .map(|path| (*path, Evidence::Node))
            .chain(own)
            .collect()
    }

    /// Returns true if a reading may change something though nothing has failed since the last one.
    pub fn waits(&self) -> bool {
        self.backends
            .values()
            .any(|judged| judged.state != State::Serving)
            || self.presumptions.waits()
    }

    /// Returns true if the next reading should have this backend, with votes or without.
    pub fn asks_for(&self, path: &Path) -> bool {
        self.presumptions.knows(path)
    }
}

impl Judged {
    const fn new(
        Reading {
            votes, answered, ..
        }: Reading,
        now: Duration,
    ) -> Self {
        Self {
            failures: votes.failures(),
            answered,
            window: (now, 0),
            state: State::Serving,
            strikes: 0,
            struck: Duration::ZERO,
            trial_from: Duration::ZERO,
            untold_until: Duration::ZERO,
        }
    }

    /// Returns true if it takes no connections.
    const fn is_out(&self) -> bool {
        matches!(self.state, State::Silent(..))
    }

    /// Begins or ends a trial whose time has come. Returns true if its silence is forgotten.
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
            State::OnTrial(..) | State::Silent(..) => self.fails_on_trial(more, now),
        }
    }

    /// Takes in so many more failures of a silent one. It may be heard of late, and while no
    /// connections begin.
    fn fails_on_trial(&mut self, more: u32, now: Duration) {
        if more > 0 && self.is_judged(now) {
            self.strike(now);
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
    /// Returns the backend.
    pub const fn path(&self) -> &Path {
        match self {
            Self::Silent(path) | Self::Answers(path) => path,
        }
    }
}

/// Returns how long a backend gets no connections that was silent so often before.
fn back_off(strikes: u32) -> Duration {
    BACK_OFF
        .saturating_mul(1 << strikes.min(8))
        .min(BACK_OFF_MAX)
}
