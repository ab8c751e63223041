//! The client's side: dial from a namespace, exchange bytes, say precisely what went wrong.

use std::error::Error;
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, SockAddr, Socket, Type};

use super::WHO;
use crate::netns::NetNs;

/// Bytes per datagram of a burst that the kernel cuts up (`UDP_SEGMENT`).
const SEGMENT: u16 = 1400;
/// What is longer goes as a burst: 1500 − 20 − 8 bytes, the largest datagram that fits an Ethernet frame.
const MAX_DATAGRAM: usize = 1472;
/// Roomy enough for a burst of datagrams to wait until the reader is scheduled.
const RECEIVE_BUFFER: usize = 4 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    Tcp,
    Udp,
}

impl Protocol {
    pub const ALL: [Self; 2] = [Self::Tcp, Self::Udp];
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
        })
    }
}

/// Bytes that tell a shifted, swapped or repeated piece from the right one.
pub fn pattern(length: usize) -> Vec<u8> {
    // 251 is prime, so no two segments of a burst begin alike.
    (0..length).map(|at| (at % 251) as u8 ^ (at / 251) as u8).collect()
}

/// What to dial, and how.
#[derive(Clone, Copy, Debug)]
pub struct Dial {
    pub protocol: Protocol,
    pub to: SocketAddr,
    /// The client's own port; 0 lets the kernel choose.
    pub source_port: u16,
    /// How long each step (connect, write, read) may take.
    pub deadline: Duration,
}

/// What a client learned from an exchange whose bytes all came back as they were.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Name of the server that answered.
    pub backend: String,
    /// The client as that server saw it.
    pub source: SocketAddr,
}

/// What went wrong, and at which step.
#[derive(Debug)]
pub enum Fault {
    /// RST or ICMP port unreachable: somebody said no.
    Refused,
    /// Nobody said anything.
    TimedOut(&'static str),
    /// An answer came, but not what was sent.
    Corrupt(String),
    Io(&'static str, io::Error),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused => f.write_str("refused"),
            Self::TimedOut(step) => write!(f, "{step}: timed out"),
            Self::Corrupt(what) => write!(f, "corrupt answer: {what}"),
            Self::Io(step, error) => write!(f, "{step}: {error}"),
        }
    }
}

impl Error for Fault {}

impl Fault {
    fn at(step: &'static str) -> impl Fn(io::Error) -> Self {
        move |error| match error.kind() {
            ErrorKind::ConnectionRefused => Self::Refused,
            ErrorKind::TimedOut | ErrorKind::WouldBlock => Self::TimedOut(step),
            _ => Self::Io(step, error),
        }
    }
}

impl Dial {
    pub fn new(protocol: Protocol, to: SocketAddr) -> Self {
        Self { protocol, to, source_port: 0, deadline: Duration::from_millis(2500) }
    }

    pub fn source_port(self, source_port: u16) -> Self {
        Self { source_port, ..self }
    }

    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// Connects from inside `ns`. A UDP socket is connected too, so that it hears of refusals, but nothing is sent.
    pub fn connect(&self, ns: &NetNs) -> Result<Connection, Fault> {
        let socket = ns.run(|| self.socket()).map_err(Fault::at("make socket"))?;
        socket.connect_timeout(&self.to.into(), self.deadline).map_err(Fault::at("connect"))?;
        Ok(Connection { protocol: self.protocol, socket })
    }

    /// Connects, sends `payload` and gets it back.
    pub fn exchange(&self, ns: &NetNs, payload: &[u8]) -> Result<Answer, Fault> {
        self.connect(ns)?.exchange(payload)
    }

    fn socket(&self) -> io::Result<Socket> {
        let any: SocketAddr = match self.to {
            SocketAddr::V4(_) => ([0, 0, 0, 0], self.source_port).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, self.source_port).into(),
        };
        let socket = match self.protocol {
            Protocol::Tcp => {
                let socket = Socket::new(Domain::for_address(any), Type::STREAM, None)?;
                socket.set_tcp_nodelay(true)?;
                share_port(&socket, any)?;
                socket.bind(&any.into())?;
                socket
            }
            Protocol::Udp => udp_socket(any)?,
        };
        socket.set_read_timeout(Some(self.deadline))?;
        socket.set_write_timeout(Some(self.deadline))?;
        Ok(socket)
    }
}

