//! New connections at a constant rate, each for one request and its answer.
//!
//! The rate does not depend on the connections' fate (an open loop), as with independent clients.

use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};

use super::results::{Fault, Results};
use testbed::netns::NetNs;

/// The maximum number of connections opened at once, so that a delayed thread does not delay other
/// answers.
const BURST: usize = 32;
/// Time between two checks for connections beyond the deadline.
const REVIEW: Duration = Duration::from_millis(100);
/// The payload of every request; see [`testbed::echo`] for the form of requests and answers.
const PAYLOAD: [u8; 16] = *b"soak-of-16-bytes";

/// The destinations, and the rate of dials.
pub struct Plan {
    /// Dialled in turn.
    pub targets: Vec<SocketAddr>,
    /// New connections per second.
    pub rate: u32,
    /// The time after which an exchange counts as failed.
    pub deadline: Duration,
    /// Returns true if the backend may answer the connection.
    pub allowed: Box<dyn Fn(&Exchange) -> bool + Send>,
}

/// An answered request.
#[derive(Clone, Copy, Debug)]
pub struct Exchange<'a> {
    pub target: SocketAddr,
    pub backend: &'a str,
    pub dialled: Instant,
    pub answered: Instant,
}

/// Dials until `finish`.
pub struct Dialer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Results>>,
}

impl Dialer {
    /// Starts to dial inside `ns`.
    pub fn start(ns: &NetNs, plan: Plan) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let reported = stop.clone();
        let thread = ns.thread("dialer", move || Work::new(plan)?.run(&reported))?;
        Ok(Self { stop, thread })
    }

    /// Stops dialling, waits for open connections, and returns the results.
    pub fn finish(self) -> Result<Results> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread
            .join()
            .map_err(|_| anyhow!("the dialer panicked"))?
    }
}

struct Work {
    plan: Plan,
    poll: Poll,
    /// By token.
    open: Vec<Option<Connection>>,
    free: Vec<usize>,
    results: Results,
}

struct Connection {
    stream: TcpStream,
    target: SocketAddr,
    dialled: Instant,
    asked: bool,
    /// The answer so far.
    read: Vec<u8>,
}

impl Work {
    fn new(plan: Plan) -> Result<Self> {
        let poll = Poll::new().context("make an epoll instance")?;
        Ok(Self {
            plan,
            poll,
            open: Vec::new(),
            free: Vec::new(),
            results: Results::new(Instant::now()),
        })
    }

    fn run(mut self, stop: &AtomicBool) -> Result<Results> {
        let started = Instant::now();
        let mut events = Events::with_capacity(1024);
        let mut review = started + REVIEW;
        loop {
            let stopping = stop.load(Ordering::Relaxed);
            if stopping && self.open.iter().all(Option::is_none) {
                self.results.lasted = started.elapsed();
                return Ok(self.results);
            }
            let next = if stopping {
                review
            } else {
                self.dial_due(started).min(review)
            };
            // In whole milliseconds, rounded up: at high rates a few connections are opened at
            // once.
            let wait = next.saturating_duration_since(Instant::now());
            match self.poll.poll(&mut events, Some(wait)) {
                Err(error) if error.kind() != ErrorKind::Interrupted => {
                    return Err(error).context("wait for events");
                }
                _ => {}
            }
            let ready: Vec<usize> = events.iter().map(|event| event.token().0).collect();
            ready.into_iter().for_each(|token| self.proceed(token));
            if Instant::now() >= review {
                self.give_up_on_late_ones();
                review = Instant::now() + REVIEW;
            }
        }
    }

    /// Dials the due connections. Returns the due time of the next connection.
    fn dial_due(&mut self, started: Instant) -> Instant {
        let due = |nth: u64| {
            started + Duration::from_nanos(1_000_000_000 * nth / u64::from(self.plan.rate))
        };
        let dialled = self.results.dialled;
        let now = Instant::now();
        let at_once = (0..BURST as u64)
            .take_while(|n| due(dialled + n) <= now)
            .count();
        let behind = now.saturating_duration_since(due(dialled));
        let next = due(dialled + at_once as u64);
        self.results.behind = self.results.behind.max(behind);
        (0..at_once).for_each(|_| self.dial());
        next
    }

