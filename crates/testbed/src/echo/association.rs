//! The client's side of an SCTP association.

use std::io::{self, ErrorKind, Read};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc::ENOBUFS;
use nix::sys::socket::{MsgFlags, recv, setsockopt, sockopt};
use socket2::{SockAddr, Socket};

use super::client::uninterrupted;
use super::sctp::{Chunk, Packet, payload, ports};

/// An open or opening association, aborted with this value.
#[derive(Debug)]
pub(super) struct Association {
    socket: Socket,
    peer: SocketAddr,
    port: u16,
    tag: u32,
    peer_tag: u32,
    sent: u32,
    deadline: Duration,
}

impl Association {
    /// Connects the bound socket; each step may take `deadline`.
    pub(super) fn connect(
        socket: Socket,
        port: u16,
        peer: SocketAddr,
        deadline: Duration,
    ) -> io::Result<Self> {
        // Every raw socket between two addresses receives a refusal; the quoted packet shows its
        // association.
        match peer {
            SocketAddr::V4(_) => setsockopt(&socket, sockopt::Ipv4RecvErr, &true)?,
            SocketAddr::V6(_) => setsockopt(&socket, sockopt::Ipv6RecvErr, &true)?,
        }
        // The kernel interprets the port of an IPv6 raw address as a protocol.
        socket.connect(&SockAddr::from(SocketAddr::new(peer.ip(), 0)))?;
        let port = if port == 0 { free_port() } else { port };
        let tag = rand::random_range(1..u32::MAX);
        let mut association = Self {
            socket,
            peer,
            port,
            tag,
            peer_tag: 0,
            sent: 0,
            deadline,
        };
        association.send(Chunk::Init(tag))?;
        let cookie = association.wait(|chunk| match chunk {
            Chunk::InitAck(tag, cookie) => Some((tag, cookie)),
            _ => None,
        })?;
        association.peer_tag = cookie.0;
        association.send(Chunk::CookieEcho(cookie.1))?;
        association.wait(|chunk| (chunk == Chunk::CookieAck).then_some(()))?;
        Ok(association)
    }

    pub(super) fn send_message(&mut self, message: &[u8]) -> io::Result<()> {
        self.sent += 1;
        self.send(Chunk::Data(self.sent, message.to_vec()))
    }

    pub(super) fn receive_message(&mut self) -> io::Result<Vec<u8>> {
        self.wait(|chunk| match chunk {
            Chunk::Data(_, message) => Some(message),
            _ => None,
        })
    }

    fn send(&self, chunk: Chunk) -> io::Result<()> {
        let packet = Packet {
            src_port: self.port,
            dst_port: self.peer.port(),
            tag: self.peer_tag,
            chunk,
        };
        match self.socket.send(&packet.encode()) {
            // The error reports an earlier packet, perhaps of another association, and this call
            // sent nothing.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused && !self.is_refused()? => {
                self.send(packet.chunk)
            }
            // The packet was dropped on its way out, which the kernel reports only with RECVERR:
            // treat it as lost.
            Err(error) if error.raw_os_error() == Some(ENOBUFS) => Ok(()),
            result => result.map(drop),
        }
    }

    /// Returns the first result of `wanted` for a chunk.
    fn wait<T>(&self, wanted: impl Fn(Chunk) -> Option<T>) -> io::Result<T> {
        let end = Instant::now() + self.deadline;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            self.socket.set_read_timeout(Some(left))?;
            match self.receive() {
                Ok(Some(Chunk::Abort)) if self.peer_tag == 0 => {
                    return Err(ErrorKind::ConnectionRefused.into());
                }
                Ok(Some(Chunk::Abort)) => return Err(ErrorKind::ConnectionReset.into()),
                Ok(chunk) => {
                    if let Some(wanted) = chunk.and_then(&wanted) {
                        return Ok(wanted);
                    }
                }
                Err(error)
                    if error.kind() == ErrorKind::ConnectionRefused && !self.is_refused()? => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns a chunk if it belongs to this association.
    fn receive(&self) -> io::Result<Option<Chunk>> {
        let mut buffer = vec![0; 1 << 16];
        let length = uninterrupted(|| (&self.socket).read(&mut buffer))?;
        let packet = Packet::decode(payload(self.peer.ip(), &buffer[..length]));
        let is_ours = |packet: &Packet| {
            (packet.src_port, packet.dst_port, packet.tag)
                == (self.peer.port(), self.port, self.tag)
        };
        Ok(packet.filter(is_ours).map(|packet| packet.chunk))
    }

    /// Returns true if a queued error quotes a packet of this association.
    fn is_refused(&self) -> io::Result<bool> {
        let mut quoted = [0; 128];
        loop {
            match recv(
                self.socket.as_raw_fd(),
                &mut quoted,
                MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT,
            ) {
                Ok(length) if ports(&quoted[..length]) == Some((self.port, self.peer.port())) => {
                    return Ok(true);
                }
                Ok(_) => {}
                Err(Errno::EAGAIN) => return Ok(false),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl Drop for Association {
    fn drop(&mut self) {
        if self.peer_tag != 0 {
            let _ = self.send(Chunk::Abort); // The association ends in either case.
        }
    }
}

fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    32_768 + NEXT.fetch_add(1, Ordering::Relaxed) % 28_000
}
