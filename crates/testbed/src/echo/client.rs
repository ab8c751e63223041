//! The client's side: dial from a namespace, exchange bytes, say precisely what went wrong.

use std::error::Error;
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, SockAddr, Socket, Type};

use super::association::Association;
use super::{WHO, kernel_sctp, sctp};
use crate::lab::{LINK_MTU, Layout};
use crate::netns::NetNs;

/// Bytes per datagram of a burst that the kernel cuts up (`UDP_SEGMENT`).
const SEGMENT: u16 = 1400;
/// The largest datagram that fits an Ethernet frame, 1500 − 20 − 8 bytes. A longer payload goes as
/// a burst.
const MAX_DATAGRAM: usize = 1472;
/// How long an answer is waited for that a narrow path may have cost.
const LESSON: Duration = Duration::from_millis(300);
/// Roomy enough for a burst of datagrams to wait until the reader is scheduled.
const RECEIVE_BUFFER: usize = 4 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

impl Protocol {
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];
    /// The protocols that every kernel speaks.
    pub const COMMON: [Self; 2] = [Self::Tcp, Self::Udp];
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        })
    }
}

/// Bytes that tell a shifted, swapped or repeated piece from the right one.
pub fn pattern(length: usize) -> Vec<u8> {
    // 251 is prime, so no two segments of a burst begin alike.
    (0..length)
        .map(|at| (at % 251) as u8 ^ (at / 251) as u8)
        .collect()
}

/// A destination, and the way to dial it.
#[derive(Clone, Copy, Debug)]
pub struct Dial {
    pub protocol: Protocol,
    pub to: SocketAddr,
    /// The client's own address; none lets the kernel choose.
    pub source_ip: Option<IpAddr>,
    /// The client's own port; 0 lets the kernel choose.
    pub source_port: u16,
    /// The device that all packets must take, against the routes.
    pub device: Option<&'static str>,
    /// UDP: one datagram, however long, which IP cuts into fragments. Otherwise what is long goes
    /// as a burst of datagrams.
    pub fragments: bool,
    /// How long each step (connect, write, read) may take.
    pub deadline: Duration,
}

/// The result of an exchange whose bytes all came back as they were.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Name of the server that answered.
    pub backend: String,
    /// The client as that server saw it.
    pub source: SocketAddr,
}