pub(super) fn udp_socket(addr: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(addr), Type::DGRAM, None)?;
    setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER)?;
    share_port(&socket, addr)?;
    socket.bind(&SockAddr::from(addr))?;
    Ok(socket)
}

/// A client that names its port may use it for several destinations. Where the kernel is to choose it must not be
/// allowed: it would now and then give one port to two sockets with the same destination, each hearing the other's
/// answers.
fn share_port(socket: &Socket, addr: SocketAddr) -> io::Result<()> {
    socket.set_reuse_address(addr.ip().is_unspecified() && addr.port() != 0)
}

/// An open flow.
#[derive(Debug)]
pub struct Connection {
    protocol: Protocol,
    socket: Socket,
}

impl Connection {
    /// Sends `payload` in one write and returns who sent every byte of it back.
    pub fn exchange(&mut self, payload: &[u8]) -> Result<Answer, Fault> {
        match self.protocol {
            Protocol::Tcp => self.exchange_stream(payload),
            Protocol::Udp => self.exchange_datagrams(payload),
        }
    }

    fn exchange_stream(&mut self, payload: &[u8]) -> Result<Answer, Fault> {
        let length = u32::try_from(payload.len()).map_err(|_| Fault::Corrupt("payload too long to send".to_owned()))?;
        let request = [&length.to_be_bytes(), payload].concat();
        self.socket.write_all(&request).map_err(Fault::at("send"))?;
        let mut length = [0];
        self.socket.read_exact(&mut length).map_err(Fault::at("read greeting"))?;
        let mut greeting = vec![0; length[0].into()];
        self.socket.read_exact(&mut greeting).map_err(Fault::at("read greeting"))?;
        let mut echo = vec![0; payload.len()];
        self.socket.read_exact(&mut echo).map_err(Fault::at("read echo"))?;
        if let Some(at) = echo.iter().zip(payload).position(|(got, sent)| got != sent) {
            return Err(Fault::Corrupt(format!("byte {at} of {} differs", payload.len())));
        }
        Answer::parse(&greeting)
    }

    fn exchange_datagrams(&mut self, payload: &[u8]) -> Result<Answer, Fault> {
        let mut expected: Vec<&[u8]> = if payload.len() > MAX_DATAGRAM {
            setsockopt(&self.socket, sockopt::UdpGsoSegment, &i32::from(SEGMENT))
                .map_err(|errno| Fault::Io("set UDP_SEGMENT", errno.into()))?;
            payload.chunks(SEGMENT.into()).collect()
        } else {
            vec![payload]
        };
        self.socket.send(payload).map_err(Fault::at("send"))?;
        let mut buffer = vec![0; 1 << 16];
        while !expected.is_empty() {
            let length = self.socket.read(&mut buffer).map_err(Fault::at("read echo"))?;
            let Some(at) = expected.iter().position(|datagram| *datagram == &buffer[..length]) else {
                return Err(Fault::Corrupt(format!("a datagram of {length} bytes that was not sent")));
            };
            expected.swap_remove(at);
        }
        self.socket.send(WHO).map_err(Fault::at("send"))?;
        let length = self.socket.read(&mut buffer).map_err(Fault::at("read greeting"))?;
        Answer::parse(buffer[..length].get(1..).unwrap_or_default())
    }
}

impl Answer {
    fn parse(greeting: &[u8]) -> Result<Self, Fault> {
        let text = String::from_utf8_lossy(greeting);
        let parsed = text.split_once(' ').and_then(|(backend, source)| Some((backend, source.parse().ok()?)));
        let (backend, source) = parsed.ok_or_else(|| Fault::Corrupt(format!("greeting {text:?}")))?;
        Ok(Self { backend: backend.to_owned(), source })
    }
}
