//! Clients in namespaces of the cluster: connections that stay open, and new ones all the time.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::ops::Range;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, anyhow, bail, ensure};
use socket2::{Domain, Socket, Type};

use crate::clients::{Client, in_each};
use crate::web::LoadOptions;

/// The time limit for an answer. A lost SYN or datagram is a failure for its client; TCP sends a lost
/// segment of an open connection again.
const ANSWER: Duration = Duration::from_millis(900);
const ANSWER_HELD: Duration = Duration::from_secs(5);
const REQUEST: &[u8] = b"GET /hostname HTTP/1.1\r\nHost: web\r\n\r\n";

/// The source ports of connections that stay open: no port of the kernel's choice, which the other
/// connections have. With one port for both, a connection that stays open and a new one through
/// another node may lead to one backend, and the new one then begins a second late (docs/limits.md).
const HELD_PORTS: Range<u16> = 20_000..30_000;

/// The failures by client, target and kind: their number, and the time of the first.
type Failures = BTreeMap<String, (u64, SystemTime)>;

/// What happened to all clients so far.
#[derive(Debug, Default)]
struct Seen {
    held: AtomicU64,
    dials: AtomicU64,
    exchanges: AtomicU64,
    slowest_micros: AtomicU64,
    failures: Mutex<Failures>,
}

/// A step's counts.
#[derive(Debug, Default)]
struct Counts {
    held: u64,
    dials: u64,
    exchanges: u64,
    slowest: Duration,
    failures: Failures,
}

pub(crate) struct Load {
    seen: Arc<Seen>,
    /// Ends the open connections.
    released: Arc<AtomicBool>,
    ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<()>>>,
}

/// The connections that a client keeps open, with their targets.
type Held = Vec<(SocketAddr, TcpStream)>;

impl Load {
    pub(crate) fn start(clients: &[Client], options: &LoadOptions) -> Result<Self> {
        let LoadOptions { held, rate } = *options;
        let open = in_each(clients, |client| open(client, held))?;
        let seen = Arc::new(Seen::default());
        let released = Arc::new(AtomicBool::new(false));
        let ended = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for (client, open) in clients.iter().zip(open) {
            seen.held.fetch_add(open.len() as u64, Ordering::Relaxed);
            let (holder, dialer) = (client.clone(), client.clone());
            let (of_holder, of_dialer) = (Arc::clone(&seen), Arc::clone(&seen));
            let (released, ended) = (Arc::clone(&released), Arc::clone(&ended));
            threads.push(thread::spawn(move || {
                hold(&holder, &of_holder, &released, open);
                Ok(())
            }));
            threads.push(thread::spawn(move || {
                dialer.enter()?;
                dial(&dialer, &of_dialer, &ended, rate)
            }));
        }
        Ok(Self {
            seen,
            released,
            ended,
            threads,
        })
    }

    /// Returns the counts since the last call.
    fn counts(&self) -> Counts {
        let seen = &self.seen;
        Counts {
            held: seen.held.load(Ordering::Relaxed),
            dials: seen.dials.swap(0, Ordering::Relaxed),
            exchanges: seen.exchanges.swap(0, Ordering::Relaxed),
            slowest: Duration::from_micros(seen.slowest_micros.swap(0, Ordering::Relaxed)),
            failures: std::mem::take(
                &mut *seen.failures.lock().unwrap_or_else(PoisonError::into_inner),
            ),
        }
    }

    pub(crate) fn stop(self) -> Result<()> {
        self.released.store(true, Ordering::Relaxed);
        self.ended.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().map_err(|_| anyhow!("a client panicked"))??;
        }
        Ok(())
    }
}

impl Seen {
    fn failed(&self, client: &Client, target: SocketAddr, what: &str, error: &io::Error) {
        let key = format!("{what} from {} to {target}: {error}", client.name);
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.entry(key).or_insert((0, SystemTime::now())).0 += 1;
    }
}