/// A failure, with its step.
#[derive(Debug)]
pub enum Fault {
    /// RST or ICMP port unreachable: somebody said no.
    Refused,
    /// No answer came in time.
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
        let deadline = Duration::from_millis(2500);
        Self {
            protocol,
            to,
            source_ip: None,
            source_port: 0,
            device: None,
            fragments: false,
            deadline,
        }
    }

    pub fn source_ip(self, source_ip: IpAddr) -> Self {
        Self {
            source_ip: Some(source_ip),
            ..self
        }
    }

    pub fn device(self, device: &'static str) -> Self {
        Self {
            device: Some(device),
            ..self
        }
    }

    pub fn fragments(self) -> Self {
        Self {
            fragments: true,
            ..self
        }
    }

    pub fn source_port(self, source_port: u16) -> Self {
        Self {
            source_port,
            ..self
        }
    }

    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// Converses, and retries once without an answer where pods have a smaller MTU than the links.
    /// There the first datagram in IPv6 fragments is lost, and an ICMP error teaches its sender the
    /// path's MTU. The error may come late, and end a second conversation. On a busy machine one
    /// IPv4 datagram in some thousands is lost there: a fragment that overtakes its packet's first
    /// one is not translated.
    pub fn learning<T>(
        self,
        layout: Layout,
        converse: impl Fn(Self) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        if self.fragments && self.protocol == Protocol::Udp && layout.mtu() < LINK_MTU {
            let is_lesson = |fault: &Fault| matches!(fault, Fault::Io(_, error) if error.raw_os_error() == Some(nix::libc::EMSGSIZE));
            match converse(self.deadline(LESSON)) {
                Err(fault) if is_lesson(&fault) || matches!(fault, Fault::TimedOut(_)) => {}
                result => return result,
            }
            match converse(self) {
                Err(fault) if is_lesson(&fault) => {}
                result => return result,
            }
        }
        converse(self)
    }

    /// Connects from inside `ns`. A UDP socket is connected too, so that it hears of refusals, but
    /// nothing is sent.
    pub fn connect(&self, ns: &NetNs) -> Result<Connection, Fault> {
        let socket = ns.run(|| self.socket()).map_err(Fault::at("make socket"))?;
        let link = match self.protocol {
            Protocol::Sctp if !kernel_sctp::is_there() => {
                Association::connect(socket, self.source_port, self.to, self.deadline)
                    .map(Link::Association)
            }
            _ => socket
                .connect_timeout(&self.to.into(), self.deadline)
                .map(|()| match self.protocol {
                    Protocol::Tcp => Link::Stream(socket),
                    Protocol::Sctp => Link::Messages(socket),
                    Protocol::Udp => Link::Datagrams {
                        socket,
                        fragments: self.fragments,
                    },
                }),
        };
        Ok(Connection {
            link: link.map_err(Fault::at("connect"))?,
        })
    }

    /// Connects, sends `payload` and gets it back.
    pub fn exchange(&self, ns: &NetNs, payload: &[u8]) -> Result<Answer, Fault> {
        self.connect(ns)?.exchange(payload)
    }

    fn socket(&self) -> io::Result<Socket> {
        let from = SocketAddr::new(
            self.source_ip.unwrap_or_else(|| sctp::any(self.to.ip())),
            self.source_port,
        );
        let socket = match self.protocol {
            Protocol::Tcp => {
                let socket = Socket::new(Domain::for_address(from), Type::STREAM, None)?;
                socket.set_tcp_nodelay(true)?;
                share_port(&socket, from)?;
                socket.bind(&from.into())?;
                socket
            }
            Protocol::Udp => udp_socket(from)?,
            Protocol::Sctp if kernel_sctp::is_there() => kernel_sctp::socket(from)?,
            Protocol::Sctp => sctp::socket(from.ip())?,
        };
        socket.bind_device(self.device.map(str::as_bytes))?;
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

/// A client that names its port may use it for several destinations. Where the kernel chooses the
/// port, sharing is not allowed. The kernel would sometimes give one port to two sockets with the
/// same destination, and each would get the other's answers.
fn share_port(socket: &Socket, addr: SocketAddr) -> io::Result<()> {
    socket.set_reuse_address(addr.ip().is_unspecified() && addr.port() != 0)
}

/// An open flow.
#[derive(Debug)]
pub struct Connection {
    link: Link,
}

#[derive(Debug)]
enum Link {
    Stream(Socket),
    Datagrams {
        socket: Socket,
        fragments: bool,
    },
    /// SCTP of the kernel.
    Messages(Socket),
    Association(Association),
}

impl Connection {
    /// Sends `payload` and returns who sent every byte of it back.
    pub fn exchange(&mut self, payload: &[u8]) -> Result<Answer, Fault> {
        match &mut self.link {
            Link::Stream(socket) => exchange_stream(socket, payload, false),
            link => exchange_messages(link, payload),
        }
    }

    /// The client's own end and its peer's, as its socket tells them.
    pub fn ends(&self) -> Result<[SocketAddr; 2], Fault> {
        let (Link::Stream(socket) | Link::Datagrams { socket, .. } | Link::Messages(socket)) =
            &self.link
        else {
            return Err(Fault::Corrupt(
                "an association without a socket of its own".to_owned(),
            ));
        };
        let ends = [socket.local_addr(), socket.peer_addr()].into_iter();
        let ends = ends.map(|end| {
            end?.as_socket()
                .ok_or_else(|| io::Error::other("no IP address"))
        });
        let ends = ends
            .collect::<io::Result<Vec<_>>>()
            .map_err(Fault::at("ask for an address"))?;
        ends.try_into()
            .map_err(|_| Fault::Corrupt("not two ends".to_owned()))
    }

    /// Ends it at once: TCP by RST, so that the client's port is free again.
    pub fn reset(self) -> Result<(), Fault> {
        match self.link {
            Link::Stream(socket) => socket
                .set_linger(Some(Duration::ZERO))
                .map_err(Fault::at("reset")),
            Link::Datagrams { .. } | Link::Messages(_) | Link::Association(_) => Ok(()),
        }
    }

    /// Exchanges bytes as [`Connection::exchange`], and ends a TCP client's stream with the last
    /// byte: the answer comes by a half-open connection.
    pub fn exchange_last(mut self, payload: &[u8]) -> Result<Answer, Fault> {
        match &mut self.link {
            Link::Stream(socket) => exchange_stream(socket, payload, true),
            link => exchange_messages(link, payload),
        }
    }
}

/// In one write, so that the kernel cuts it up as late as it can.
fn exchange_stream(socket: &mut Socket, payload: &[u8], last: bool) -> Result<Answer, Fault> {
    let length = u32::try_from(payload.len())
        .map_err(|_| Fault::Corrupt("payload too long to send".to_owned()))?;
    let request = [&length.to_be_bytes(), payload].concat();
    socket.write_all(&request).map_err(Fault::at("send"))?;
    if last {
        socket
            .shutdown(Shutdown::Write)
            .map_err(Fault::at("half-close"))?;
    }
    let mut length = [0];
    socket
        .read_exact(&mut length)
        .map_err(Fault::at("read greeting"))?;
    let mut greeting = vec![0; length[0].into()];
    socket
        .read_exact(&mut greeting)
        .map_err(Fault::at("read greeting"))?;
    let mut echo = vec![0; payload.len()];
    socket
        .read_exact(&mut echo)
        .map_err(Fault::at("read echo"))?;
    if let Some(at) = echo.iter().zip(payload).position(|(got, sent)| got != sent) {
        return Err(Fault::Corrupt(format!(
            "byte {at} of {} differs",
            payload.len()
        )));
    }
    if last {
        let more = socket.read(&mut [0]).map_err(Fault::at("read the end"))?;
        (more == 0)
            .then_some(())
            .ok_or_else(|| Fault::Corrupt("more than was sent".to_owned()))?;
    }
    Answer::parse(&greeting)
}

fn exchange_messages(link: &mut Link, payload: &[u8]) -> Result<Answer, Fault> {
    let mut expected = link.send(payload).map_err(Fault::at("send"))?;
    while !expected.is_empty() {
        let echo = link.receive().map_err(Fault::at("read echo"))?;
        let Some(at) = expected.iter().position(|message| *message == echo) else {
            return Err(Fault::Corrupt(format!(
                "a message of {} bytes that was not sent",
                echo.len()
            )));
        };
        expected.swap_remove(at);
    }
    link.send(WHO).map_err(Fault::at("send"))?;
    let greeting = link.receive().map_err(Fault::at("read greeting"))?;
    Answer::parse(greeting.get(1..).unwrap_or_default())
}

impl Link {
    /// Returns the messages that went out.
    fn send<'a>(&mut self, payload: &'a [u8]) -> io::Result<Vec<&'a [u8]>> {
        match self {
            Self::Datagrams { socket, fragments }
                if payload.len() > MAX_DATAGRAM && !*fragments =>
            {
                let datagrams: Vec<&[u8]> = payload.chunks(SEGMENT.into()).collect();
                setsockopt(socket, sockopt::UdpGsoSegment, &i32::from(SEGMENT))?;
                match socket.send(payload) {
                    // Older kernels cut up only what the device computes checksums for.
                    Err(error) if error.raw_os_error() == Some(nix::libc::EIO) => {
                        setsockopt(socket, sockopt::UdpGsoSegment, &0)?;
                        datagrams
                            .iter()
                            .try_for_each(|datagram| socket.send(datagram).map(drop))?;
                    }
                    sent => drop(sent?),
                }
                Ok(datagrams)
            }
            Self::Association(association) => {
                let messages: Vec<&[u8]> = payload.chunks(sctp::MAX_MESSAGE).collect();
                messages
                    .iter()
                    .try_for_each(|message| association.send_message(message))?;
                Ok(messages)
            }
            Self::Datagrams { socket, .. } | Self::Stream(socket) | Self::Messages(socket) => {
                socket.send(payload)?;
                Ok(vec![payload])
            }
        }
    }

    fn receive(&mut self) -> io::Result<Vec<u8>> {
        match self {
            Self::Association(association) => association.receive_message(),
            Self::Datagrams { socket, .. } | Self::Stream(socket) | Self::Messages(socket) => {
                let mut buffer = vec![0; 1 << 16];
                let length = uninterrupted(|| socket.read(&mut buffer))?;
                buffer.truncate(length);
                Ok(buffer)
            }
        }
    }
}

/// Calls again after a signal. The kernel restarts no call on a socket with a timeout, and the
/// death of a child that another thread waits for is a signal.
pub(super) fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

impl Answer {
    fn parse(greeting: &[u8]) -> Result<Self, Fault> {
        let text = String::from_utf8_lossy(greeting);
        let parsed = text
            .split_once(' ')
            .and_then(|(backend, source)| Some((backend, source.parse().ok()?)));
        let (backend, source) =
            parsed.ok_or_else(|| Fault::Corrupt(format!("greeting {text:?}")))?;
        Ok(Self {
            backend: backend.to_owned(),
            source,
        })
    }
}
