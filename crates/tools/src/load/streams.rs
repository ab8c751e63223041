//! Many long streams, driven by one thread in turns.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use super::stream::{Seen, Stream, now};
use testbed::echo::Protocol;
use testbed::lab::Host;

/// The interval of a stream's datagrams.
const TICK: Duration = Duration::from_millis(1);
/// A TCP stream sends once in this many ticks.
const TCP_EVERY: u32 = 5;
/// The wait for answers after the last packet.
const DRAIN: Duration = Duration::from_secs(2);

/// The purpose of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Passes kpx.
    Service,
    /// From pod to pod without kpx, at the same time and on the same threads.
    Control,
}

/// The route of a stream.
#[derive(Clone, Copy, Debug)]
pub struct Route<'a> {
    pub kind: Kind,
    pub protocol: Protocol,
    pub from: &'a Host,
    /// The address of an echo server, or of a Service with one.
    pub to: SocketAddr,
}

#[derive(Clone, Debug)]
pub struct StreamResults {
    pub kind: Kind,
    pub protocol: Protocol,
    pub to: SocketAddr,
    pub seen: Seen,
}

/// Sends until `finish`.
pub struct Streams {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<StreamResults>>,
}

impl Streams {
    /// Opens all streams, then starts them.
    pub fn start(routes: &[Route]) -> Result<Self> {
        let open = routes.iter().map(|route| {
            let every = if route.protocol == Protocol::Udp {
                1
            } else {
                TCP_EVERY
            };
            Ok((
                route.kind,
                route.protocol,
                route.to,
                Stream::open(route.protocol, route.from, route.to, TICK, every)?,
            ))
        });
        let open: Vec<_> = open.collect::<Result<_>>()?;
        let stop = Arc::new(AtomicBool::new(false));
        let reported = stop.clone();
        let thread = thread::Builder::new()
            .name("streams".to_owned())
            .spawn(move || {
                let (routes, mut streams): (Vec<_>, Vec<_>) = open
                    .into_iter()
                    .map(|(kind, protocol, to, stream)| ((kind, protocol, to), stream))
                    .unzip();
                let last_sent = flow(&mut streams, &reported);
                let results = |((kind, protocol, to), stream): (_, Stream)| StreamResults {
                    kind,
                    protocol,
                    to,
                    seen: stream.finish(last_sent),
                };
                routes.into_iter().zip(streams).map(results).collect()
            });
        Ok(Self {
            stop,
            thread: thread.context("start a thread for the streams")?,
        })
    }

    /// Stops sending, waits for packets in flight, and returns the results.
    pub fn finish(self) -> Result<Vec<StreamResults>> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread
            .join()
            .map_err(|_| anyhow!("the streams' thread panicked"))
    }
}

/// Returns the time of the last packets.
fn flow(streams: &mut [Stream], stop: &AtomicBool) -> Duration {
    let mut tick = 0_u32;
    let mut next = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        for stream in streams.iter_mut().filter(|stream| !stream.is_over()) {
            stream.receive();
            if tick.is_multiple_of(stream.every) {
                stream.send();
            }
        }
        tick = tick.wrapping_add(1);
        // Packets missed while this thread did not run are not made up for.
        next = (next + TICK).max(Instant::now());
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    let last_sent = now();
    let until = Instant::now() + DRAIN;
    while Instant::now() < until
        && streams
            .iter()
            .any(|stream| !stream.is_over() && stream.seen.lost() > 0)
    {
        streams
            .iter_mut()
            .filter(|stream| !stream.is_over())
            .for_each(Stream::receive);
        thread::sleep(TICK);
    }
    last_sent
}