/// Opens a client's connections, in turn to each of its targets.
fn open(client: &Client, number: u32) -> Result<Held> {
    let targets = client.targets.iter().cycle().take(number as usize);
    let mut ports = HELD_PORTS;
    let open: Held = targets
        .map(|target| {
            let stream = connect_from(&mut ports, *target)
                .with_context(|| format!("{} opens a connection to {target}", client.name))?;
            stream.set_read_timeout(Some(ANSWER_HELD))?;
            stream.set_nodelay(true)?;
            Ok((*target, stream))
        })
        .collect::<Result<_>>()?;
    ensure!(!open.is_empty(), "{} has no target", client.name);
    Ok(open)
}

/// Connects from the next port that is free.
fn connect_from(ports: &mut Range<u16>, target: SocketAddr) -> Result<TcpStream> {
    for port in ports {
        let socket = Socket::new(Domain::for_address(target), Type::STREAM, None)?;
        let from: SocketAddr = if target.is_ipv4() {
            (Ipv4Addr::UNSPECIFIED, port).into()
        } else {
            (Ipv6Addr::UNSPECIFIED, port).into()
        };
        let connected = socket
            .bind(&from.into())
            .and_then(|()| socket.connect_timeout(&target.into(), ANSWER));
        match connected {
            // Connections of an earlier run may wait for their end.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::AddrInUse | io::ErrorKind::AddrNotAvailable
                ) => {}
            connected => return Ok(connected.map(|()| socket.into())?),
        }
    }
    bail!("no port is free")
}

/// Keeps connections open, with an exchange on each about every second.
fn hold(client: &Client, seen: &Seen, ended: &AtomicBool, mut open: Held) {
    let pause = Duration::from_secs(1) / u32::try_from(open.len()).unwrap_or(u32::MAX);
    while !ended.load(Ordering::Relaxed) {
        open.retain_mut(|(target, stream)| {
            thread::sleep(pause);
            let answered = exchange(stream);
            match answered {
                Ok(()) => {
                    seen.exchanges.fetch_add(1, Ordering::Relaxed);
                    true
                }
                Err(error) => {
                    seen.failed(client, *target, "open connection", &error);
                    seen.held.fetch_sub(1, Ordering::Relaxed);
                    false
                }
            }
        });
        if open.is_empty() {
            break;
        }
    }
    seen.held.fetch_sub(open.len() as u64, Ordering::Relaxed);
}

/// Opens connections, and sends datagrams from new ports.
fn dial(client: &Client, seen: &Seen, ended: &AtomicBool, rate: u32) -> Result<()> {
    let pause = Duration::from_secs(1) / rate;
    for (number, target) in client.targets.iter().cycle().enumerate() {
        if ended.load(Ordering::Relaxed) {
            break;
        }
        let started = Instant::now();
        let is_datagram = is_datagram(number, client.targets.len());
        let answered = if is_datagram {
            datagram(*target, b"hostname", ANSWER).map(drop)
        } else {
            TcpStream::connect_timeout(target, ANSWER).and_then(|mut stream| {
                stream.set_read_timeout(Some(ANSWER))?;
                exchange(&mut stream)
            })
        };
        seen.dials.fetch_add(1, Ordering::Relaxed);
        let micros = u64::try_from(started.elapsed().as_micros())?;
        seen.slowest_micros.fetch_max(micros, Ordering::Relaxed);
        if let Err(error) = answered {
            let what = if is_datagram {
                "datagram"
            } else {
                "connection"
            };
            seen.failed(client, *target, what, &error);
        }
        thread::sleep(pause.saturating_sub(started.elapsed()));
    }
    Ok(())
}

/// Sends a datagram from a new port. Returns the answer.
pub(crate) fn datagram(target: SocketAddr, text: &[u8], limit: Duration) -> io::Result<String> {
    let any: SocketAddr = if target.is_ipv4() {
        ([0, 0, 0, 0], 0).into()
    } else {
        (Ipv6Addr::UNSPECIFIED, 0).into()
    };
    let socket = UdpSocket::bind(any)?;
    socket.set_read_timeout(Some(limit))?;
    socket.connect(target)?;
    socket.send(text)?;
    let mut answer = [0; 512];
    let length = loop {
        match socket.recv(&mut answer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            received => break received?,
        }
    };
    Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
}

