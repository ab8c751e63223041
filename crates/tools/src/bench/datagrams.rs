//! The modes of UDP.

use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use anyhow::{Context, Result};
use nix::sys::socket::{self, MsgFlags, SockaddrStorage, setsockopt, sockopt};
use socket2::{Domain, Socket, Type};

use super::Mode;
use super::traffic::{Slice, TIMEOUT, Work};

/// Fits every link of a lab.
const STREAM_BYTES: usize = 1_400;
const SMALL_BYTES: usize = 64;
/// The usual length of a DNS query. The length of its answer follows.
const QUESTION_BYTES: usize = 48;
const ANSWER_BYTES: usize = 120;
/// The server's receive buffer is large: the benchmark measures the path, not the scheduler.
const RECEIVE_BUFFER: usize = 4 << 20;

pub(super) fn run(slice: &Slice<'_>, mode: Mode) -> Result<Work> {
    let server = bind(slice)?;
    setsockopt(&server, sockopt::RcvBufForce, &RECEIVE_BUFFER)
        .context("size the buffer of a server")?;
    let handle = server.try_clone().context("duplicate a socket")?;
    let received = AtomicU64::new(0);
    thread::scope(|scope| {
        scope.spawn(|| match mode {
            Mode::UdpRr | Mode::UdpRrYoung => echo(server, 1),
            Mode::UdpDns => echo(server, ANSWER_BYTES),
            _ => count(server, mode, &received),
        });
        let done = slice.client.run(|| match mode {
            Mode::UdpRr | Mode::UdpRrYoung => request_response(slice),
            Mode::UdpDns => questions(slice),
            _ => flood(slice, mode, &received),
        });
        // An unconnected socket returns an error, and its reader ends nevertheless.
        let _ = socket::shutdown(handle.as_raw_fd(), socket::Shutdown::Both);
        done
    })
}

/// Binds a server. A connected server that stays open may have the same address.
pub(super) fn bind(slice: &Slice<'_>) -> Result<UdpSocket> {
    let bind = || {
        let socket = Socket::new(Domain::for_address(slice.at), Type::DGRAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&slice.at.into()).map(|()| socket.into())
    };
    slice
        .server
        .run(bind)
        .with_context(|| format!("bind {}", slice.at))
}

pub(super) fn connect(slice: &Slice<'_>) -> Result<UdpSocket> {
    let socket = UdpSocket::bind(("0.0.0.0", 0)).context("bind a client")?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    socket
        .connect(slice.to)
        .with_context(|| format!("connect to {}", slice.to))?;
    Ok(socket)
}

fn request_response(slice: &Slice<'_>) -> Result<Work> {
    let socket = connect(slice)?;
    slice.timed(|| exchange(&socket).map(|()| 1))
}

pub(super) fn exchange(socket: &UdpSocket) -> Result<()> {
    socket.send(&[1]).context("send")?;
    socket
        .recv(&mut [0])
        .map(drop)
        .context("wait for an answer")
}

/// Sends each query from a new socket.
fn questions(slice: &Slice<'_>) -> Result<Work> {
    slice.timed(|| {
        let socket = connect(slice)?;
        socket.send(&[1; QUESTION_BYTES]).context("send")?;
        socket
            .recv(&mut [0; ANSWER_BYTES])
            .context("wait for an answer")?;
        Ok(1)
    })
}

/// Sends datagrams, and counts those that arrive.
fn flood(slice: &Slice<'_>, mode: Mode, received: &AtomicU64) -> Result<Work> {
    let socket = connect(slice)?;
    let datagram = vec![0x5a; size(mode)];
    let mut before = received.load(Ordering::Relaxed);
    slice.timed(|| {
        socket.send(&datagram).context("send")?;
        let now = received.load(Ordering::Relaxed);
        let news = now - before;
        before = now;
        Ok(news)
    })
}

fn size(mode: Mode) -> usize {
    if mode == Mode::UdpStream {
        STREAM_BYTES
    } else {
        SMALL_BYTES
    }
}

/// Answers with `len` bytes until the socket is shut down. After that it reads 0 bytes without a
/// sender, which the standard library does not expect.
pub(super) fn echo(socket: UdpSocket, len: usize) {
    let mut question = [0; SMALL_BYTES];
    let answer = vec![1; len];
    while let Ok((1.., Some(client))) =
        socket::recvfrom::<SockaddrStorage>(socket.as_raw_fd(), &mut question)
    {
        // The client notices a missing answer.
        let _ = socket::sendto(socket.as_raw_fd(), &answer, &client, MsgFlags::empty());
    }
}

fn count(socket: UdpSocket, mode: Mode, received: &AtomicU64) {
    let mut datagram = [0; STREAM_BYTES];
    while let Ok(length @ 1..) = socket.recv(&mut datagram) {
        received.fetch_add(
            if mode == Mode::UdpStream {
                length as u64
            } else {
                1
            },
            Ordering::Relaxed,
        );
    }
}
