//! Clients and servers that repeat one operation for the length of a slice, on one CPU.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::panic::resume_unwind;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::socket;
use nix::unistd::Pid;
use socket2::{Domain, Socket, Type};

use super::counters::Counters;
use super::cpu::{self, Busy};
use super::latency::{Latency, Recorder};
use super::{Mode, datagrams, many};
use testbed::netns::NetNs;

/// Time limit for an answer.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);
/// The inverse of the part of a slice before counting begins.
const WARM_UP: u32 = 8;
/// The bytes per write of common clients and servers.
const BLOCK: usize = 128 << 10;

/// A client and a server for a slice.
#[derive(Clone, Copy, Debug)]
pub struct Slice<'a> {
    pub client: &'a NetNs,
    /// The address that the client dials.
    pub to: SocketAddr,
    pub server: &'a NetNs,
    /// The address on which the server listens.
    pub at: SocketAddr,
    pub length: Duration,
}

/// The completed work.
#[derive(Clone, Debug)]
pub struct Work {
    /// In the mode's unit.
    pub amount: u64,
    pub time: Duration,
    /// The CPU time of all CPUs, processes and interrupts.
    pub cpu: Duration,
    /// The durations of single operations, in modes that have operations.
    pub latency: Latency,
    /// The events of this CPU, see [`super::EVENTS`]; `None` if the machine does not count them.
    pub counted: Option<[u64; 3]>,
}

impl Slice<'_> {
    /// Opens the mode's sockets, measures, and closes them.
    pub fn run(&self, mode: Mode) -> Result<Work> {
        let slice = Self {
            length: self.length * mode.longer(),
            ..*self
        };
        let done = pinned(|| slice.work(mode))?;
        // A block of a stream is not a user's operation.
        let latency = if mode.unit() == "transactions" {
            done.latency
        } else {
            Latency::default()
        };
        Ok(Work { latency, ..done })
    }

    fn work(&self, mode: Mode) -> Result<Work> {
        let done = match mode {
            Mode::TcpCrr => self.tcp(answer_connections, |slice| slice.connect_request_response()),
            Mode::TcpRr | Mode::TcpRrYoung => self.tcp(echo_one, |slice| slice.request_response()),
            Mode::TcpStream => self.tcp(swallow_one, |slice| slice.stream()),
            Mode::TcpMany => self.tcp(many::answer, many::request_response),
            Mode::UdpRr | Mode::UdpRrYoung | Mode::UdpStream | Mode::UdpPps | Mode::UdpDns => {
                datagrams::run(self, mode)
            }
        };
        done.with_context(|| format!("{mode}, {} to {}", self.client.name(), self.to))
    }

    /// Runs with a server that ends when its listener is shut down.
    fn tcp(
        &self,
        serve: fn(TcpListener),
        work: impl FnOnce(&Self) -> Result<Work> + Send,
    ) -> Result<Work> {
        let listener = self
            .server
            .run(|| TcpListener::bind(self.at))
            .with_context(|| format!("listen on {}", self.at))?;
        let handle = listener.try_clone().context("duplicate a listener")?;
        thread::scope(|scope| {
            scope.spawn(move || serve(listener));
            let done = self.client.run(|| work(self));
            socket::shutdown(
                std::os::fd::AsRawFd::as_raw_fd(&handle),
                socket::Shutdown::Both,
            )
            .context("end a server")?;
            done
        })
    }

    pub(crate) fn connect_request_response(&self) -> Result<Work> {
        self.timed(|| {
            let mut stream = self.connect()?;
            exchange(&mut stream)?;
            Ok(1)
        })
    }

    fn request_response(&self) -> Result<Work> {
        let mut stream = self.connect()?;
        self.timed(|| exchange(&mut stream).map(|()| 1))
    }

    fn stream(&self) -> Result<Work> {
        let mut stream = self.connect()?;
        let done = self.timed(|| write_block(&mut stream))?;
        // A server that got everything sends nothing.
        stream.shutdown(Shutdown::Write)?;
        ensure!(stream.read(&mut [0])? == 0, "an answer to a stream");
        Ok(done)
    }

    /// Repeats `step`, which returns the amount of its work, until the time is over. The warm-up
    /// does not count.
    pub(crate) fn timed(&self, mut step: impl FnMut() -> Result<u64>) -> Result<Work> {
        let started = Instant::now();
        while started.elapsed() < self.length / WARM_UP {
            step()?;
        }
        let mut recorder = Recorder::new();
        let mut before = Duration::ZERO;
        let counters = Counters::start(last_cpu()?);
        let busy = Busy::now()?;
        let started = Instant::now();
        let mut amount = 0;
        let time = loop {
            amount += step()?;
            let time = started.elapsed();
            recorder.note(time.saturating_sub(before));
            before = time;
            // A server on the same CPU may not have run yet.
            if time >= self.length && (amount > 0 || time >= TIMEOUT) {
                break time;
            }
        };
        let counted = counters.and_then(Counters::read);
        Ok(Work {
            amount,
            time,
            cpu: busy.since()?,
            latency: recorder.finish(),
            counted,
        })
    }

    pub(crate) fn connect(&self) -> Result<TcpStream> {
        let socket = Socket::new(Domain::for_address(self.to), Type::STREAM, None)?;
        socket.set_tcp_nodelay(true)?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        socket.set_write_timeout(Some(TIMEOUT))?; // Applies to connect too.
        socket
            .connect(&self.to.into())
            .with_context(|| format!("connect to {}", self.to))?;
        Ok(socket.into())
    }

    /// Returns true if a server accepts a connection and answers. Starts no server.
    pub fn is_served(&self) -> bool {
        self.client
            .run(|| self.connect().and_then(|mut stream| exchange(&mut stream)))
            .is_ok()
    }
}