/// Returns true if a dial is a datagram: each fifth of each target.
fn is_datagram(number: usize, targets: usize) -> bool {
    (number / targets).is_multiple_of(5)
}

/// Sends a request, and reads its answer to the end.
fn exchange(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(REQUEST)?;
    let mut answer = Vec::new();
    let mut buffer = [0; 2048];
    while !is_whole(&answer) {
        match stream.read(&mut buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => answer.extend_from_slice(&buffer[..read]),
            // A read with a time limit ends when the kernel stops the thread for a moment.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns true if an HTTP answer has its head, and the body that the head announces.
fn is_whole(answer: &[u8]) -> bool {
    let text = String::from_utf8_lossy(answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        return false;
    };
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length")
            .then(|| value.trim().parse().ok())?
    });
    length.is_some_and(|length: usize| body.len() >= length)
}

/// Checks that each client gets an answer from each of its targets.
pub(crate) fn reach(clients: &[Client]) -> Result<()> {
    in_each(clients, |client| {
        for target in &client.targets {
            TcpStream::connect_timeout(target, ANSWER)
                .and_then(|mut stream| {
                    stream.set_read_timeout(Some(ANSWER))?;
                    exchange(&mut stream)
                })
                .with_context(|| format!("{} dials {target}", client.name))?;
        }
        Ok(())
    })
    .map(drop)
}

/// Steps of an operator under a load, and their results as lines.
pub(crate) struct Run {
    load: Load,
    failed: u64,
}

impl Run {
    pub(crate) fn new(load: Load) -> Self {
        Self { load, failed: 0 }
    }

    /// Makes the clients close their open connections.
    pub(crate) fn release(&self) {
        self.load.released.store(true, Ordering::Relaxed);
    }

    /// Ends the load, and prints the number of failures.
    pub(crate) fn finish(self, steps: Result<()>) -> Result<ExitCode> {
        let stopped = self.load.stop();
        steps?;
        stopped?;
        println!("{} connections and datagrams failed", self.failed);
        Ok(if self.failed == 0 {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }

    pub(crate) fn step(&mut self, name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let started = Instant::now();
        let result = work();
        thread::sleep(Duration::from_secs(3));
        let counts = self.load.counts();
        let failures: u64 = counts.failures.values().map(|(number, _)| number).sum();
        println!(
            "{name}: {:.0} s, {} open, {} exchanges on them, {} new, slowest {} ms, {failures} failed",
            started.elapsed().as_secs_f64(),
            counts.held,
            counts.exchanges,
            counts.dials,
            counts.slowest.as_millis(),
        );
        for (what, (number, first)) in &counts.failures {
            println!("    {number} x {what}, first at {}", time_of_day(*first));
        }
        self.failed += failures;
        result.with_context(|| name.to_owned())
    }
}

/// Returns the time of day in UTC, as a capture shows it.
fn time_of_day(time: SystemTime) -> String {
    let since = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let seconds = since.as_secs() % 86_400;
    format!(
        "{:02}:{:02}:{:02}.{:03}",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60,
        since.subsec_millis()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_target_gets_datagrams_and_connections() {
        for targets in 1..=20 {
            for target in 0..targets {
                let dials = (0..100).map(|round| is_datagram(round * targets + target, targets));
                assert_eq!(dials.filter(|is| *is).count(), 20, "{target} of {targets}");
            }
        }
    }

    #[test]
    fn time_of_day_has_milliseconds() {
        let time = SystemTime::UNIX_EPOCH + Duration::from_millis(86_400_000 + 3_723_004);
        assert_eq!(time_of_day(time), "01:02:03.004");
    }

    #[test]
    fn answer_is_whole_with_its_body() {
        let whole = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nweb-1";
        assert!(is_whole(whole));
        for length in 0..whole.len() {
            assert!(!is_whole(&whole[..length]), "{length}");
        }
    }
}
