//! Load that detects losses and delays: new connections at a rate, and a byte per millisecond over
//! an open connection.

use std::io::{Read, Write};
use std::net::{SocketAddrV4, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use testbed::netns::NetNs;

use super::place::{Place, dial};

const DIALERS: u32 = 8;
/// The time between two bytes of a stream.
const TICK: Duration = Duration::from_millis(1);
/// Time limit for a byte.
const LOST: Duration = Duration::from_secs(60);

/// New connections from their start until [`Dialers::finish`].
pub(super) struct Dialers {
    stop: Stop,
    threads: Vec<JoinHandle<Result<Dials>>>,
}

/// The results of the connections.
#[derive(Clone, Debug, Default)]
pub(super) struct Dials {
    pub(super) opened: u64,
    pub(super) failed: u64,
    /// The first failure.
    pub(super) why: Option<String>,
    /// From the first packet to the answer.
    pub(super) longest: Duration,
    pub(super) lasted: Duration,
}

impl Dialers {
    pub(super) fn start(client: &NetNs, targets: &[SocketAddrV4], per_second: u32) -> Result<Self> {
        let stop = Stop(Arc::new(AtomicBool::new(false)));
        let interval = Duration::from_secs(1) * DIALERS / per_second.max(1);
        let threads = (0..DIALERS).map(|nth| {
            let reported = stop.0.clone();
            let mut targets = targets.to_vec();
            let begin = nth as usize * targets.len() / DIALERS as usize;
            targets.rotate_left(begin);
            client.thread("dialer", move || {
                Ok(dial_all(&targets, interval, &reported))
            })
        });
        Ok(Self {
            threads: threads.collect::<Result<_>>()?,
            stop,
        })
    }

    pub(super) fn finish(self) -> Result<Dials> {
        drop(self.stop);
        let mut all = Dials::default();
        for thread in self.threads {
            let dials = thread.join().map_err(|_| anyhow!("a dialer panicked"))??;
            all.opened += dials.opened;
            all.failed += dials.failed;
            all.why = all.why.or(dials.why);
            all.longest = all.longest.max(dials.longest);
            all.lasted = all.lasted.max(dials.lasted);
        }
        Ok(all)
    }
}

fn dial_all(targets: &[SocketAddrV4], interval: Duration, stop: &AtomicBool) -> Dials {
    let began = Instant::now();
    let mut dials = Dials::default();
    for (nth, target) in (0..).zip(targets.iter().cycle()) {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        thread::sleep((began + interval * nth).saturating_duration_since(Instant::now()));
        let started = Instant::now();
        match dial(*target) {
            Ok(_) => {
                dials.opened += 1;
                dials.longest = dials.longest.max(started.elapsed());
            }
            Err(error) => {
                dials.failed += 1;
                dials.why.get_or_insert_with(|| format!("{error:#}"));
            }
        }
    }
    Dials {
        lasted: began.elapsed(),
        ..dials
    }
}

/// A connection with a byte per millisecond, and a control connection without a node, which shows
/// the delays of the machine alone.
pub(super) struct Streams {
    stop: Stop,
    through: JoinHandle<Result<Duration>>,
    beside: JoinHandle<Result<Duration>>,
}

/// Ends the threads of a load with this value.
struct Stop(Arc<AtomicBool>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The longest round trip of a byte.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waits {
    pub(super) through: Duration,
    /// The same on the client's loopback device.
    pub(super) beside: Duration,
}

impl Streams {
    /// Opens both connections.
    pub(super) fn start(place: &Place, to: SocketAddrV4) -> Result<Self> {
        let stop = Stop(Arc::new(AtomicBool::new(false)));
        let through = connect(&place.client, to)?;
        let beside = connect(&place.client, Place::beside())?;
        let start = |stream: TcpStream| {
            let reported = stop.0.clone();
            place
                .client
                .thread("stream", move || flow(stream, &reported))
        };
        Ok(Self {
            through: start(through)?,
            beside: start(beside)?,
            stop,
        })
    }

    pub(super) fn finish(self) -> Result<Waits> {
        drop(self.stop);
        let [through, beside] = [self.through, self.beside]
            .map(|thread| thread.join().map_err(|_| anyhow!("a stream panicked")));
        Ok(Waits {
            through: through??,
            beside: beside??,
        })
    }
}

fn connect(client: &NetNs, to: SocketAddrV4) -> Result<TcpStream> {
    let stream = client
        .run(|| TcpStream::connect(to))
        .with_context(|| format!("open a stream to {to}"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(LOST))?;
    Ok(stream)
}

fn flow(mut stream: TcpStream, stop: &AtomicBool) -> Result<Duration> {
    let mut longest = Duration::ZERO;
    while !stop.load(Ordering::Relaxed) {
        let sent = Instant::now();
        stream.write_all(&[1]).context("send a byte")?;
        stream.read_exact(&mut [0]).context("wait for a byte")?;
        longest = longest.max(sent.elapsed());
        thread::sleep(TICK.saturating_sub(sent.elapsed()));
    }
    Ok(longest)
}
