//! A long stream: numbered records to an echo server, and its answers.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt, sockopt,
};
use nix::sys::time::TimeSpec;
use socket2::{Domain, Socket, Type};

use super::gaps::Gaps;
use testbed::echo::Protocol;
use testbed::lab::{Family, Host};

/// Time limit for opening a stream.
const DEADLINE: Duration = Duration::from_secs(5);

/// The results of a stream.
#[derive(Clone, Debug)]
pub struct Seen {
    pub sent: u64,
    pub received: u64,
    pub duplicated: u64,
    /// Arrived after a record that was sent later.
    pub reordered: u64,
    /// By errno's name, or a text. An error ends a TCP stream.
    pub errors: BTreeMap<String, u64>,
    pub gaps: Gaps,
    /// By number.
    times_seen: Vec<u8>,
}

impl Seen {
    fn new(tick: Duration) -> Self {
        Self {
            sent: 0,
            received: 0,
            duplicated: 0,
            reordered: 0,
            errors: BTreeMap::new(),
            gaps: Gaps::new(tick),
            times_seen: Vec::new(),
        }
    }

    pub fn lost(&self) -> u64 {
        self.sent - self.received
    }

    fn arrived(&mut self, number: u64, at: Duration) {
        match self.times_seen.get_mut(number as usize) {
            None => {
                *self
                    .errors
                    .entry("a number that was not sent".to_owned())
                    .or_default() += 1
            }
            Some(times) if *times > 0 => self.duplicated += 1,
            Some(times) => {
                *times = 1;
                self.received += 1;
                // All later records are missing, unless a later record overtook this record.
                self.reordered += u64::from(
                    self.times_seen[number as usize + 1..]
                        .iter()
                        .any(|times| *times > 0),
                );
                self.gaps.arrived(at);
            }
        }
    }

    fn failed(&mut self, error: &io::Error) {
        let reason = error.raw_os_error().map_or_else(
            || error.to_string(),
            |n| format!("{:?}", Errno::from_raw(n)),
        );
        *self.errors.entry(reason).or_default() += 1;
    }
}

pub(super) enum Link {
    Udp(Socket),
    Tcp {
        stream: TcpStream,
        out: Vec<u8>,
        read: Vec<u8>,
    },
}

pub(super) struct Stream {
    link: Link,
    /// The number of ticks between packets.
    pub(super) every: u32,
    tick: Duration,
    pub(super) seen: Seen,
}

impl Stream {
    pub(super) fn open(
        protocol: Protocol,
        from: &Host,
        to: SocketAddr,
        tick: Duration,
        every: u32,
    ) -> Result<Self> {
        let own = SocketAddr::new(from.addrs.ip(Family::of(to.ip())), 0);
        let link = from.ns.run(|| match protocol {
            Protocol::Udp => udp(own, to),
            _ => tcp(to),
        });
        let link =
            link.with_context(|| format!("open a {protocol} stream from {} to {to}", from.name))?;
        let tick = tick * every;
        Ok(Self {
            link,
            every,
            tick,
            seen: Seen::new(tick),
        })
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self.link, Link::Tcp { .. }) && !self.seen.errors.is_empty()
    }

    pub(super) fn send(&mut self) {
        let number = self.seen.sent;
        let sent = match &mut self.link {
            Link::Udp(socket) => socket.send(&record(number)).map(|_| true),
            Link::Tcp { stream, out, .. } => send_tcp(stream, out, number),
        };
        match sent {
            Ok(true) => {
                self.seen.sent += 1;
                self.seen.times_seen.push(0);
            }
            Ok(false) => {}
            Err(error) => self.seen.failed(&error),
        }
    }

    /// Reads everything that has arrived.
    pub(super) fn receive(&mut self) {
        loop {
            let came = match &mut self.link {
                Link::Udp(socket) => receive_udp(socket),
                Link::Tcp { stream, read, .. } => receive_tcp(stream, read),
            };
            match came {
                Ok((number, at)) => self.seen.arrived(number, at),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => {
                    self.seen.failed(&error);
                    return;
                }
            }
        }
    }

    /// Ends the stream. `last_sent` is the time of the last packet: silence until then counts as a
    /// gap.
    pub(super) fn finish(mut self, last_sent: Duration) -> Seen {
        if self.seen.lost() > 0 || self.is_over() {
            self.seen.gaps.arrived(last_sent + self.tick);
        }
        self.seen
    }
}

