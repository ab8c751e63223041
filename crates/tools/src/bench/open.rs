//! Connections that stay open through all rounds of a path, because most connections of a cluster
//! are older than a second.

use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::socket;

use super::fixture::Fixture;
use super::traffic::{Slice, TIMEOUT, Work, echo, exchange, pinned, swallow, write_block};
use super::{Latency, Mode, Path, datagrams};
use testbed::agent::idle;

/// The interval of a connection's traffic, so that neither kpx nor conntrack treats it as silent.
const PAUSE: Duration = Duration::from_millis(400);

/// The open connections of a path, one per variant and mode.
pub(super) struct Opened<'a> {
    path: Path,
    since: Instant,
    connections: Vec<(&'a Fixture<'a>, Mode, Connection)>,
}

impl<'a> Opened<'a> {
    pub(super) fn all(path: Path, fixtures: &[&'a Fixture<'a>], modes: &[Mode]) -> Result<Self> {
        let mut connections = Vec::new();
        for &fixture in fixtures {
            for &mode in modes {
                let opened = fixture.open(path, mode);
                let connection = opened
                    .with_context(|| format!("open for {mode}, {}, {path}", fixture.variant))?;
                connections.push((fixture, mode, connection));
            }
        }
        Ok(Self {
            path,
            since: Instant::now(),
            connections,
        })
    }

    /// Waits until connections are old enough, and proves that they take the path of open
    /// connections.
    pub(super) fn ripen(&mut self, age: Duration) -> Result<()> {
        if self.connections.is_empty() {
            return Ok(());
        }
        while self.since.elapsed() < age {
            self.keep()?;
            idle(PAUSE / 4)?;
        }
        let path = self.path;
        for (fixture, mode, connection) in &mut self.connections {
            let slice = |length| connection.run(&fixture.slice(path, length)).map(drop);
            fixture
                .prove_open(path, slice)
                .with_context(|| format!("{mode}, {}, {path}", fixture.variant))?;
        }
        Ok(())
    }

    /// Sends data over each connection that has been silent for a while.
    pub(super) fn keep(&mut self) -> Result<()> {
        self.connections
            .iter_mut()
            .try_for_each(|(fixture, mode, connection)| {
                let kept = if connection.used.elapsed() < PAUSE {
                    Ok(())
                } else {
                    connection.say()
                };
                kept.with_context(|| format!("{mode}, {}", fixture.variant))
            })
    }

    /// Measures a slice over the variant's connection; `None` for a mode without open connections.
    pub(super) fn run(
        &mut self,
        fixture: &Fixture<'_>,
        mode: Mode,
        length: Duration,
    ) -> Option<Result<Work>> {
        let is_its = |of: &&mut (&Fixture<'_>, Mode, Connection)| {
            of.0.variant == fixture.variant && of.1 == mode
        };
        let (.., connection) = self.connections.iter_mut().find(is_its)?;
        Some(connection.run(&fixture.slice(self.path, length)))
    }
}

/// A client, and the thread of its server, which ends with this value.
#[derive(Debug)]
pub(super) struct Connection {
    client: Client,
    server: Option<JoinHandle<()>>,
    used: Instant,
}

#[derive(Debug)]
enum Client {
    Requests(TcpStream),
    Stream {
        stream: TcpStream,
        sent: u64,
        received: Arc<AtomicU64>,
    },
    Datagrams {
        socket: UdpSocket,
        server: UdpSocket,
    },
}

impl Connection {
    pub(super) fn open(slice: &Slice<'_>, mode: Mode) -> Result<Self> {
        // The server's thread stays on this thread's CPU.
        pinned(|| {
            let (client, server) = if mode == Mode::UdpRr {
                datagrams(slice)?
            } else {
                tcp(slice, mode)?
            };
            Ok(Self {
                client,
                server: Some(server),
                used: Instant::now(),
            })
        })
    }

    fn run(&mut self, slice: &Slice<'_>) -> Result<Work> {
        let client = &mut self.client;
        let done = pinned(|| match client {
            Client::Requests(stream) => slice.timed(|| exchange(stream).map(|()| 1)),
            Client::Datagrams { socket, .. } => {
                slice.timed(|| datagrams::exchange(socket).map(|()| 1))
            }
            Client::Stream {
                stream,
                sent,
                received,
            } => {
                let done = slice.timed(|| {
                    let bytes = write_block(stream)?;
                    *sent += bytes;
                    Ok(bytes)
                })?;
                // Nothing is left in flight for the next slice, which belongs to another variant.
                arrived(*sent, received)?;
                Ok(Work {
                    latency: Latency::default(),
                    ..done
                })
            }
        });
        self.used = Instant::now();
        done
    }

    fn say(&mut self) -> Result<()> {
        self.used = Instant::now();
        match &mut self.client {
            Client::Requests(stream) => exchange(stream),
            Client::Datagrams { socket, .. } => datagrams::exchange(socket),
            Client::Stream {
                stream,
                sent,
                received,
            } => {
                *sent += write_block(stream)?;
                arrived(*sent, received)
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // A server that has ended needs no message.
        match &self.client {
            Client::Requests(stream) | Client::Stream { stream, .. } => {
                drop(stream.shutdown(Shutdown::Both))
            }
            Client::Datagrams { server, .. } => {
                let _ = socket::shutdown(server.as_raw_fd(), socket::Shutdown::Both);
            }
        }
        let _ = self.server.take().map(JoinHandle::join);
    }
}

fn tcp(slice: &Slice<'_>, mode: Mode) -> Result<(Client, JoinHandle<()>)> {
    let listener = slice
        .server
        .run(|| TcpListener::bind(slice.at))
        .with_context(|| format!("listen on {}", slice.at))?;
    let stream = slice.client.run(|| slice.connect())?;
    // The kernel completes the handshake without the server.
    let (accepted, _) = listener.accept().context("accept")?;
    let received = Arc::new(AtomicU64::new(0));
    let count = received.clone();
    let count = move |bytes| {
        count.fetch_add(bytes as u64, Ordering::Release);
    };
    if mode == Mode::TcpStream {
        let server = thread::spawn(move || swallow(accepted, count));
        Ok((
            Client::Stream {
                stream,
                sent: 0,
                received,
            },
            server,
        ))
    } else {
        Ok((
            Client::Requests(stream),
            thread::spawn(move || echo(accepted)),
        ))
    }
}

/// The server connects its socket to the client, so that other servers may have the same address.
fn datagrams(slice: &Slice<'_>) -> Result<(Client, JoinHandle<()>)> {
    let server = datagrams::bind(slice)?;
    server.set_read_timeout(Some(TIMEOUT))?;
    let socket = slice.client.run(|| datagrams::connect(slice))?;
    socket.send(&[1]).context("send")?;
    let (_, client) = server.recv_from(&mut [0]).context("wait for a datagram")?;
    server
        .connect(client)
        .with_context(|| format!("connect to {client}"))?;
    server.send(&[1]).context("answer")?;
    socket.recv(&mut [0]).context("wait for an answer")?;
    server.set_read_timeout(None)?;
    let echoing = server.try_clone().context("duplicate a socket")?;
    Ok((
        Client::Datagrams { socket, server },
        thread::spawn(move || datagrams::echo(echoing, 1)),
    ))
}

/// Waits until the server has read everything that was sent.
fn arrived(sent: u64, received: &AtomicU64) -> Result<()> {
    let started = Instant::now();
    while received.load(Ordering::Acquire) < sent {
        ensure!(started.elapsed() < TIMEOUT, "{sent} bytes do not arrive");
        thread::yield_now();
    }
    Ok(())
}
