//! The client's side: dials from a namespace, exchanges bytes, reports faults precisely.

use std::error::Error;
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use nix::sys::socket::{setsockopt, sockopt};
use nix::unistd::Pid;
use socket2::{Domain, SockAddr, Socket, Type};

use super::association::Association;
use super::{WHO, kernel_sctp, sctp};
use crate::lab::{LINK_MTU, Layout};
use crate::netns::NetNs;

/// The bytes per datagram of a burst that the kernel segments (`UDP_SEGMENT`).
const SEGMENT: u16 = 1400;
/// The largest datagram in an Ethernet frame, 1500 − 20 − 8 bytes. A longer payload is sent as a
/// burst.
const MAX_DATAGRAM: usize = 1472;
/// The wait for an answer that a path's MTU may have dropped.
const LESSON: Duration = Duration::from_millis(300);
/// Large enough to queue a burst until the reader is scheduled.
const RECEIVE_BUFFER: usize = 4 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

impl Protocol {
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];
    /// The protocols of every kernel.
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

/// Returns bytes that reveal shifted, swapped or repeated pieces.
pub fn pattern(length: usize) -> Vec<u8> {
    // Each pattern is the start of a longer one, and debug builds compute them slowly.
    static LONGEST: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    let mut longest = LONGEST.lock().unwrap_or_else(PoisonError::into_inner);
    // 251 is prime, so the segments of a burst start differently.
    let rest = (longest.len()..length).map(|at| (at % 251) as u8 ^ (at / 251) as u8);
    longest.extend(rest);
    longest[..length].to_vec()
}

/// A destination, and how to dial it.
#[derive(Clone, Copy, Debug)]
pub struct Dial {
    pub protocol: Protocol,
    pub to: SocketAddr,
    /// The client's address; `None` lets the kernel choose.
    pub source_ip: Option<IpAddr>,
    /// The client's port; 0 lets the kernel choose.
    pub source_port: u16,
    /// The device of all packets, overriding routes.
    pub device: Option<&'static str>,
    /// UDP: sends one datagram of any length, which IP fragments. Otherwise long payloads are sent
    /// as a burst of datagrams.
    pub fragments: bool,
    /// The time limit of each step (connect, write, read).
    pub deadline: Duration,
}

/// The result of an exchange that returned all bytes unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The name of the server that answered.
    pub backend: String,
    /// The client's address as the server saw it.
    pub source: SocketAddr,
}

/// A failure, with its step.
#[derive(Debug)]
pub enum Fault {
    /// RST or ICMP port unreachable.
    Refused,
    /// No answer came in time.
    TimedOut(&'static str),
    /// The answer differs from the sent bytes.
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

    /// Converses, with retries after a timeout if pods have a smaller MTU than the links. There the
    /// first datagram in IPv6 fragments is lost in each direction, and an ICMP error reports the
    /// path's MTU. A late error can end a second conversation.
    pub fn learning<T>(
        self,
        layout: Layout,
        converse: impl Fn(Self) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let is_cut = self.fragments && self.protocol == Protocol::Udp && layout.mtu() < LINK_MTU;
        let lessons = if is_cut { 2 } else { 0 };
        let is_lesson = |fault: &Fault| match fault {
            Fault::Io(_, error) => error.raw_os_error() == Some(nix::libc::EMSGSIZE),
            fault => matches!(fault, Fault::TimedOut(_)),
        };
        for _ in 0..lessons {
            match converse(self.deadline(LESSON)) {
                Err(fault) if is_lesson(&fault) => {}
                result => return result,
            }
        }
        converse(self)
    }

    /// Connects from inside `ns`. A UDP socket is connected too, to receive refusals, without
    /// sending.
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

    /// Connects, sends `payload` and receives it back.
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

/// Lets a client with a fixed port use it for several destinations. With a port of the kernel's
/// choice sharing is off: the kernel could give two sockets with the same destination one port, and
/// each would receive the other's answers.
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
    /// The kernel's SCTP.
    Messages(Socket),
    Association(Association),
}

impl Connection {
    /// Sends `payload` and returns the server that echoed it.
    pub fn exchange(&mut self, payload: &[u8]) -> Result<Answer, Fault> {
        match &mut self.link {
            Link::Stream(socket) => exchange_stream(socket, payload, false),
            link => exchange_messages(link, payload),
        }
    }

    /// Returns the client's own end and its peer's, from its socket.
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

    /// Ends the flow at once: TCP by RST, which frees the client's port.
    pub fn reset(self) -> Result<(), Fault> {
        match self.link {
            Link::Stream(socket) => socket
                .set_linger(Some(Duration::ZERO))
                .map_err(Fault::at("reset")),
            Link::Datagrams { .. } | Link::Messages(_) | Link::Association(_) => Ok(()),
        }
    }

    /// Exchanges like [`Connection::exchange`], and closes a TCP client's direction with the last
    /// byte: the answer uses a half-closed connection.
    pub fn exchange_last(mut self, payload: &[u8]) -> Result<Answer, Fault> {
        match &mut self.link {
            Link::Stream(socket) => exchange_stream(socket, payload, true),
            link => exchange_messages(link, payload),
        }
    }
}

/// Writes once, so that the kernel segments as late as possible.
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
    if echo != payload {
        let pairs = echo.iter().zip(payload);
        let at = pairs.take_while(|(got, sent)| got == sent).count();
        return Err(Fault::Corrupt(format!(
            "byte {at} of {} differs",
            payload.len()
        )));
    }
    if last {
        // Not by `read`, which a signal interrupts.
        let mut more = Vec::new();
        let end = socket.take(1).read_to_end(&mut more);
        end.map_err(Fault::at("read the end"))?;
        more.is_empty()
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
    fn send<'a>(&mut self, payload: &'a [u8]) -> io::Result<Vec<&'a [u8]>> {
        match self {
            Self::Datagrams { socket, fragments }
                if payload.len() > MAX_DATAGRAM && !*fragments =>
            {
                let datagrams: Vec<&[u8]> = payload.chunks(SEGMENT.into()).collect();
                setsockopt(socket, sockopt::UdpGsoSegment, &i32::from(SEGMENT))?;
                match socket.send(payload) {
                    // Older kernels only segment if the device computes checksums.
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
            Self::Datagrams { socket, .. } => {
                in_order(|| socket.send(payload))?;
                Ok(vec![payload])
            }
            Self::Stream(socket) | Self::Messages(socket) => {
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

/// Sends the fragments of a datagram in the order in which a network card would.
///
/// A veth device queues packets for the sender's CPU. If the thread moved to another CPU between two
/// fragments, the later fragment could overtake the first.
pub(super) fn in_order<T>(send: impl FnOnce() -> T) -> T {
    let this = Pid::from_raw(0);
    let before = stay_here(this);
    let sent = send();
    if let Ok(before) = before {
        // The set of CPUs may have changed meanwhile. Then the thread stays where it is.
        let _restored = sched_setaffinity(this, &before);
    }
    sent
}

/// Binds the thread to its CPU. Returns its CPUs before.
fn stay_here(this: Pid) -> nix::Result<CpuSet> {
    let before = sched_getaffinity(this)?;
    let mut here = CpuSet::new();
    here.set(sched_getcpu()?)?;
    sched_setaffinity(this, &here)?;
    Ok(before)
}

/// Retries a call after a signal. The kernel does not restart socket calls with a timeout, and
/// SIGCHLD may arrive at any time.
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