pub(super) fn now() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("the clock is past 1970")
}

const RECORD: usize = 16;

fn record(number: u64) -> [u8; RECORD] {
    let mut record = *b"numbered        ";
    record[8..].copy_from_slice(&number.to_be_bytes());
    record
}

fn number(record: &[u8]) -> io::Result<u64> {
    let number = record
        .strip_prefix(b"numbered")
        .and_then(|number| number.try_into().ok());
    number
        .map(u64::from_be_bytes)
        .ok_or_else(|| io::Error::new(ErrorKind::InvalidData, "another record"))
}

fn udp(own: SocketAddr, to: SocketAddr) -> io::Result<Link> {
    let socket = Socket::new(Domain::for_address(to), Type::DGRAM, None)?;
    socket.bind(&own.into())?;
    socket.connect(&to.into())?;
    socket.set_nonblocking(true)?;
    setsockopt(&socket, sockopt::RcvBufForce, &(1 << 20))?;
    // The kernel's timestamp is the packet's arrival, independent of this process' scheduling.
    setsockopt(&socket, sockopt::ReceiveTimestampns, &true)?;
    Ok(Link::Udp(socket))
}

fn tcp(to: SocketAddr) -> io::Result<Link> {
    let stream = TcpStream::connect_timeout(&to, DEADLINE)?;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    Ok(Link::Tcp {
        stream,
        out: Vec::new(),
        read: Vec::new(),
    })
}

/// Sends a packet. Returns false if the socket's buffer is full.
fn send_tcp(stream: &mut TcpStream, out: &mut Vec<u8>, number: u64) -> io::Result<bool> {
    let room = out.is_empty();
    if room {
        out.extend_from_slice(&(RECORD as u32).to_be_bytes());
        out.extend_from_slice(&record(number));
    }
    match stream.write(out) {
        Ok(length) => drop(out.drain(..length)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => {}
        Err(error) => return Err(error),
    }
    Ok(room)
}

fn receive_udp(socket: &Socket) -> io::Result<(u64, Duration)> {
    let mut buffer = [0; 64];
    let mut control = cmsg_space!(TimeSpec);
    let (length, stamp) = {
        let mut slices = [IoSliceMut::new(&mut buffer)];
        let message = recvmsg::<SockaddrStorage>(
            socket.as_raw_fd(),
            &mut slices,
            Some(&mut control),
            MsgFlags::MSG_DONTWAIT,
        )?;
        let stamp = message.cmsgs()?.find_map(|control| match control {
            ControlMessageOwned::ScmTimestampns(time) => Some(Duration::from(time)),
            _ => None,
        });
        (message.bytes, stamp)
    };
    Ok((number(&buffer[..length])?, stamp.unwrap_or_else(now)))
}

/// Reads an answer: a greeting and the record.
fn receive_tcp(stream: &mut TcpStream, read: &mut Vec<u8>) -> io::Result<(u64, Duration)> {
    loop {
        if let Some(&length) = read.first()
            && let Some(record) =
                read.get(1 + usize::from(length)..1 + usize::from(length) + RECORD)
        {
            let number = number(record)?;
            drop(read.drain(..1 + usize::from(length) + RECORD));
            return Ok((number, now()));
        }
        let mut buffer = [0; 4096];
        match stream.read(&mut buffer)? {
            0 => {
                return Err(io::Error::new(
                    ErrorKind::UnexpectedEof,
                    "closed by the server",
                ));
            }
            length => read.extend_from_slice(&buffer[..length]),
        }
    }
}