    fn dial(&mut self) {
        let target = self.plan.targets[self.results.dialled as usize % self.plan.targets.len()];
        self.results.dialled += 1;
        let dialled = Instant::now();
        let token = self.free.pop().unwrap_or_else(|| {
            self.open.push(None);
            self.open.len() - 1
        });
        let opened = TcpStream::connect(target).and_then(|mut stream| {
            let interest = Interest::READABLE | Interest::WRITABLE;
            self.poll
                .registry()
                .register(&mut stream, Token(token), interest)?;
            Ok(stream)
        });
        match opened {
            Ok(stream) => {
                self.open[token] = Some(Connection {
                    stream,
                    target,
                    dialled,
                    asked: false,
                    read: Vec::new(),
                });
            }
            Err(error) => {
                self.free.push(token);
                self.results.fail(target, dialled, &Fault::Io(error));
            }
        }
    }

    fn proceed(&mut self, token: usize) {
        // An earlier event of the same round may have ended it.
        let Some(connection) = self.open.get_mut(token).and_then(Option::as_mut) else {
            return;
        };
        let outcome = connection.proceed();
        let target = connection.target;
        let dialled = connection.dialled;
        match outcome {
            Ok(None) => return,
            Ok(Some(backend)) => {
                let exchange = Exchange {
                    target,
                    backend: &backend,
                    dialled,
                    answered: Instant::now(),
                };
                self.results
                    .succeed(&exchange, (self.plan.allowed)(&exchange));
            }
            Err(fault) => self.results.fail(target, dialled, &fault),
        }
        self.close(token);
    }

    fn close(&mut self, token: usize) {
        self.open[token] = None;
        self.free.push(token);
    }

    fn give_up_on_late_ones(&mut self) {
        for token in 0..self.open.len() {
            let late = |c: &&Connection| c.dialled.elapsed() > self.plan.deadline;
            if let Some(connection) = self.open[token].as_ref().filter(late) {
                let step = if connection.asked {
                    "no answer in time"
                } else {
                    "not connected in time"
                };
                self.results
                    .fail(connection.target, connection.dialled, &Fault::Late(step));
                self.close(token);
            }
        }
    }
}

impl Connection {
    /// Returns the backend that answered, once the answer is complete.
    fn proceed(&mut self) -> Result<Option<String>, Fault> {
        if !self.asked {
            match self.ask() {
                Err(error) if is_early(&error) => return Ok(None),
                asked => asked.map_err(Fault::Io)?,
            }
        }
        let mut buffer = [0; 256];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(Fault::Closed),
                Ok(length) => self.read.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(Fault::Io(error)),
            }
            if let Some(backend) = self.answer()? {
                return Ok(Some(backend));
            }
        }
    }

    /// Sends the request as soon as the connection is established.
    fn ask(&mut self) -> io::Result<()> {
        if let Some(error) = self.stream.take_error()? {
            return Err(error);
        }
        self.stream.peer_addr()?;
        let length = u32::try_from(PAYLOAD.len()).expect("a short payload");
        self.stream
            .write_all(&[length.to_be_bytes().as_slice(), &PAYLOAD].concat())?;
        self.asked = true;
        Ok(())
    }

    fn answer(&self) -> Result<Option<String>, Fault> {
        let Some((&length, rest)) = self.read.split_first() else {
            return Ok(None);
        };
        let Some((greeting, echo)) = rest.split_at_checked(length.into()) else {
            return Ok(None);
        };
        if echo.len() < PAYLOAD.len() {
            return Ok(None);
        }
        let greeting = String::from_utf8_lossy(greeting);
        match greeting.split_once(' ') {
            Some((backend, _)) if echo == PAYLOAD => Ok(Some(backend.to_owned())),
            _ => Err(Fault::Corrupt),
        }
    }
}

/// Returns true while the handshake is unfinished.
fn is_early(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::NotConnected
    )
}
