//! The UDP and TCP sockets.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::debug;

use crate::cluster_names::Cluster;
use crate::message::{Transport, reply};
use crate::zone::Zone;

/// The maximum number of open streams. Further connections wait in the backlog.
const STREAMS: usize = 128;
/// The maximum number of datagrams in progress.
const QUESTIONS: usize = 64;
/// The maximum wait for a stream's next request while more than half of the streams are in use. It
/// bounds the time for which one client can occupy all streams.
const CROWDED: Duration = Duration::from_millis(500);
/// The maximum wait for a stream's next request, and for each response's write (RFC 7766 §6.2.3).
const IDLE: Duration = Duration::from_secs(10);

/// The sockets of one address.
#[derive(Debug)]
pub struct Server {
    zone: Zone,
    udp: UdpSocket,
    tcp: TcpListener,
}

impl Server {
    /// Listens at an address. Port 0 selects a free port.
    pub async fn bind(address: SocketAddr, zone: Zone) -> Result<Self> {
        let tcp = TcpListener::bind(address)
            .await
            .with_context(|| format!("listen at {address} by TCP"))?;
        let address = tcp.local_addr()?;
        let udp = UdpSocket::bind(address)
            .await
            .with_context(|| format!("listen at {address} by UDP"))?;
        Ok(Self {
            zone: zone.served_at(address.ip()),
            udp,
            tcp,
        })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Serves until a socket fails.
    pub async fn serve(self, cluster: impl Cluster) -> Result<()> {
        let Self { zone, udp, tcp } = self;
        tokio::select! {
            failed = datagrams(&zone, Arc::new(udp), &cluster) => failed.context("questions by UDP"),
            failed = streams(&zone, &tcp, &cluster) => failed.context("questions by TCP"),
        }
    }
}

/// Answers datagrams concurrently, so that a slow response delays no other response.
async fn datagrams(zone: &Zone, socket: Arc<UdpSocket>, cluster: &impl Cluster) -> Result<()> {
    let mut buffer = vec![0; usize::from(u16::MAX)];
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            received = socket.recv_from(&mut buffer), if open.len() < QUESTIONS => {
                let (length, client) = received?;
                if is_of_this_machine(client) {
                    let zone = zone.clone();
                    let cluster = cluster.clone();
                    let socket = Arc::clone(&socket);
                    let request = buffer[..length].to_vec();
                    open.spawn(async move { answer(&zone, &cluster, &socket, &request, client).await });
                }
            }
            Some(_) = open.join_next() => {}
        }
    }
}

async fn answer(
    zone: &Zone,
    cluster: &impl Cluster,
    socket: &UdpSocket,
    request: &[u8],
    client: SocketAddr,
) {
    // The client has retried by then.
    let Ok(Some(answer)) = timeout(IDLE, reply(zone, cluster, request, Transport::Datagram)).await
    else {
        return;
    };
    // The client may be gone, or filtered. Other clients are unaffected.
    if let Err(error) = socket.send_to(&answer, client).await {
        debug!(%client, %error, "a name's answer could not be sent");
    }
}

async fn streams(zone: &Zone, listener: &TcpListener, cluster: &impl Cluster) -> Result<()> {
    let mut open = JoinSet::new();
    let crowd = Arc::new(AtomicUsize::new(0));
    loop {
        crowd.store(open.len(), Ordering::Relaxed);
        tokio::select! {
            accepted = listener.accept(), if open.len() < STREAMS => match accepted {
                Ok((_, client)) if !is_of_this_machine(client) => {}
                Ok((stream, _)) => {
                    let zone = zone.clone();
                    let cluster = cluster.clone();
                    let crowd = Arc::clone(&crowd);
                    open.spawn(async move { stream_of(&zone, stream, &cluster, &crowd).await });
                }
                // The client closed the connection early, or file descriptors are exhausted.
                Err(error) => {
                    debug!(%error, "a connection for names could not be accepted");
                    tokio::task::yield_now().await;
                }
            },
            Some(_) = open.join_next() => {}
        }
    }
}

/// Returns true if the client is on this machine. With `route_localnet`, packets to a loopback
/// address may arrive on any device, but the kernel drops loopback sources there
/// (net/ipv4/route.c).
fn is_of_this_machine(client: SocketAddr) -> bool {
    client.ip().to_canonical().is_loopback()
}

/// Answers the requests of one stream in order.
async fn stream_of(
    zone: &Zone,
    mut stream: TcpStream,
    cluster: &impl Cluster,
    crowd: &AtomicUsize,
) -> io::Result<()> {
    let mut buffer = Vec::new();
    loop {
        let length = tokio::select! {
            length = timeout(IDLE, stream.read_u16()) => length??,
            () = while_crowded(crowd) => return Ok(()),
        };
        buffer.resize(usize::from(length), 0);
        timeout(IDLE, stream.read_exact(&mut buffer)).await??;
        let Some(answer) = reply(zone, cluster, &buffer, Transport::Stream).await else {
            return Ok(());
        };
        timeout(IDLE, stream.write_all(&answer)).await??;
    }
}

/// Returns when more than half of the streams are in use. Checks after each [`CROWDED`].
async fn while_crowded(crowd: &AtomicUsize) {
    loop {
        sleep(CROWDED).await;
        if crowd.load(Ordering::Relaxed) > STREAMS / 2 {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