pub(super) fn exchange(stream: &mut TcpStream) -> Result<()> {
    stream.write_all(&[1]).context("send")?;
    stream.read_exact(&mut [0]).context("wait for an answer")
}

/// Writes as much of a block as the connection accepts.
pub(super) fn write_block(stream: &mut TcpStream) -> Result<u64> {
    static BYTES: [u8; BLOCK] = [0x5a; BLOCK];
    Ok(u64::try_from(stream.write(&BYTES)?)?)
}

/// Serves connections in sequence.
fn answer_connections(listener: TcpListener) {
    while let Ok((mut stream, _)) = listener.accept() {
        let mut byte = [0];
        // Until the client closes. The client reports failures here.
        while let Ok(1) = stream.read(&mut byte) {
            if stream.write_all(&byte).is_err() {
                break;
            }
        }
    }
}

fn echo_one(listener: TcpListener) {
    if let Ok((stream, _)) = listener.accept() {
        echo(stream);
    }
}

pub(super) fn echo(mut stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    let mut byte = [0];
    while let Ok(1) = stream.read(&mut byte) {
        if stream.write_all(&byte).is_err() {
            break;
        }
    }
}

fn swallow_one(listener: TcpListener) {
    if let Ok((stream, _)) = listener.accept() {
        swallow(stream, |_| ());
    }
}

/// Reads the stream, and passes the size of each read to `report`.
pub(super) fn swallow(mut stream: TcpStream, report: impl Fn(usize)) {
    let mut block = vec![0; BLOCK];
    while let Ok(bytes @ 1..) = stream.read(&mut block) {
        report(bytes);
    }
}

/// Calls `f` on a new thread: its child threads stay on the same CPU, and nothing else does.
pub(super) fn pinned<T: Send>(f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let there = || pin().and_then(|()| f());
    thread::scope(|scope| scope.spawn(there).join()).unwrap_or_else(|panic| resume_unwind(panic))
}

/// Pins to the last CPU, shared by client and server, so that its time is the cost of the path. On
/// two CPUs they would wake each other. The time of a wake-up varies by more than the measured
/// difference, above all in virtual machines.
pub(crate) fn pin() -> Result<()> {
    let last = last_cpu()?;
    let mut cpus = CpuSet::new();
    cpus.set(last)?;
    sched_setaffinity(Pid::from_raw(0), &cpus).with_context(|| format!("stay on CPU {last}"))
}

fn last_cpu() -> Result<usize> {
    Ok(usize::try_from(cpu::count()? - 1)?)
}
