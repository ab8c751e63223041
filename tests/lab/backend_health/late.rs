//! A backend that answers late. A thread plays it, because the kernel has no such delay.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use etherparse::{SlicedPacket, TransportSlice};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockProtocol, SockType, recv, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;
use testbed::lab::Host;
use testbed::stranger::{self, Stranger};

use super::{CUT, HEAL, PORT};

/// Answers all SYNs for a host's port after a delay, in place of the host.
pub(super) struct Late<'a> {
    host: &'a Host,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<()>>,
}

/// A pending SYN-ACK.
struct Unanswered {
    due: Instant,
    from: SocketAddr,
    to: SocketAddr,
    acked: u32,
}

impl<'a> Late<'a> {
    pub(super) fn start(host: &'a Host, delay: Duration) -> Result<Self> {
        host.ns.nft(CUT)?;
        let stranger = Stranger::on(host)?;
        let socket = host.ns.run(|| -> Result<OwnedFd> {
            let socket = socket(
                AddressFamily::Packet,
                SockType::Datagram,
                SockFlag::empty(),
                SockProtocol::EthAll,
            )?;
            setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::new(0, 10_000))?;
            Ok(socket)
        });
        let socket = socket.context("open a packet socket")?;
        let stop = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&stop);
        let thread = host
            .ns
            .thread("late", move || answer(&socket, &stranger, delay, &until))?;
        Ok(Self { host, stop, thread })
    }

    pub(super) fn stop(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread
            .join()
            .map_err(|_| anyhow!("the late server has panicked"))??;
        self.host.ns.nft(HEAL)
    }
}

fn answer(socket: &OwnedFd, stranger: &Stranger, delay: Duration, stop: &AtomicBool) -> Result<()> {
    let mut unanswered = Vec::new();
    let mut buffer = [0; 256];
    while !stop.load(Ordering::Relaxed) {
        match recv(
            socket.as_raw_fd(),
            &mut buffer,
            nix::sys::socket::MsgFlags::empty(),
        ) {
            Ok(length) => unanswered.extend(syn(&buffer[..length], Instant::now() + delay)),
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(errno) => return Err(errno).context("receive"),
        }
        let now = Instant::now();
        for Unanswered {
            from, to, acked, ..
        } in unanswered.extract_if(.., |unanswered: &mut Unanswered| unanswered.due <= now)
        {
            stranger.send(stranger::tcp(from, to).syn().ack(acked), to.ip())?;
        }
    }
    Ok(())
}

/// Reads a SYN for the port, as a packet with its IP header.
fn syn(packet: &[u8], due: Instant) -> Option<Unanswered> {
    let sliced = SlicedPacket::from_ip(packet).ok()?;
    let net = sliced.net?;
    let (src, dst) = match (net.ipv4_ref(), net.ipv6_ref()) {
        (Some(ip), _) => (
            IpAddr::V4(ip.header().source_addr()),
            IpAddr::V4(ip.header().destination_addr()),
        ),
        (_, Some(ip)) => (
            IpAddr::V6(ip.header().source_addr()),
            IpAddr::V6(ip.header().destination_addr()),
        ),
        _ => return None,
    };
    let Some(TransportSlice::Tcp(tcp)) = sliced.transport else {
        return None;
    };
    let from = SocketAddr::new(dst, tcp.destination_port());
    let to = SocketAddr::new(src, tcp.source_port());
    let is_syn = tcp.syn() && !tcp.ack() && from.port() == PORT;
    is_syn.then_some(Unanswered {
        due,
        from,
        to,
        acked: tcp.sequence_number().wrapping_add(1),
    })
}
